"""The entry point of an image, run as a process on this machine.

The module also acts as the platform: it sends HTTP requests, SIGTERM, and then SIGKILL.
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

MAX_LOG_LINES = 40  # last lines of the log that a report shows
ENTRY = (sys.executable, *run_module("tsx_runtime.targets.entry"), "serve")


@dataclass(frozen=True)
class PlatformResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes
    connect_s: float  # time until the connection was accepted
    first_byte_s: float  # time until the body began
    total_s: float  # time until the body ended

    @property
    def is_streamed(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "")


@dataclass
class EntryProcess:
    process: subprocess.Popen[bytes]
    log_file: Path
    start_time: float  # time.monotonic()

    @property
    def lines(self) -> list[str]:
        return self.log_file.read_text(errors="replace").splitlines()[-MAX_LOG_LINES:]

    @property
    def is_up(self) -> bool:
        return self.process.poll() is None

    def uptime_s(self) -> float:
        return time.monotonic() - self.start_time

    def stop(self, timeout_s: float) -> tuple[int | None, float]:
        """Send SIGTERM, and return the exit code and the elapsed seconds.

        The code is None if the process still runs after `timeout_s`.
        """
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s), time.monotonic() - start
        except subprocess.TimeoutExpired:
            return None, time.monotonic() - start


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with `variables`, and without settings of tsx."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TSX_", "TS_", "SAGEMAKER_", "AWS_LAMBDA_"))
    }
    return inherited | dict(variables)


@contextmanager
def start_entry(directory: Path, env: Mapping[str, str]) -> Generator[EntryProcess, None, None]:
    """Run the entry point in `directory`; at the end, kill it and its workers."""
    log_file = directory / "container.log"
    with log_file.open("wb") as log:
        start = time.monotonic()
        process = subprocess.Popen(
            ENTRY,
            cwd=directory,
            env=environment(env),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    entry = EntryProcess(process, log_file, start)
    try:
        yield entry
    finally:
        if entry.is_up:
            kill_group(process.pid)
        process.wait()


def kill_group(pid: int) -> None:
    """Kill the process group of a process, which includes its workers."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def send_request(
    port: int,
    method: str,
    path: str,
    timeout_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] = {},
) -> PlatformResponse:
    """Send a request to a port of this machine.

    Raises:
        OSError: There is no response within `timeout_s`.
        http.client.HTTPException: The response is not HTTP.
    """
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.connect()
        connect_s = time.monotonic() - start
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        first_byte = response.read(1)
        first_byte_s = time.monotonic() - start
        remainder = response.read()
        lower_headers = {name.lower(): value for name, value in response.getheaders()}
        return PlatformResponse(
            response.status,
            lower_headers,
            first_byte + remainder,
            connect_s,
            first_byte_s,
            time.monotonic() - start,
        )
    finally:
        connection.close()


def try_request(
    port: int,
    method: str,
    path: str,
    timeout_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] = {},
) -> PlatformResponse | str:
    """Send a request, and return the reason if there is no response."""
    try:
        return send_request(port, method, path, timeout_s, body, headers)
    except TimeoutError:
        return f"nothing after {time_of(timeout_s)}"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that are currently free."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for port_socket in sockets:
            port_socket.bind(("127.0.0.1", 0))
        return [port_socket.getsockname()[1] for port_socket in sockets]
    finally:
        for port_socket in sockets:
            port_socket.close()
