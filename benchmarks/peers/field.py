"""The contenders: the start of each server, its address, and the processes of its front end."""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from benchmarks import servers
from benchmarks.peers import environments

HERE = Path(__file__).parent
BATCH = 64
PEERS = ("tsx", "tsx-torchserve", "TorchServe", "Mosec", "LitServe")
SETTINGS_NOTES = {
    "tsx": "its defaults, a queue of 1000",
    "tsx-torchserve": (
        "its `torchserve` command: a log line for each request, the metric log, no token check, a"
        " queue of 1000"
    ),
    "TorchServe": (
        "maxBatchDelay 1 ms, no access log, no token check, no metrics of the machine, a queue of"
        " 1000"
    ),
    "Mosec": "max_wait_time 1 ms (the least it takes), its queue of 1024",
    "LitServe": (
        "batch_timeout 1 ms (with 0 its worker spins), one API server, bodies as bytes, no log"
    ),
}


class Contender(NamedTuple):
    """A running server with one model."""

    name: str
    server: servers.Server
    path: str
    front_end: list[psutil.Process]

    @property
    def url(self) -> str:
        return self.server.inference + self.path

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the front end has used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.front_end)

    def signal(self, number: int) -> None:
        root = psutil.Process(self.server.process.pid)
        for process in [root, *root.children(recursive=True)]:
            process.send_signal(number)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the server run during the `with` block; outside of it, the server is stopped.

        LitServe's worker polls for work a thousand times a second, which would disturb others.
        """
        if not self.name.startswith("tsx"):
            self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            if not self.name.startswith("tsx"):
                self.signal(signal.SIGSTOP)


@contextmanager
def contender(
    name: str,
    environments_directory: Path,
    directory: Path,
    model: Path,
    archive: Path,
    body: bytes,
    expected: object,
) -> Iterator[Contender]:
    """Start a server and check its answer; between its turns it is stopped.

    Raises:
        Missing: The peer cannot be installed.
        RuntimeError: The answer is not the expected one.
    """
    path = {"Mosec": "/inference", "LitServe": "/predict"}.get(name, f"/predictions/{model.stem}")
    with start_server(name, environments_directory, directory, model, archive) as server:
        answer = read(servers.first_answer(server, path, body))
        if not is_alike(answer, expected):
            raise RuntimeError(f"{name} answered {answer!r}, and the handler alone {expected!r}")
        running_contender = Contender(name, server, path, front_end(server, path, body))
        try:
            with running_contender.turn():
                pass
            yield running_contender
        finally:
            # A stopped process would not receive the signal to end.
            running_contender.signal(signal.SIGCONT)


def start_server(
    name: str, environments_directory: Path, directory: Path, model: Path, archive: Path
) -> AbstractContextManager[servers.Server]:
    if name == "tsx":
        return servers.tsx(directory, archive, job_queue_size=1000)
    if name == "tsx-torchserve":
        return servers.tsx_torchserve(directory, archive)
    if name == "TorchServe":
        environments.program("java", "openjdk-17-jre-headless")
        return servers.torchserve(
            directory, archive, environments.environment_of(name, environments_directory)
        )
    return start_python_peer(
        name, environments.environment_of(name, environments_directory), directory, model
    )


@contextmanager
def start_python_peer(
    name: str, environment: Path, directory: Path, model: Path
) -> Iterator[servers.Server]:
    """Start a peer whose server is a Python program, with one worker and batches of up to 64."""
    port = servers.free_ports(1)[0]
    arguments = {
        "Mosec": [
            "mosec_server.py",
            "--address",
            "127.0.0.1",
            "--port",
            str(port),
            "--log-level",
            "error",
        ],
        "LitServe": ["litserve_server.py", str(port)],
    }[name]
    command: list[str | Path] = [
        environment / "bin" / "python",
        HERE / arguments[0],
        *arguments[1:],
    ]
    variables = servers.foreign_environment() | {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "BENCHMARK_MODEL": str(model),
        "TMPDIR": str(directory),
    }
    with servers.running(command, directory, variables, name.lower(), grace_s=5) as process:
        yield servers.Server(name, process, f"http://127.0.0.1:{port}", "")


def front_end(server: servers.Server, path: str, body: bytes) -> list[psutil.Process]:
    """Return the processes that hold the clients' connections."""
    address = urlsplit(server.inference)
    with ExitStack() as stack:
        for _ in range(8):
            connection = http.client.HTTPConnection(address.netloc, timeout=60)
            stack.callback(connection.close)
            connection.request("POST", path, body, {"Content-Type": "application/octet-stream"})
            connection.getresponse().read()
        root = psutil.Process(server.process.pid)
        return [
            process
            for process in [root, *root.children(recursive=True)]
            if holds_connections(process, address.port)
        ]


def holds_connections(process: psutil.Process, port: int | None) -> bool:
    return any(
        connection.laddr and connection.laddr.port == port and connection.status == "ESTABLISHED"
        for connection in process.net_connections("tcp")
    )


def read(answer: bytes) -> object:
    try:
        return json.loads(answer)
    except ValueError:
        return answer.decode()


def is_alike(first: object, second: object) -> bool:
    """Tell whether two answers are equal except for rounding, which depends on the batch size."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(
            is_alike(*pair) for pair in zip(first, second, strict=True)
        )
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-5)
    return first == second
