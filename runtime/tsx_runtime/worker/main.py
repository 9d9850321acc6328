"""The model's process: load once, then one frame in, one frame out, until the front end closes the socket."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from tsx_archiver import parse_model_config
from tsx_runtime.shared.nonblocking_output import keep_going, send_output_to
from tsx_runtime.wire import Buffer, Frame, FrameError, Item, Kind, LoadOrder
from tsx_runtime.worker.channel import Channel
from tsx_runtime.worker.diagnostics import printing, profiling
from tsx_runtime.worker.diagnostics.memory import Idle, keep_freed_memory
from tsx_runtime.worker.diagnostics.reporting import reporting
from tsx_runtime.worker.diagnostics.tracebacks import format_error
from tsx_runtime.worker.exceptions import LoadError, NobodyWaits, in_words
from tsx_runtime.worker.execution import async_handlers, continuous, step_times
from tsx_runtime.worker.execution.batch import Ahead, Model, answer_batch
from tsx_runtime.worker.execution.micro_batching import with_micro_batches
from tsx_runtime.worker.execution.prefetch import overlaps, read_ahead
from tsx_runtime.worker.execution.recovery import Ceiling
from tsx_runtime.worker.execution.warmup import warm_up
from tsx_runtime.worker.handler_api import loader, modules, ts_shim
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.metrics import Metrics, PredictionTime
from tsx_runtime.worker.handler_api.modules import own_modules
from tsx_runtime.worker.handlers.models.compiler_cache import protect_compiler_cache

INPUT_KINDS = ("image", "text", "json", "file")
END_GRACE = 5.0  # seconds that a handler may take to return once nobody waits for its answer

logger = logging.getLogger("tsx.worker")

_HOW_TO_HEED = "In its initialize, say `self.model = self.in_precision(self.model)`, which BaseHandler has, or take the key away."


def run(sock: socket.socket, channel: Channel | None = None, *, stay: bool = True) -> None:
    """Serve one model on `sock`. The front end ends this by closing its end, or by killing the process.

    `stay`: whether SIGINT and SIGTERM mean nothing to this process. `channel`: what speaks on the socket, where that is more than one.
    """
    if stay and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches the whole group; the front end drains first
            signal.signal(number, _stay)  # not SIG_IGN, which the programs that a handler starts would inherit
            if hasattr(signal, "siginterrupt"):
                signal.siginterrupt(number, False)  # nor may it break off what a library waits for
        if hasattr(signal, "pthread_sigmask"):  # not on Windows
            signal.pthread_sigmask(
                signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM]
            )  # blocked by the fork server; a handler's own programs need not be
    stderr = logging.StreamHandler()
    stderr.setFormatter(printing.OwnText())
    logging.basicConfig(level=logging.INFO, handlers=[stderr])
    keep_freed_memory()
    channel = channel or Channel(sock)
    pid = os.getpid()
    running = printing.RunningIds()
    try:
        with reporting(channel, running):
            model = _load(channel, running)
            if model is not None:
                _serve(channel, model)
    except FrameError as error:
        logger.error("the front end sent what is not a frame: %s", error)
    except ConnectionError:
        pass  # the front end is gone, and with it everyone who waits
    except OSError:
        if os.getpid() == pid:
            raise
        logger.error(
            "a process that the handler forked came back from the handler, as the worker does; it is ended, and the worker goes on"
        )
        os._exit(1)
    finally:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # closing is not enough: the thread that polls it holds it open
        sock.close()


def _stay(number: int, frame: object) -> None:
    """What a stop means to a worker: nothing. What it waits for goes on."""


def begin_process(sock: socket.socket, files: int | None) -> None:
    """What holds for a process that serves a model and does nothing else."""
    keep_going()
    if files is not None:
        import resource  # here, because Windows has none

        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    end_with_front_end(sock)
    # How the server starts processes is not how the handler does: a DataLoader's need neither import torch anew nor be pickled.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # the first is this Python's own choice
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=sock.close)  # a child of the handler's must not hold it open, nor answer on it


def end_with_front_end(sock: socket.socket) -> None:
    """End this process some time after the front end has gone: a handler that never returns would outlive it.

    A handler that does return lets `run` read the end by itself, well before.
    """
    threading.Thread(target=_exit_after_hang_up, args=(sock.fileno(),), name="tsx-end", daemon=True).start()


def _exit_after_hang_up(fd: int) -> None:
    if hasattr(select, "poll"):  # not on Windows
        poller = select.poll()
        poller.register(fd, 0)  # wakes for a hang-up only
        poller.poll()
        time.sleep(END_GRACE)
        os._exit(1)


def _load(channel: Channel, running: printing.RunningIds) -> Model | None:
    frame = channel.read()
    if frame is None:
        return None
    if frame.kind is not Kind.LOAD:
        raise FrameError(f"the first frame is {frame.kind.name}, not LOAD")
    order = cast("LoadOrder", json.loads(bytes(frame.extra)))
    direct = order["at_terminal"] or not order["output"]
    shape: printing.Shape = "json" if order["log_json"] else "text" if direct else "marked"
    printing.dress_output(shape, printing.Whose(order["model_name"], order["model_version"], order["worker"]), running)
    if order["output"]:
        label = f"W-{order['worker']}-{order['model_name']}_{order['model_version']}"
        with suppress(OSError):  # nobody reads it: the server is on its way out
            send_output_to(order["output"], label, all_of_it=not direct)
    try:
        model = load_model(order)
        _warm_up(model, order)
    except BaseException as error:  # the boundary to a user's code: whatever it raises, the front end is told
        channel.send(Kind.FAILED, frame.batch, extra=json.dumps(_report(error)).encode())
        return None
    running.context = model.context
    facts = {
        "device": device_of(model.entry.instance, order),
        "prefetch": model.mode == "batch" and overlaps(model),
        "input": input_of(model.entry.instance),
        "precision": precision_of(model.entry.instance),
    }
    channel.send(Kind.LOADED, frame.batch, extra=json.dumps(facts).encode())
    return model


def _warm_up(model: Model, order: LoadOrder) -> None:
    if not model.context.model_yaml_config.get("warmup"):
        return
    config, _ = parse_model_config(model.context.model_yaml_config)  # what is wrong in it was told when it was registered
    id, start, end = order["sequence_headers"]
    warm_up(model, config, Path(order["model_dir"]), order["batch_size"], (id, start, end) if order["stateful"] else None)


def _serve(channel: Channel, model: Model) -> None:
    gc.collect()
    gc.freeze()  # the model's objects live as long as the worker: no collection needs to look at them again
    idle = Idle()
    if model.mode != "batch":
        (continuous if model.mode == "continuous" else async_handlers).serve(channel, model, partial(_answer_ping, idle), idle.end)
        return
    profile = profiling.Profile(model.context.model_name, model.worker) if profiling.is_wanted() else None
    serve = _serve_ahead if overlaps(model) else _serve_in_turn
    try:
        serve(channel, model, idle, partial(profile.call, _reply) if profile else _reply)
    finally:
        if profile:
            profile.write()


def _serve_ahead(channel: Channel, model: Model, idle: Idle, reply: Callable[..., bool]) -> None:
    for waiting in read_ahead(channel, model, partial(_answer_ping, idle)):
        idle.asked = 0
        if not reply(channel, model, waiting.batch, waiting.items, waiting.ahead, waiting.began):
            return
        del waiting  # an idle worker holds on to no body


def _serve_in_turn(channel: Channel, model: Model, idle: Idle, reply: Callable[..., bool]) -> None:
    while (frame := channel.read()) is not None:
        if frame.kind is not Kind.BATCH:
            _answer_ping(idle, channel, frame)
        else:
            idle.asked = 0
            if not reply(channel, model, frame.batch, frame.items):
                return
        del frame  # an idle worker holds on to no body


def _reply(
    channel: Channel, model: Model, batch: int, items: Sequence[Item], ahead: Ahead | None = None, began: float | None = None
) -> bool:
    """Answer one batch, which was begun at `began` (time.monotonic()) if not now. Whether this process can answer another."""
    channel.begin(batch)
    start = time.monotonic()
    if ahead is not None:
        laps = step_times.begin(ahead.laps)
    elif model.has_steps:
        laps = step_times.begin_next()
    else:
        laps = []
    outcome = answer_batch(model, items, partial(_send_piece, channel, batch, model.stops), ahead, start)
    done = time.monotonic()
    if model.prediction_time is not None and done >= model.prediction_time.due:
        model.prediction_time.report(start, done)
    extra = step_times.times(start if began is None else began, done, laps)
    if pending := model.metrics.pending:
        extra += json.dumps(pending.take()).encode()
    channel.reply(batch, outcome.answers, extra)
    if outcome.device_lost:
        logger.error("the device does not answer this process any more, so the worker ends")
    return not outcome.device_lost


def _answer_ping(idle: Idle, channel: Channel, frame: Frame) -> None:
    if frame.kind is Kind.CANCEL:  # of a batch that is answered by now, or that is not to be stopped
        return
    if frame.kind is not Kind.PING:
        raise FrameError(f"a worker does not expect {frame.kind.name} here")
    channel.send(Kind.PONG, frame.batch)
    idle.on_ping()


def _send_piece(channel: Channel, batch: int, stops: bool, position: int, headers: Buffer, body: Buffer) -> None:
    if stops and channel.is_called_off():
        raise NobodyWaits
    if not channel.send_piece(batch, position, headers, body):
        logger.warning("a part of an answer is dropped: it was sent by a thread of the handler's after the answer was complete")


def load_model(order: LoadOrder) -> Model:
    """Raises `LoadError`, or whatever a handler raises that is not an `Exception`."""
    model_dir = Path(order["model_dir"])
    _take_place(order)
    _enter(model_dir)
    ts_shim.install()
    _limit_threads(order["threads"])
    metrics = Metrics(order["model_name"])
    metrics.declare(order["model_metrics"])
    context = Context(
        order["model_name"],
        order["model_dir"],
        order["manifest"],
        order["batch_size"],
        gpu_of_rank(order),
        order["server_version"],
        order["limit_max_image_pixels"],
        metrics,
        yaml.safe_load(order["model_config"]),
    )
    context.header_key_sequence_id, context.header_key_sequence_start, context.header_key_sequence_end = order["sequence_headers"]
    coroutines = loader.Coroutines()
    adapt = partial(with_micro_batches, context=context)
    entry = loader.load_entry(order["handler"], model_dir, context, coroutines, order["envelope"], adapt)
    has_steps = step_times.watch(entry.instance)
    if not heeds_precision(entry.instance, context.model_yaml_config):
        logger.warning("precision in model-config.yaml changes nothing: %s does not heed it. %s", entry.name, _HOW_TO_HEED)
    if order["mode"] == "async" and order["envelope"]:
        raise LoadError("asyncCommunication does not go with a service_envelope: its requests would run one after the other. Remove one.")
    model = Model(
        entry,
        context,
        coroutines,
        order["decode_input_request"] and not getattr(entry.instance, "takes_raw_bodies", False),
        order["max_response_size"],
        Ceiling(),
        metrics,
        retry=order["ranks"] == 1  # ranks would fall out of step
        and context.model_yaml_config.get("retryFailedBatch", not order["stateful"]) is not False,
        response_timeout=order["response_timeout"],
        worker=order["worker"],
        alone=order["ranks"] == 1,
        prediction_time=PredictionTime(metrics, order["every_prediction_time"]),
        version=order["model_version"],
        enveloped=order["envelope"] == "kservev2",
        mode=order["mode"],
        has_steps=has_steps,
    )
    return model._replace(stops=model.mode == "batch" and model.alone and not order["stateful"] and not overlaps(model))


def heeds_precision(instance: Any, config: Mapping[str, Any]) -> bool:
    """Whether the handler did what `precision` says, if anything; one that does tells it by an attribute of that name."""
    return config.get("precision") is None or precision_of(instance) is not None


def precision_of(instance: Any) -> str | None:
    """What the handler says that its model reckons with, because it was asked for."""
    precision = getattr(instance, "precision", None)
    return precision if isinstance(precision, str) else None


def device_of(instance: Any, order: LoadOrder) -> str:
    """What the handler says it runs on; of one that does not say, what it was given."""
    device = getattr(instance, "device", None)
    if device is not None:
        return str(device)
    gpu = gpu_of_rank(order)
    return "cpu" if gpu is None else f"cuda:{gpu}"


def input_of(instance: Any) -> str | None:
    """What the handler says that it takes (`input_kind`): what a person who tries it is asked for."""
    kind = getattr(instance, "input_kind", None)
    return kind if kind in INPUT_KINDS else None


def gpu_of_rank(order: LoadOrder) -> int | None:
    """The GPU of this process, counted among those that it sees. The ranks of a group share out the worker's GPUs in their order."""
    if order["gpu_id"] is None or order["ranks"] == 1:
        return order["gpu_id"]
    return int(os.environ["LOCAL_RANK"]) * max(1, order["gpus"] // order["ranks"])


def _take_place(order: LoadOrder) -> None:
    """The cores and devices that the server has for this worker; before anything looks how many there are."""
    os.environ.update(order["variables"])
    protect_compiler_cache()
    if order["cores"] is not None and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, order["cores"])
        except OSError as error:
            logger.warning("the worker cannot be pinned to the cores %s: %s", order["cores"], error.strerror)


def _enter(model_dir: Path) -> None:
    """Handlers open the files of their archive by relative path, and import its modules."""
    try:
        os.chdir(model_dir)
    except OSError as error:
        raise LoadError(f"The model's directory {model_dir} cannot be entered: {error.strerror}.") from error
    own_modules.enter(model_dir)


def _limit_threads(threads: int | None) -> None:
    """Torch reads the environment when it is imported, and takes calls afterwards."""
    if threads is None:
        return
    torch = sys.modules.get("torch")
    if torch is None:
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    elif torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _report(error: BaseException) -> dict[str, str]:
    """For people: what is wrong, and the traceback of the handler's own code, without the way there."""
    cause = error.__cause__ if isinstance(error, LoadError) else error
    message = str(error) if isinstance(error, LoadError) else f"The model could not be loaded: {in_words(error)}"
    return {"message": message, "traceback": "" if cause is None else _own_traceback(cause)}


def _own_traceback(error: BaseException) -> str:
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith((loader.__file__, modules.__file__, __file__, "<frozen importlib")):
        tb = tb.tb_next
    return format_error(error, tb)
