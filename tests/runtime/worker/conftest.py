"""A real worker process, which tests use over its socket like the front end."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import socket
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml

from tsx_runtime import wire
from tsx_runtime.core.workers.forked import _ensure_fork_server
from tsx_runtime.core.workers.preload import PRELOAD
from tsx_runtime.wire import Kind
from tsx_runtime.worker.launch.entry import run

# A C++ compiler on a busy machine may take a third of this time.
DEADLINE_S = 180

Headers = Sequence[tuple[bytes, bytes]]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        error = json.loads(self.body)
        assert error["code"] == self.status
        assert self.headers == {"content-type": "application/json"}
        return str(error["message"])


class Request(NamedTuple):
    body: bytes = b""
    headers: Headers = ()
    query: bytes = b""


def a_request(body: Any, content_type: str = "", query: bytes = b"", **headers: str) -> Request:
    """Make a request. A body that is not bytes is sent as JSON."""
    if not isinstance(body, bytes):
        body, content_type = json.dumps(body).encode(), "application/json"
    all_headers = ({"Content-Type": content_type} if content_type else {}) | headers
    return Request(
        body, [(name.encode(), value.encode()) for name, value in all_headers.items()], query
    )


class Worker:
    """A worker process that has received LOAD, with the socket to it."""

    directory: Path  # the model's directory

    def __init__(self, order: wire.LoadOrder) -> None:
        self.sock, worker_sock = socket.socketpair()
        self.sock.settimeout(DEADLINE_S)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOAD])
        # Later tests may use this fork server, so it is started as the front end starts it.
        _ensure_fork_server()
        # The process is not a daemon, because handlers may start processes.
        self.process = context.Process(target=run, args=(worker_sock,))
        # A worker imports __main__; without this patch that would be pytest.
        with worker_sock, mock.patch.dict(sys.modules, __main__=types.ModuleType("__main__")):
            self.process.start()
        self._batches = itertools.count(1)
        self.pieces: list[tuple[int, bytes, bytes]] = []
        self.metrics: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.prediction_times: list[dict[str, Any]] = []
        self.send(Kind.LOAD, 0, extra=json.dumps(order).encode())
        frame = self.receive()
        assert frame is not None
        self.loaded = frame.kind is Kind.LOADED
        self.report = json.loads(bytes(frame.extra))

    def send(self, kind: Kind, batch: int, items: Any = (), extra: bytes = b"") -> None:
        self.sock.sendall(b"".join(wire.encode(kind, batch, items, extra)))

    def receive(self) -> wire.Frame | None:
        """Return the next frame that is not a REPORT; reports are added to `reports`."""
        while head := self._exactly(wire.HEADER.size):
            header = wire.decode_header(head)
            frame = wire.decode(header, self._exactly(header.size))
            if frame.kind is not Kind.REPORT:
                return frame
            self.reports.append(json.loads(bytes(frame.extra)))
        return None

    def expect(self, kind: Kind) -> wire.Frame:
        """Return the next frame, which must be of this kind."""
        frame = self.receive()
        assert frame is not None, "the worker ended"
        assert frame.kind is kind
        return frame

    def ping(self) -> None:
        self.send(Kind.PING, 7)
        assert self.expect(Kind.PONG).batch == 7

    def values(self, *requests: Request | bytes) -> list[Any]:
        """Return the parsed answers, all of which must be successful."""
        assert self.loaded, self.report
        answers = self.ask(*requests)
        assert [answer.status for answer in answers] == [200] * len(requests), answers
        return [json.loads(answer.body) for answer in answers]

    def ask_json(self, request: Request | bytes = b"") -> Any:
        """Return the parsed answer to one request."""
        return json.loads(self.ask(request)[0].body)

    def ask_bodies(self, *requests: Request | bytes) -> list[bytes]:
        return [answer.body for answer in self.ask(*requests)]

    def ask_statuses(self, *requests: Request | bytes) -> list[int]:
        return [answer.status for answer in self.ask(*requests)]

    def send_each(self, *bodies: bytes, first: int = 1) -> None:
        """Send requests at once, each in a batch of its own."""
        frames = []
        for number, body in enumerate(bodies, first):
            frames += encode_request(number, body)
        self.sock.sendall(b"".join(map(bytes, frames)))

    def read_answers(self, count: int) -> dict[int, tuple[int, str, list[str]]]:
        """Return the status, the headers of the first frame, and the parts, by batch."""
        parts: dict[int, list[str]] = {}
        headers: dict[int, str] = {}
        answers: dict[int, tuple[int, str, list[str]]] = {}
        while len(answers) < count:
            frame = self.receive()
            assert frame is not None, "the worker ended"
            ((code, block, body),) = frame.items
            headers.setdefault(frame.batch, str(block, "latin-1"))
            parts.setdefault(frame.batch, []).append(str(body, "utf-8"))
            if frame.kind is Kind.REPLY:
                answers[frame.batch] = (code, headers[frame.batch], parts[frame.batch])
        return answers

    def ask(self, *requests: Request | bytes) -> list[Answer]:
        """Return the answers to one batch.

        Pieces of the answers are added to `pieces`. The reply's metrics and times are stored in
        `metrics`, `prediction_times` and `times`.
        """
        batch = self.begin(*requests)
        while True:
            frame = self.receive()
            assert frame is not None, "the worker ended"
            assert frame.batch == batch
            if frame.kind is Kind.PIECE:
                self.pieces += [
                    (code, bytes(meta), bytes(body)) for code, meta, body in frame.items
                ]
                continue
            assert frame.kind is Kind.REPLY
            assert len(frame.items) == len(requests)
            extra = bytes(frame.extra)
            self.times = wire.TIMES.unpack_from(extra) if extra else None
            reported = json.loads(extra[wire.TIMES.size :] or b"[]")
            self.metrics = [value for value in reported if value["name"] != "PredictionTime"]
            self.prediction_times = [
                value for value in reported if value["name"] == "PredictionTime"
            ]
            return [
                Answer(code, dict(wire.parse_header_block(str(meta, "latin-1"))), bytes(body))
                for code, meta, body in frame.items
            ]

    def begin(self, *requests: Request | bytes) -> int:
        batch = next(self._batches)
        items = []
        for number, request in enumerate(requests):
            body, headers, query = request if isinstance(request, Request) else Request(request)
            items.append((0, wire.request_meta(f"id-{number}", query, headers), body))
        self.send(Kind.BATCH, batch, items)
        return batch

    def ended(self) -> int | None:
        self.process.join(DEADLINE_S)
        return self.process.exitcode

    def close(self) -> int | None:
        self.sock.close()
        code = self.ended()
        if code is None:
            self.process.kill()
            self.process.join()
        return code

    def _exactly(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            part = self.sock.recv(min(size - len(data), 1 << 20))
            if not part:
                assert not data, "the worker ended within a frame"
                break
            data += part
        return data


def encode_request(batch: int, body: bytes) -> list[Any]:
    """Return the frame of a batch of one request, which has the id `id-BATCH`."""
    return [*wire.encode(Kind.BATCH, batch, [(0, wire.request_meta(f"id-{batch}", b"", ()), body)])]


StartWorker = Callable[..., Worker]


@pytest.fixture
def start_worker(processes: None, tmp_path: Path) -> Iterator[StartWorker]:
    """Return a function that starts workers, described in `starting_workers`."""
    with starting_workers(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_worker(
    processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartWorker]:
    """Return a function that starts workers for all tests of a module, which must not change them."""
    with starting_workers(tmp_path_factory.mktemp("shared")) as start:
        yield start


@contextmanager
def starting_workers(root: Path) -> Iterator[StartWorker]:
    """Yield a function that starts workers with models in `root`, and close them at the end.

    The function's `source` is the text of handler.py, `files` are other files of the model, `model`
    updates the manifest's `model`, and `order` has fields of the load order.
    """
    workers: list[Worker] = []

    def start(
        source: str | None = None,
        *,
        files: dict[str, str | bytes] | None = None,
        model: Any = None,
        model_config: dict[Any, Any] | None = None,
        **order: Any,
    ) -> Worker:
        directory = root / f"model-{len(workers)}"
        directory.mkdir()
        contents = dict(files or {})
        if source is not None:
            contents["handler.py"] = source
        for name, content in contents.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(
                textwrap.dedent(content).encode() if isinstance(content, str) else content
            )
        load_order: Any = {
            **ORDER,
            "model_config": yaml.safe_dump(model_config or {}),
            "model_dir": str(directory),
            "manifest": {"model": {"modelName": "m", **(model or {})}},
            **order,
        }
        workers.append(Worker(load_order))
        workers[-1].directory = directory
        return workers[-1]

    try:
        yield start
    finally:
        for worker in workers:
            worker.close()


ORDER = {
    "model_name": "m",
    "model_version": "1.0",
    "handler": "handler.py",
    "worker": "9000",
    "gpu_id": None,
    "batch_size": 8,
    "max_batch_cost": 0,
    "response_timeout": 120,
    "threads": 1,
    "shares_cores": False,
    "cores": None,
    "variables": {},
    "ranks": 1,
    "gpus": 0,
    "limit_max_image_pixels": True,
    "properties": {},
    "decode_input_request": True,
    "max_response_size": 100_000,
    "server_version": "0.1",
    "envelope": "",
    "output": "",
    "at_terminal": False,
    "log_json": False,
    "model_metrics": [],
    "mode": "batch",
    "stateful": False,
    "json_nan": "null",
    "guess_content_type": False,
    "handler_error_status": 500,
}
