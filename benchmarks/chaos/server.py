"""A real `tsx serve` process and all that it started: asked, measured, limited, stopped, and looked
at from outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tsx_runtime import errors

from ..servers import free_ports
from .flatness import Usage
from .load import Answer, read_answer

START_SECONDS = 90.0
STOP_SECONDS = 60.0
LEFT_SECONDS = 10.0
# in the environment of the programs that a server starts; what it forks is of its session
MARK = "CHAOS_LOG"
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Counted(NamedTuple):
    """What the server says of one version's requests."""

    accepted: int
    statuses: Counter[int]  # of what workers answered and of what was refused


@dataclass
class Server:
    """Started by `start`.

    Its processes have a variable of their own, by which also those are found that lost their
    parent.
    """

    process: subprocess.Popen[bytes]
    ports: dict[str, int]
    log: Path

    async def call(
        self, method: str, path: str, body: bytes = b"", *, role: str = "inference"
    ) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[role])
        try:
            head = (
                f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection:"
                f" close\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer, _ = await read_answer(reader)
            return answer
        finally:
            writer.transport.abort()

    async def manage(self, method: str, path: str) -> Any:
        """A call of the management API that must succeed."""
        answer = await self.call(method, path, role="management")
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.body.decode()}")
        return json.loads(answer.body)

    async def workers(self, model: str) -> list[dict[str, Any]]:
        described = (await self.manage("GET", f"/models/{model}"))[0]
        workers: list[dict[str, Any]] = described["workers"]
        return workers

    async def pids(self, model: str) -> list[int]:
        return [worker["pid"] for worker in await self.workers(model)]

    async def counted(self, model: str) -> Counted:
        accepted = 0
        statuses: Counter[int] = Counter()
        for name, labels, value in await self.samples():
            if labels.get("model_name") != model:
                continue
            if name == "ts_inference_requests_total":
                accepted += int(value)
            elif name == "tsx_answers_total":
                statuses[int(labels["status"])] += int(value)
            elif name == "tsx_refusals_total":
                statuses[getattr(errors, labels["reason"]).status] += int(value)
        return Counted(
            accepted, +statuses
        )  # without those that it has not given: some are told from the first moment on

    async def samples(self) -> list[tuple[str, dict[str, str], float]]:
        text = (await self.call("GET", "/metrics", role="metrics")).body.decode()
        return [
            (name, dict(_LABEL.findall(labels)), float(value))
            for name, labels, value in _SAMPLE.findall(text)
        ]

    def processes(self) -> list[psutil.Process]:
        """All that are alive, whoever their parent is."""
        return [process for process in psutil.process_iter() if self._has(process)]

    def _has(self, process: psutil.Process) -> bool:
        try:
            ours = os.getsid(process.pid) == self.process.pid or process.environ().get(MARK) == str(
                self.log
            )
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ProcessLookupError):  # it has ended, or is another user's
            return False

    def zombies(self) -> list[int]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE]

    async def usage(self, models: Sequence[str]) -> dict[str, Usage]:
        """Of each process, by what it is for and its number."""
        names = {self.process.pid: "front end"}
        for model in models:
            names |= {
                worker["pid"]: f"worker {worker['id']} of {model}"
                for worker in await self.workers(model)
            }
        used = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess), process.oneshot():
                name = f"{names.get(process.pid) or _role(process.cmdline())} ({process.pid})"
                used[name] = Usage(
                    time.monotonic(),
                    process.memory_info().rss,
                    process.num_fds(),
                    process.num_threads(),
                )
        return used

    def limit_files(self, count: int) -> None:
        hard = resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (count, hard))

    async def stop(self) -> int:
        """The exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self.process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from error

    async def left_over(self) -> list[int]:
        """What is still there some seconds after the end: nothing should be."""
        end = time.monotonic() + LEFT_SECONDS
        while left := [
            process.pid for process in self.processes()
        ]:  # others' children: nothing tells of their end
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.02)
        return left

    async def kill(self) -> None:
        """Whatever happened, nothing outlives a trial."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        await asyncio.to_thread(self.process.wait)


async def start(
    directory: Path,
    models: Sequence[str | Path],
    settings: Mapping[str, object],
    *,
    output: int | None = None,
) -> Server:
    """`tsx serve` with these models, once it is healthy.

    `output` takes its stdout and stderr in place of a file.
    """
    roles = ("inference", "management", "metrics")
    ports = dict(zip(roles, free_ports(3), strict=True))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TSX_", "TS_"))
    }
    environment |= {
        f"TSX_{role.upper()}_ADDRESS": f"http://127.0.0.1:{port}" for role, port in ports.items()
    }
    environment |= {"TSX_CACHE_DIR": str(directory / "cache"), "TSX_MODEL_STORE": str(directory)}
    environment["TSX_ENABLE_GRPC"] = "false"  # its ports are fixed ones
    environment |= {f"TSX_{name.upper()}": str(value) for name, value in settings.items()}
    log = directory / "server.log"
    environment[MARK] = str(log)
    command = [sys.executable, "-m", "tsx_cli", "serve", *map(str, models)]
    server = Server(_begin(command, directory, environment, log, output), ports, log)
    try:
        await asyncio.wait_for(_healthy(server), START_SECONDS)
    except BaseException:
        await server.kill()
        raise
    return server


def _begin(
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    log: Path,
    output: int | None,
) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        out = file if output is None else output
        return subprocess.Popen(
            command, cwd=directory, env=environment, stdout=out, stderr=out, start_new_session=True
        )


async def _healthy(server: Server) -> None:
    while True:
        try:
            if (await server.call("GET", "/ping")).status == 200:
                return
        except (OSError, EOFError):
            if server.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with {server.process.returncode}:"
                    f" {server.log.read_text()[-3000:]}"
                ) from None
        await asyncio.sleep(0.02)  # its output may go nowhere, so there is no line to wait for


def _role(command: Sequence[str]) -> str:
    """What Python starts beside its own program tells itself by its command line."""
    return next(
        (
            name
            for name in ("forkserver", "resource_tracker")
            if any(name in word for word in command)
        ),
        "other",
    )
