"""What tests of several rooms need: free ports, the environment of a person who has set nothing, a server of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """So many ports of loopback that nothing listens on."""

    def find(count: int) -> list[int]:
        with ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(count)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return [each.getsockname()[1] for each in sockets]

    return find


@pytest.fixture
def user_environment(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> dict[str, str]:
    """Environment variables for commands: this Python's scripts first on the PATH, a cache of its own, three free addresses."""
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in free_ports(3))
    return {name: value for name, value in os.environ.items() if not name.startswith("TSX_")} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TSX_CACHE_DIR": str(tmp_path / "cache"),
        "TSX_INFERENCE_ADDRESS": inference,
        "TSX_MANAGEMENT_ADDRESS": management,
        "TSX_METRICS_ADDRESS": metrics,
    }


class RunningServer:
    """A `tsx serve` that answers; `stop` asks it to end and expects that it does so cleanly."""

    def __init__(self, command: Sequence[str | Path], directory: Path, environment: dict[str, str]) -> None:
        self.address = environment["TSX_INFERENCE_ADDRESS"]
        self.log = directory / "server.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def wait_until_healthy(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not self._healthy():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.output

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/ping", timeout=5) as answer:
                return bool(json.load(answer)["status"] == "Healthy")
        except (OSError, ValueError):
            time.sleep(0.02)  # between two tries: a process that is not ours has no event to wait for
            return False


@pytest.fixture
def start_server() -> Iterator[Callable[[Sequence[str | Path], Path, dict[str, str]], RunningServer]]:
    """Start a server and wait until it is healthy; none outlives the test."""
    servers: list[RunningServer] = []

    def start(command: Sequence[str | Path], directory: Path, environment: dict[str, str]) -> RunningServer:
        server = RunningServer(command, directory, environment)
        servers.append(server)
        server.wait_until_healthy()
        return server

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()
