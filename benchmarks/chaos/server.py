"""A real `tsx serve` process and all its child processes, controlled and observed from outside."""

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

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
MAX_SURVIVAL_S = 10.0
# An environment variable that identifies the programs that a server starts.
MARK_VARIABLE = "CHAOS_LOG"
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Counted(NamedTuple):
    """The server's request counts for one model version."""

    accepted: int
    statuses: Counter[int]  # includes refusals


@dataclass
class Server:
    """A server that `start` has started.

    All its processes have the variable MARK_VARIABLE, which also finds orphans.
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
        """Call the management API; the call must succeed."""
        answer = await self.call(method, path, role="management")
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.body.decode()}")
        return json.loads(answer.body)

    async def workers(self, model: str) -> list[dict[str, Any]]:
        description = (await self.manage("GET", f"/models/{model}"))[0]
        workers: list[dict[str, Any]] = description["workers"]
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
        # `+` drops statuses with a count of 0, some of which are reported from the start.
        return Counted(accepted, +statuses)

    async def samples(self) -> list[tuple[str, dict[str, str], float]]:
        text = (await self.call("GET", "/metrics", role="metrics")).body.decode()
        return [
            (name, dict(_LABEL.findall(labels)), float(value))
            for name, labels, value in _SAMPLE.findall(text)
        ]

    def processes(self) -> list[psutil.Process]:
        """Return all live processes, including orphans."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            is_ours = os.getsid(process.pid) == self.process.pid or process.environ().get(
                MARK_VARIABLE
            ) == str(self.log)
            return is_ours and process.status() != psutil.STATUS_ZOMBIE
        # The process has ended or belongs to another user.
        except (psutil.Error, ProcessLookupError):
            return False

    def zombies(self) -> list[int]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE]

    async def usage(self, models: Sequence[str]) -> dict[str, Usage]:
        """Return the usage of each process, by its role and a number."""
        names = {self.process.pid: "front end"}
        for model in models:
            names |= {
                worker["pid"]: f"worker {worker['id']} of {model}"
                for worker in await self.workers(model)
            }
        usages = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess), process.oneshot():
                name = f"{names.get(process.pid) or _role(process.cmdline())} ({process.pid})"
                usages[name] = Usage(
                    time.monotonic(),
                    process.memory_info().rss,
                    process.num_fds(),
                    process.num_threads(),
                )
        return usages

    def limit_files(self, count: int) -> None:
        hard = resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (count, hard))

    async def stop(self) -> int:
        """Stop the server, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from error

    async def surviving_processes(self) -> list[int]:
        """Return the processes that still exist some seconds after the server's end."""
        end = time.monotonic() + MAX_SURVIVAL_S
        # Polling is needed, since they are not children of this process.
        while survivors := [process.pid for process in self.processes()]:
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.02)
        return survivors

    async def kill(self) -> None:
        """Kill all processes, so that none outlives a trial."""
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
    """Start `tsx serve` with these models, and wait until it is healthy.

    `output` is a descriptor that gets its stdout and stderr instead of a file.
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
    # The ports of gRPC are fixed, so servers could not run in parallel.
    environment["TSX_ENABLE_GRPC"] = "false"
    environment |= {f"TSX_{name.upper()}": str(value) for name, value in settings.items()}
    log = directory / "server.log"
    environment[MARK_VARIABLE] = str(log)
    command = [sys.executable, "-m", "tsx_cli", "serve", *map(str, models)]
    server = Server(_begin(command, directory, environment, log, output), ports, log)
    try:
        await asyncio.wait_for(_healthy(server), START_TIMEOUT_S)
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
        output_target = file if output is None else output
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=output_target,
            stderr=output_target,
            start_new_session=True,
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
        await asyncio.sleep(0.02)  # Polling is needed, since the server's output may be discarded.


def _role(command: Sequence[str]) -> str:
    """Return the role of a process, by the command line with which Python starts it."""
    return next(
        (
            name
            for name in ("forkserver", "resource_tracker")
            if any(name in argument for argument in command)
        ),
        "other",
    )
