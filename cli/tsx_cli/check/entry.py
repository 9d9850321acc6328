"""The entry point of an image as a process on this machine, and a platform's side of it: HTTP,
SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tsx_cli.check.report import time_of
from tsx_runtime.shared.safe_path import run_module

LAST = 40  # lines of the log that are shown
ENTRY = (sys.executable, *run_module("tsx_runtime.targets.entry"), "serve")


@dataclass(frozen=True)
class PlatformResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes
    connected: float  # seconds until the connection was accepted
    began: float  # until the first bytes of the body
    took: float  # until its end

    @property
    def streamed(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "")


@dataclass
class EntryProcess:
    process: subprocess.Popen[bytes]
    log_file: Path
    started: float  # by time.monotonic

    @property
    def lines(self) -> list[str]:
        return self.log_file.read_text(errors="replace").splitlines()[-LAST:]

    @property
    def is_up(self) -> bool:
        return self.process.poll() is None

    def since(self) -> float:
        return time.monotonic() - self.started

    def stop(self, patience: float) -> tuple[int | None, float]:
        """SIGTERM: (exit code, seconds), None where it was still there after that time."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience), time.monotonic() - begin
        except subprocess.TimeoutExpired:
            return None, time.monotonic() - begin


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what is set for tsx in it, and with what is given."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TSX_", "TS_", "SAGEMAKER_", "AWS_LAMBDA_"))
    }
    return own | dict(given)


@contextmanager
def started(directory: Path, env: Mapping[str, str]) -> Generator[EntryProcess, None, None]:
    """In `directory`. What is left of it at the end is killed."""
    log_file = directory / "container.log"
    with log_file.open("wb") as log:
        begin = time.monotonic()
        process = subprocess.Popen(
            ENTRY,
            cwd=directory,
            env=environment(env),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    entry = EntryProcess(process, log_file, begin)
    try:
        yield entry
    finally:
        if entry.is_up:
            kill_group(process.pid)
        process.wait()


def kill_group(pid: int) -> None:
    """It leads a session of its own, so that its workers go with it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def send_request(
    port: int,
    method: str,
    path: str,
    limit: float,
    body: bytes | None = None,
    headers: Mapping[str, str] = {},
) -> PlatformResponse:
    """Raises OSError where nothing answers within `limit` seconds, http.client.HTTPException where
    it is no HTTP.
    """
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit)
    try:
        connection.connect()
        connected = time.monotonic() - begin
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        first = response.read(1)
        began = time.monotonic() - begin
        rest = response.read()
        lowered = {name.lower(): value for name, value in response.getheaders()}
        return PlatformResponse(
            response.status, lowered, first + rest, connected, began, time.monotonic() - begin
        )
    finally:
        connection.close()


def try_request(
    port: int,
    method: str,
    path: str,
    limit: float,
    body: bytes | None = None,
    headers: Mapping[str, str] = {},
) -> PlatformResponse | str:
    """As `send_request`; where nothing answers, the reason in words."""
    try:
        return send_request(port, method, path, limit, body, headers)
    except TimeoutError:
        return f"nothing after {time_of(limit)}"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def free_ports(count: int) -> list[int]:
    """So many ports of loopback that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
