"""The main loop of a worker.

A worker loads its model, and then answers frames until the front end closes the socket.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import dropwhile
from typing import cast

from tsx_runtime.shared.nonblocking_output import install_lossy_output, send_output_to
from tsx_runtime.wire import Buffer, Frame, FrameError, Item, Kind, LoadOrder
from tsx_runtime.worker import model_loading
from tsx_runtime.worker.channel import CAN_POLL, FrameSocket
from tsx_runtime.worker.codecs.responses import is_out_of_memory
from tsx_runtime.worker.diagnostics import printing, profiling
from tsx_runtime.worker.diagnostics.memory import IdleWatch, keep_freed_memory
from tsx_runtime.worker.diagnostics.reporting import report_to_front_end
from tsx_runtime.worker.diagnostics.tracebacks import format_error, outline
from tsx_runtime.worker.exceptions import ClientsGone, LoadError, describe_error
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import PreparedBatch, ServedModel, answer_batch
from tsx_runtime.worker.execution.loop import find_loop
from tsx_runtime.worker.execution.prefetch import can_overlap_steps, read_ahead
from tsx_runtime.worker.handler_api import loader, modules
from tsx_runtime.worker.model_loading import describe_model, load_model, warm_up_model

# The largest batch after which the socket is polled. For a larger one, the cost of a wake-up per
# request is small.
MAX_POLLED_BATCH = 16
END_GRACE_S = 5.0  # how long a handler may run after the front end has gone

logger = logging.getLogger("tsx.worker")
# For failures to load, which the front end gets in the frame FAILED, not in a REPORT.
load_logger = logging.getLogger("tsx.loading")


def run(
    sock: socket.socket, channel: FrameSocket | None = None, *, ignores_signals: bool = True
) -> None:
    """Serve one model until the front end closes the socket or kills the process.

    Args:
        sock: The socket to the front end.
        channel: A channel of another class for the socket, such as a group's.
        ignores_signals: Whether this process ignores SIGINT and SIGTERM.
    """
    if ignores_signals and threading.current_thread() is threading.main_thread():
        # Ctrl-C sends a signal to the whole process group, but the front end must drain first.
        for number in _STOP_SIGNALS:
            # SIG_IGN would not do: programs that a handler starts would inherit it.
            signal.signal(number, _ignore_signal)
            if hasattr(signal, "siginterrupt"):
                # Signals must not interrupt the system calls of libraries.
                signal.siginterrupt(number, False)
        if hasattr(os, "register_at_fork"):  # Windows has no fork.
            os.register_at_fork(
                before=_block_signals,
                after_in_parent=_restore_signal_mask,
                after_in_child=_reset_signals_in_child,
            )
        if hasattr(signal, "pthread_sigmask"):  # Windows has none.
            # The fork server has blocked these signals; a handler's programs would inherit the
            # mask.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    stderr = logging.StreamHandler()
    stderr.setFormatter(printing.WorkerTextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[stderr])
    keep_freed_memory()
    channel = channel or FrameSocket(sock)
    worker_pid = os.getpid()
    running_ids = printing.RunningIds()
    try:
        with report_to_front_end(channel, running_ids):
            model = _load(channel, running_ids)
            if model is not None:
                _serve(channel, model)
    except FrameError as error:
        logger.error("the front end sent an invalid frame: %s", error)
    except ConnectionError:
        pass  # The front end is gone, and all clients with it.
    except OSError:
        if os.getpid() == worker_pid:
            raise
        logger.error(
            "a process that the handler forked returned from the handler; it is stopped, and the"
            " worker continues"
        )
        os._exit(1)
    finally:
        for handler in logging.getLogger().handlers:
            handler.flush()
        with suppress(OSError):
            # Without this, the thread that polls the socket would keep it open.
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def _ignore_signal(number: int, frame: object) -> None:
    """Ignore a stop signal, without interrupting system calls."""


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_signal_masks = threading.local()  # the signal mask of each thread before it forks


def _block_signals() -> None:
    """Block stop signals until a forked child has reset its signal handlers."""
    _signal_masks.before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def _restore_signal_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _signal_masks.before_fork)


def _reset_signals_in_child() -> None:
    """Let stop signals end this process, which the handler has forked."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _restore_signal_mask()


def begin_process(sock: socket.socket, max_open_files: int | None) -> None:
    """Prepare a process that is only a worker."""
    install_lossy_output()
    if max_open_files is not None:
        import resource  # Windows has none.

        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max_open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    # This thread ends the process if a handler never returns after the front end has gone.
    # Otherwise `run` ends the process first.
    threading.Thread(
        target=_exit_after_hang_up, args=(sock.fileno(),), name="tsx-end", daemon=True
    ).start()
    # A handler starts processes by the first method, which is Python's default. With fork, the
    # processes of a DataLoader need not import torch again, and nothing needs to be pickled.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    if hasattr(os, "register_at_fork"):  # Windows has no fork.
        # A child process of the handler must not keep the socket open or send on it.
        os.register_at_fork(after_in_child=sock.close)


def _exit_after_hang_up(fd: int) -> None:
    """End this process END_GRACE_S after the front end has gone."""
    if hasattr(select, "poll"):  # Windows has none.
        poller = select.poll()
        poller.register(fd, 0)  # With the mask 0, only a hang-up ends the poll.
        poller.poll()
        time.sleep(END_GRACE_S)
        os._exit(1)


def _load(channel: FrameSocket, running_ids: printing.RunningIds) -> ServedModel | None:
    frame = channel.read()
    if frame is None:
        return None
    if frame.kind is not Kind.LOAD:
        raise FrameError(f"the first frame is {frame.kind.name}, not LOAD")
    order = cast("LoadOrder", json.loads(bytes(frame.extra)))
    is_output_direct = order["at_terminal"] or not order["output"]
    output_format: printing.OutputFormat = (
        "json" if order["log_json"] else "text" if is_output_direct else "marked"
    )
    printing.format_output(
        output_format,
        printing.ModelLabel(order["model_name"], order["model_version"], order["worker"]),
        running_ids,
    )
    if order["output"]:
        label = f"W-{order['worker']}-{order['model_name']}_{order['model_version']}"
        with suppress(OSError):  # The server is stopping.
            send_output_to(order["output"], label, include_python=not is_output_direct)
    try:
        model = load_model(order)
        if model.mode != "batch":
            find_loop(model.mode)  # Loading fails here if the feature is missing.
        warm_up_model(model, order)
    except BaseException as error:  # the boundary to a user's code
        report = failure_report(error)
        if output_format == "marked":
            # The lines of log files look as in TorchServe.
            report["outline"] = str(report["traceback"]).rstrip()
            load_logger.error(
                "%s", "\n".join(filter(None, (str(report["message"]), str(report["outline"]))))
            )
        channel.send(Kind.FAILED, frame.batch, extra=json.dumps(report).encode())
        return None
    running_ids.context = model.context
    channel.send(Kind.LOADED, frame.batch, extra=json.dumps(describe_model(model, order)).encode())
    return model


def _serve(channel: FrameSocket, model: ServedModel) -> None:
    gc.collect()
    # The model's objects live as long as the worker, so collections need not check them.
    gc.freeze()
    idle = IdleWatch()
    if model.mode != "batch":
        find_loop(model.mode).serve(
            channel, model, partial(_on_control_frame, model, idle), idle.reset
        )
        return
    profile = (
        profiling.Profile(model.context.model_name, model.worker)
        if profiling.is_enabled()
        else None
    )
    serve = _serve_ahead if can_overlap_steps(model) else _serve_in_turn
    try:
        serve(channel, model, idle, partial(profile.call, _reply) if profile else _reply)
    finally:
        if profile:
            profile.write()


def _serve_ahead(
    channel: FrameSocket, model: ServedModel, idle: IdleWatch, reply: Callable[..., bool]
) -> None:
    for read_batch in read_ahead(channel, model, partial(_on_control_frame, model, idle)):
        idle.heartbeats = 0
        if not reply(
            channel,
            model,
            read_batch.batch,
            read_batch.items,
            read_batch.prepared,
            read_batch.started_at,
        ):
            return
        del read_batch  # An idle worker keeps no body in memory.


def _serve_in_turn(
    channel: FrameSocket, model: ServedModel, idle: IdleWatch, reply: Callable[..., bool]
) -> None:
    # If this is not the main thread, the front end runs in the same process and needs the core.
    may_poll = CAN_POLL and threading.current_thread() is threading.main_thread()
    while (frame := channel.read()) is not None:
        channel.is_polling = may_poll and len(frame.items) <= MAX_POLLED_BATCH
        if frame.kind is not Kind.BATCH:
            _on_control_frame(model, idle, channel, frame)
        else:
            idle.heartbeats = 0
            if not reply(channel, model, frame.batch, frame.items):
                return
        del frame  # An idle worker keeps no body in memory.


def _reply(
    channel: FrameSocket,
    model: ServedModel,
    batch: int,
    items: Sequence[Item],
    prepared: PreparedBatch | None = None,
    started_at: float | None = None,
) -> bool:
    """Answer a batch, and return whether this process can answer another one.

    `started_at` is the start of the batch (time.monotonic()); None means now.
    """
    channel.begin(batch)
    if model.thread_tuning is not None:
        model.thread_tuning.begin(len(items))
    start = time.monotonic()
    if prepared is not None:
        laps = step_times.begin(prepared.laps)
    elif model.has_steps:
        laps = step_times.begin_next()
    else:
        laps = []
    outcome = answer_batch(
        model,
        items,
        partial(_send_piece, channel, batch, model.stops_for_gone_clients),
        prepared,
        start,
    )
    end = time.monotonic()
    if model.thread_tuning is not None:
        model.thread_tuning.end(end, end - start)
    if model.prediction_time is not None and end >= model.prediction_time.next_report_at:
        model.prediction_time.report(start, end)
    extra = step_times.encode_times(start if started_at is None else started_at, end, laps)
    if pending := model.metrics.pending:
        extra += json.dumps(pending.take()).encode()
    channel.reply(batch, outcome.answers, extra)
    if outcome.device_lost:
        logger.error("the device no longer responds to this process, so the worker exits")
    return not outcome.device_lost


def _on_control_frame(
    model: ServedModel, idle: IdleWatch, channel: FrameSocket, frame: Frame
) -> None:
    """Handle a frame that is not a batch."""
    if frame.kind is Kind.CANCEL:  # The batch is complete already, or cannot be stopped.
        return
    if frame.kind is Kind.THREADS:
        if model.thread_tuning is not None:
            model.thread_tuning.set_cores(frame.batch)
        return
    if frame.kind is not Kind.PING:
        raise FrameError(f"a worker does not expect {frame.kind.name} here")
    channel.send(Kind.PONG, frame.batch)
    idle.on_ping()


def _send_piece(
    channel: FrameSocket,
    batch: int,
    stops_for_gone_clients: bool,
    position: int,
    headers: Buffer,
    body: Buffer,
) -> None:
    if stops_for_gone_clients and channel.is_cancelled():
        raise ClientsGone
    if not channel.send_piece(batch, position, headers, body):
        logger.warning(
            "a part of an answer is dropped: it was sent by a thread of the handler's after the"
            " answer was complete"
        )


def failure_report(error: BaseException) -> dict[str, str | bool]:
    """Return the message, the traceback without tsx's frames, and the outline for the log."""
    cause, message = error.__cause__, str(error)
    if not isinstance(error, LoadError):
        cause, message = error, f"The model could not be loaded: {describe_error(error)}"
    if cause is None:
        return {"message": message, "traceback": "", "outline": "", "out_of_memory": False}
    lines = outline(cause).splitlines()
    short_outline = "\n".join(
        dropwhile(lambda line: line[:2] != "  " and line.partition(": ")[2] in message, lines)
    )
    return {
        "message": message,
        "traceback": _handler_traceback(cause),
        "outline": short_outline,
        "out_of_memory": is_out_of_memory(cause),
    }


def _handler_traceback(error: BaseException) -> str:
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(
        (loader.__file__, modules.__file__, model_loading.__file__, __file__, "<frozen importlib")
    ):
        tb = tb.tb_next
    return format_error(error, tb)
