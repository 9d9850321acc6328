"""A worker without a server: a worker process that loads a model and answers batches."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, NamedTuple

import psutil

from tsx_archiver import OpenArchive, parse_model_config
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.search.variants import changes
from tsx_runtime import wire
from tsx_runtime.core.hidden_credentials import WORKER_DEFAULTS, hidden_variables
from tsx_runtime.core.models.handlers import handler_of
from tsx_runtime.core.models.load_order import envelope_of, load_order
from tsx_runtime.core.models.plan import RegisterOrder, plan
from tsx_runtime.core.placement.hardware import gpu_count
from tsx_runtime.core.placement.placement import Machine, placement_of
from tsx_runtime.core.workers.launch import Launch, launch_of
from tsx_runtime.errors import BadRequest
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.cores import cpu_count
from tsx_runtime.wire import Buffer, Item, Kind, LoadOrder

LAST_LINES = 6  # lines of the log in an error message
END_TIMEOUT_S = 5.0
OUT_OF_MEMORY_METRIC = (
    "tsx_oom_retries_total"  # counts batches that a worker split after running out of memory
)


class WorkerFailed(Exception):
    """A worker failed. The message is the reason, for the user."""


class WorkerSpec(NamedTuple):
    """The launch and the load command of a worker."""

    load: LoadOrder
    launch: Launch
    startup_timeout: float


class BatchReply(NamedTuple):
    """The reply to a batch, with the worker's times in seconds.

    `stages` are the times of preprocess, inference and postprocess; NaN for a missing step.
    """

    answers: list[ComparedAnswer]
    seconds: float
    stages: tuple[float, float, float]


def worker_spec(archive: OpenArchive, configuration: Configuration, batch_size: int) -> WorkerSpec:
    """Return the spec of one worker of a variant, for batches of at most this size.

    Raises:
        WorkerFailed: Such a worker is not possible.
    """
    settings = Settings.model_validate({})
    config, _ = parse_model_config(
        {
            **archive.config.raw,
            **changes(configuration, archive.config.raw),
            "batchSize": batch_size,
        }
    )
    archive = replace(archive, config=config)
    if configuration.device != "cpu" and not gpu_count():
        raise WorkerFailed("there is no GPU here that torch could use")
    try:
        worker_plan = plan(
            RegisterOrder(url=""),
            config,
            settings,
            gpu_count() if configuration.device != "cpu" else 0,
        )
        handler = handler_of(
            archive,
            archive.manifest.handler or settings.default_service_handler or "",
            archive.manifest.runtime,
        )
    except BadRequest as error:
        raise WorkerFailed(str(error)) from error
    if worker_plan.strategy.mode != "batch" or worker_plan.strategy.sequences is not None:
        raise WorkerFailed(
            "its requests join and leave at any time (sequences, continuous batching, tasks), so"
            " the time of a batch cannot be measured"
        )
    if config.use_venv:
        raise WorkerFailed(
            "it has an interpreter of its own (useVenv), which only a server sets up"
        )
    gpus = worker_plan.gpus[: worker_plan.parallel.gpus]
    placement = placement_of(
        Machine(cpu_count()),
        worker_plan.parallel,
        threads=worker_plan.threads,
        worker=0,
        workers=1,
        gpus=gpus,
    )
    # The worker does not share cores, so every batch has the same number of threads.
    placement = placement._replace(shares_cores=False)
    name, version = archive.manifest.model_name, archive.manifest.version
    load = load_order(
        archive,
        worker_plan,
        placement,
        settings,
        name=name,
        version=version,
        handler=handler,
        envelope=envelope_of(archive, settings),
        worker="bench",
        gpus=len(gpus),
    )
    launch = (
        launch_of(worker_plan.parallel, None, threads=placement.threads, group_name=f"{name}_bench")
        or Launch()
    )
    return WorkerSpec(load, launch, worker_plan.startup_timeout)


def model_variables() -> dict[str, str]:
    """Return the environment for an archive's code, without the secrets that a server hides."""
    hidden = hidden_variables(Settings.model_validate({}), os.environ)
    return {
        **WORKER_DEFAULTS,
        **{name: value for name, value in os.environ.items() if name not in hidden},
    }


@contextmanager
def start_worker(
    spec: WorkerSpec, variables: dict[str, str] | None = None
) -> Iterator[StandaloneWorker]:
    """Yield a loaded worker. It ends in any case.

    Raises:
        WorkerFailed: The worker does not load.
    """
    server_socket, worker_socket = socket.socketpair()
    with server_socket, tempfile.TemporaryFile() as log:
        with worker_socket:
            process = subprocess.Popen(
                spec.launch.command(worker_socket.fileno(), None),
                env={**model_variables(), **spec.launch.variables, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[worker_socket.fileno()],
                start_new_session=True,
            )
        try:
            worker = StandaloneWorker(server_socket, process, log, spec.load["response_timeout"])
            worker.load(spec)
            yield worker
            server_socket.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)  # The worker may still write a file, such as a profile.
        finally:
            with suppress(ProcessLookupError, PermissionError):  # The process group may be empty.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class StandaloneWorker:
    """A worker process made by `start_worker`."""

    device = "cpu"  # reported by the loaded worker
    precision: str | None = None  # reported by the handler
    form: str | None = None  # the loaded form, if forms are configured
    forms_passed_over: Sequence[str] = ()  # reasons why preferred forms do not run
    load_seconds = 0.0  # time from the load command to readiness

    def __init__(
        self,
        sock: socket.socket,
        process: subprocess.Popen[bytes],
        log: IO[bytes],
        response_timeout: float,
    ) -> None:
        self.pid = process.pid
        self._sock = sock
        self._process = process
        self._log = log
        self._response_timeout = response_timeout
        self._batches = itertools.count(1)

    def load(self, spec: WorkerSpec) -> None:
        start = time.monotonic()
        self._send(Kind.LOAD, 0, extra=json.dumps(spec.load).encode())
        frame = self._receive(
            spec.startup_timeout,
            f"it was not loaded within {spec.startup_timeout:g} seconds (startupTimeout)",
        )
        reply = json.loads(bytes(frame.extra))
        if frame.kind is not Kind.LOADED:
            raise WorkerFailed(reply["message"])
        self.load_seconds = time.monotonic() - start
        self.device, self.precision = reply["device"], reply.get("precision")
        self.form, self.forms_passed_over = reply.get("form"), reply.get("forms_passed_over", ())

    def answer(self, batch: Sequence[Item]) -> BatchReply:
        """Return the reply to a batch.

        Raises:
            WorkerFailed: The worker dies, or runs out of memory.
        """
        self._send(Kind.BATCH, next(self._batches), batch)
        late_text = (
            f"a batch of {len(batch)} was not answered within {self._response_timeout:g} seconds"
            " (responseTimeout)"
        )
        pieces: defaultdict[int, bytes] = defaultdict(bytes)
        # The time counts up to the last piece of the answer.
        while (frame := self._receive(self._response_timeout, late_text)).kind is Kind.PIECE:
            for index, _, body in frame.items:
                pieces[index] += bytes(body)
        extra = bytes(frame.extra)
        _, seconds, *stages = wire.TIMES.unpack_from(extra)
        if any(
            metric["name"] == OUT_OF_MEMORY_METRIC
            for metric in json.loads(extra[wire.TIMES.size :] or b"[]")
        ):
            raise WorkerFailed(f"a batch of {len(batch)} does not fit the memory of {self.device}")
        answers = [
            ComparedAnswer(status, _headers(meta), pieces[index] + bytes(body))
            for index, (status, meta, body) in enumerate(frame.items)
        ]
        return BatchReply(answers, seconds, (stages[0], stages[1], stages[2]))

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process and its descendants so far."""
        total = 0.0
        with suppress(psutil.Error):
            root_process = psutil.Process(self.pid)
            for process in (root_process, *root_process.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def _send(self, kind: Kind, batch: int, items: Sequence[Item] = (), extra: bytes = b"") -> None:
        self._sock.settimeout(self._response_timeout)
        try:
            self._sock.sendall(b"".join(wire.encode(kind, batch, items, extra)))
        except OSError as error:
            raise WorkerFailed(self._end_reason()) from error

    def _receive(self, seconds: float, late_text: str) -> wire.Frame:
        """Return the next frame that is not a report; reports are in the log as well.

        The time limit applies to the wait for each part of a frame.
        """
        self._sock.settimeout(seconds)
        try:
            while True:
                header = wire.decode_header(self._receive_exactly(wire.HEADER.size))
                frame = wire.decode(header, self._receive_exactly(header.size))
                if frame.kind is not Kind.REPORT:
                    return frame
        except TimeoutError as error:
            raise WorkerFailed(late_text) from error
        except ConnectionError as error:
            raise WorkerFailed(self._end_reason()) from error

    def _receive_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError
            view = view[count:]
        return data

    def _end_reason(self) -> str:
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "the worker closed its connection"
        log_text = last_lines(self._log)
        return f"the worker ended ({exit_text(code)})" + (f": {log_text}" if log_text else "")


def _headers(block: Buffer) -> dict[str, str]:
    return {name.lower(): value for name, value in wire.parse_header_block(str(block, "latin-1"))}


def exit_text(code: int) -> str:
    """Describe a process's return code."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return (
        f"{name}, which is what a system that is out of memory sends" if name == "SIGKILL" else name
    )


def last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:])


def items_of(payloads: Sequence[Payload]) -> list[Item]:
    """Return the requests in the form in which a server passes them to workers."""
    items: list[Item] = []
    for number, payload in enumerate(payloads):
        names = {name.lower() for name, _ in payload.headers}
        content_type = (
            [("Content-Type", payload.content_type)]
            if payload.content_type and "content-type" not in names
            else []
        )
        head = [
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in (*content_type, *payload.headers)
        ]
        items.append(
            (
                0,
                wire.request_meta(
                    f"bench-{number}", payload.query.encode("latin-1", "replace"), head
                ),
                payload.body,
            )
        )
    return items


def batch_of(items: Sequence[Item], size: int, number: int) -> list[Item]:
    """Return batch `number`, counted from 0.

    Batches take the items in turn, so that each item gets different neighbours.
    """
    start = number * size
    return [items[position % len(items)] for position in range(start, start + size)]
