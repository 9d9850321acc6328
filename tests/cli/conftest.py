"""The command line, run in this process without the user's own settings and cache."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.torchserve import TorchServe
from tsx_cli.main import main

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., CommandResult]
Answering = Callable[..., str]


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(
    tmp_path: Path,
    session_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    logging_as_it_was: None,
) -> Run:
    """Run `tsx` in an empty directory; only the first argument is split at spaces."""
    monkeypatch.setenv("TSX_CACHE_DIR", str(session_cache))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(command: str = "", *arguments: object) -> CommandResult:
        capfd.readouterr()
        code = main([*shlex.split(command), *map(str, arguments)])
        out, err = capfd.readouterr()
        deadline = time.monotonic() + 2
        # A thread of the command may write its error after the command has ended.
        while code == 1 and not out + err and time.monotonic() < deadline:
            time.sleep(0.01)
            out, err = capfd.readouterr()
        return CommandResult(code, out, err)

    return run


@pytest.fixture
def torchserve(
    processes: None, short_path: Path, free_ports: Callable[[int], list[int]]
) -> Iterator[TorchServe]:
    server = TorchServe(short_path, free_ports(3))
    try:
        yield server
    finally:
        server.end()


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Start a server with one response to all requests; each call sets a new response."""
    reply: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(reply["status"])
            for name, value in reply["headers"].items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply["body"])

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("do_"):
                raise AttributeError(name)
            return self.answer

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    def answer(status: int, body: bytes, **headers: str) -> str:
        reply.update(
            status=status, body=body, headers={"content-length": str(len(body)), **headers}
        )
        return f"http://127.0.0.1:{server.server_port}"

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield answer
        server.shutdown()
        thread.join()
