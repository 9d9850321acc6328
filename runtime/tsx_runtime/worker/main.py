"""The main loop of a worker: load the model, then answer one frame after the other until the front
end closes the socket.
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
from tsx_runtime.worker.diagnostics.memory import Idle, keep_freed_memory
from tsx_runtime.worker.diagnostics.reporting import reporting
from tsx_runtime.worker.diagnostics.tracebacks import format_error, outline
from tsx_runtime.worker.exceptions import ClientsGone, LoadError, in_words
from tsx_runtime.worker.execution import async_handlers, continuous, step_times
from tsx_runtime.worker.execution.batch import PreparedBatch, ServedModel, answer_batch
from tsx_runtime.worker.execution.prefetch import overlaps, read_ahead
from tsx_runtime.worker.handler_api import loader, modules
from tsx_runtime.worker.model_loading import facts_of, load_model, warm_up_model

# requests of a batch; to be woken for more of them costs each little, and others have use for the
# core
FEW = 16
END_GRACE = 5.0  # seconds that a handler may take to return once the front end is gone

logger = logging.getLogger("tsx.worker")
loading = logging.getLogger(
    "tsx.loading"
)  # the front end is told what this logs by FAILED, and what the other logs by REPORT


def run(sock: socket.socket, channel: FrameSocket | None = None, *, stay: bool = True) -> None:
    """Serve one model on `sock`.

    The front end ends this by closing its end, or by killing the process.

    `stay`: whether this process ignores SIGINT and SIGTERM. `channel`: another kind of channel on
    the socket, such as a group's.
    """
    if stay and threading.current_thread() is threading.main_thread():
        for number in _STOPS:  # a Ctrl-C reaches the whole group; the front end drains first
            signal.signal(
                number, _stay
            )  # not SIG_IGN, which the programs that a handler starts would inherit
            if hasattr(signal, "siginterrupt"):
                signal.siginterrupt(
                    number, False
                )  # nor may it interrupt a system call of a library
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(
                before=_hold_signals,
                after_in_parent=_release_signals,
                after_in_child=_restore_signals,
            )
        if hasattr(signal, "pthread_sigmask"):  # not on Windows
            signal.pthread_sigmask(
                signal.SIG_UNBLOCK, _STOPS
            )  # blocked by the fork server; a handler's own programs need not be
    stderr = logging.StreamHandler()
    stderr.setFormatter(printing.WorkerTextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[stderr])
    keep_freed_memory()
    channel = channel or FrameSocket(sock)
    pid = os.getpid()
    running = printing.RunningIds()
    try:
        with reporting(channel, running):
            model = _load(channel, running)
            if model is not None:
                _serve(channel, model)
    except FrameError as error:
        logger.error("the front end sent an invalid frame: %s", error)
    except ConnectionError:
        pass  # the front end is gone, and all clients with it
    except OSError:
        if os.getpid() == pid:
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
            sock.shutdown(
                socket.SHUT_RDWR
            )  # closing is not enough: the thread that polls it holds it open
        sock.close()


def _stay(number: int, frame: object) -> None:
    """A worker ignores stop signals, and system calls continue."""


_STOPS = (signal.SIGINT, signal.SIGTERM)
_masks = threading.local()  # before a fork, of the thread that forks


def _hold_signals() -> None:
    """Keep a stop signal for a child until it is its own master: it may be sent as soon as the
    child has a number.
    """
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _restore_signals() -> None:
    """Let stop signals end a process that the handler has forked, as they end any other."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _release_signals()


def begin_process(sock: socket.socket, files: int | None) -> None:
    """Prepare a process that serves a model and does nothing else."""
    install_lossy_output()
    if files is not None:
        import resource  # here, because Windows has none

        resource.setrlimit(
            resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    # A handler that never returns would outlive the front end; one that does return lets `run` read
    # the end by itself, well before.
    threading.Thread(
        target=_exit_after_hang_up, args=(sock.fileno(),), name="tsx-end", daemon=True
    ).start()
    # How the server starts processes is not how the handler does: a DataLoader's need neither
    # import torch again nor be pickled.
    multiprocessing.set_start_method(
        multiprocessing.get_all_start_methods()[0], force=True
    )  # the first is this Python's own choice
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(
            after_in_child=sock.close
        )  # a child process of the handler must not hold it open, nor answer on it


def _exit_after_hang_up(fd: int) -> None:
    """End this process some time after the front end has gone."""
    if hasattr(select, "poll"):  # not on Windows
        poller = select.poll()
        poller.register(fd, 0)  # wakes for a hang-up only
        poller.poll()
        time.sleep(END_GRACE)
        os._exit(1)


def _load(channel: FrameSocket, running: printing.RunningIds) -> ServedModel | None:
    frame = channel.read()
    if frame is None:
        return None
    if frame.kind is not Kind.LOAD:
        raise FrameError(f"the first frame is {frame.kind.name}, not LOAD")
    order = cast("LoadOrder", json.loads(bytes(frame.extra)))
    direct = order["at_terminal"] or not order["output"]
    shape: printing.OutputFormat = "json" if order["log_json"] else "text" if direct else "marked"
    printing.format_output(
        shape,
        printing.ModelLabel(order["model_name"], order["model_version"], order["worker"]),
        running,
    )
    if order["output"]:
        label = f"W-{order['worker']}-{order['model_name']}_{order['model_version']}"
        with suppress(OSError):  # no reader: the server is stopping
            send_output_to(order["output"], label, include_python=not direct)
    try:
        model = load_model(order)
        warm_up_model(model, order)
    except (
        BaseException
    ) as error:  # the boundary to a user's code: whatever it raises is reported to the front end
        report = failure_report(error)
        if shape == "marked":
            report["outline"] = str(
                report["traceback"]
            ).rstrip()  # logs in files have TorchServe's form
            loading.error(
                "%s", "\n".join(filter(None, (str(report["message"]), str(report["outline"]))))
            )
        channel.send(Kind.FAILED, frame.batch, extra=json.dumps(report).encode())
        return None
    running.context = model.context
    channel.send(Kind.LOADED, frame.batch, extra=json.dumps(facts_of(model, order)).encode())
    return model


def _serve(channel: FrameSocket, model: ServedModel) -> None:
    gc.collect()
    # the model's objects live as long as the worker: no collection needs to look at them again
    gc.freeze()
    idle = Idle()
    if model.mode != "batch":
        (continuous if model.mode == "continuous" else async_handlers).serve(
            channel, model, partial(_on_other, model, idle), idle.end
        )
        return
    profile = (
        profiling.Profile(model.context.model_name, model.worker) if profiling.is_wanted() else None
    )
    serve = _serve_ahead if overlaps(model) else _serve_in_turn
    try:
        serve(channel, model, idle, partial(profile.call, _reply) if profile else _reply)
    finally:
        if profile:
            profile.write()


def _serve_ahead(
    channel: FrameSocket, model: ServedModel, idle: Idle, reply: Callable[..., bool]
) -> None:
    for waiting in read_ahead(channel, model, partial(_on_other, model, idle)):
        idle.asked = 0
        if not reply(channel, model, waiting.batch, waiting.items, waiting.ahead, waiting.began):
            return
        del waiting  # an idle worker keeps no body in memory


def _serve_in_turn(
    channel: FrameSocket, model: ServedModel, idle: Idle, reply: Callable[..., bool]
) -> None:
    may_poll = (
        CAN_POLL and threading.current_thread() is threading.main_thread()
    )  # else the front end's thread is beside it
    while (frame := channel.read()) is not None:
        channel.polls = may_poll and len(frame.items) <= FEW
        if frame.kind is not Kind.BATCH:
            _on_other(model, idle, channel, frame)
        else:
            idle.asked = 0
            if not reply(channel, model, frame.batch, frame.items):
                return
        del frame  # an idle worker keeps no body in memory


def _reply(
    channel: FrameSocket,
    model: ServedModel,
    batch: int,
    items: Sequence[Item],
    ahead: PreparedBatch | None = None,
    began: float | None = None,
) -> bool:
    """Answer one batch, which was started at `began` (time.monotonic()) or now.

    Whether this process can answer another.
    """
    channel.begin(batch)
    if model.threads is not None:
        model.threads.begin(len(items))
    start = time.monotonic()
    if ahead is not None:
        laps = step_times.begin(ahead.laps)
    elif model.has_steps:
        laps = step_times.begin_next()
    else:
        laps = []
    outcome = answer_batch(
        model, items, partial(_send_piece, channel, batch, model.stops), ahead, start
    )
    done = time.monotonic()
    if model.threads is not None:
        model.threads.end(done, done - start)
    if model.prediction_time is not None and done >= model.prediction_time.due:
        model.prediction_time.report(start, done)
    extra = step_times.times(start if began is None else began, done, laps)
    if pending := model.metrics.pending:
        extra += json.dumps(pending.take()).encode()
    channel.reply(batch, outcome.answers, extra)
    if outcome.device_lost:
        logger.error("the device no longer responds to this process, so the worker exits")
    return not outcome.device_lost


def _on_other(model: ServedModel, idle: Idle, channel: FrameSocket, frame: Frame) -> None:
    """Any frame but a batch."""
    if frame.kind is Kind.CANCEL:  # of a batch that is answered already, or that is not stopped
        return
    if frame.kind is Kind.THREADS:
        if model.threads is not None:
            model.threads.reshare(frame.batch)
        return
    if frame.kind is not Kind.PING:
        raise FrameError(f"a worker does not expect {frame.kind.name} here")
    channel.send(Kind.PONG, frame.batch)
    idle.on_ping()


def _send_piece(
    channel: FrameSocket, batch: int, stops: bool, position: int, headers: Buffer, body: Buffer
) -> None:
    if stops and channel.is_called_off():
        raise ClientsGone
    if not channel.send_piece(batch, position, headers, body):
        logger.warning(
            "a part of an answer is dropped: it was sent by a thread of the handler's after the"
            " answer was complete"
        )


def failure_report(error: BaseException) -> dict[str, str | bool]:
    """The message, the traceback of the handler's own code, without the frames of the loader, and
    the same as the log has it.
    """
    cause, message = error.__cause__, str(error)
    if not isinstance(error, LoadError):
        cause, message = error, f"The model could not be loaded: {in_words(error)}"
    if cause is None:
        return {"message": message, "traceback": "", "outline": "", "out_of_memory": False}
    lines = outline(cause).splitlines()
    short = "\n".join(
        dropwhile(lambda line: line[:2] != "  " and line.partition(": ")[2] in message, lines)
    )
    return {
        "message": message,
        "traceback": _own_traceback(cause),
        "outline": short,
        "out_of_memory": is_out_of_memory(cause),
    }


def _own_traceback(error: BaseException) -> str:
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(
        (loader.__file__, modules.__file__, model_loading.__file__, __file__, "<frozen importlib")
    ):
        tb = tb.tb_next
    return format_error(error, tb)
