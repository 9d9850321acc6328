"""Faults in the environment of the workers: fork server, log, file descriptors, other models."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import psutil

from .trial import Scenario, Trial, pack
from .workers import DEATH

CRASHES = """
import os, threading

def handle(data, context):
    return None

threading.Timer(0.05, os._exit, [9]).start()
"""


async def kill_fork_server(trial: Trial) -> None:
    """Kill the fork server, then a worker, which only a new fork server can replace."""
    worker = (await trial.server.pids("victim"))[0]
    psutil.Process(psutil.Process(worker).ppid()).kill()
    os.kill(worker, signal.SIGKILL)


async def no_descriptors(trial: Trial) -> None:
    """Open more connections than the server has descriptors.

    It must continue to serve the open ones, and later accept new ones.
    """
    server = trial.server
    victims = await server.pids("victim")
    open_files = psutil.Process(server.process.pid).num_fds()
    server.limit_files(open_files + 20)
    sockets = [
        socket.create_connection(("127.0.0.1", server.ports["inference"])) for _ in range(100)
    ]
    try:
        await asyncio.gather(
            *(tally.good(10 * trial.scale.clients) for tally in trial.tallies.values())
        )
        # The worker that replaces this one needs descriptors too.
        os.kill(victims[0], signal.SIGKILL)
        await asyncio.gather(
            *(tally.good(10 * trial.scale.clients) for tally in trial.tallies.values())
        )
    finally:
        for sock in sockets:
            sock.close()
    server.limit_files(4096)
    await trial.command("")


async def no_descriptor_for_a_worker(trial: Trial) -> None:
    """Kill the only worker while no other can be started; its clients are answered later."""
    server = trial.server
    (victim,) = await server.pids("victim")
    server.limit_files(3)
    os.kill(victim, signal.SIGKILL)

    async def has_failed() -> bool:
        return "could not be started" in server.log.read_text(errors="replace")

    try:
        await trial.eventually("a start fails", has_failed)
        await asyncio.sleep(3)  # Meanwhile further starts fail, which are not logged again.
    finally:
        server.limit_files(4096)


async def full_disk(trial: Trial) -> None:
    """Log to a full disk: a handler's failure and output, and a worker's death and start."""
    await trial.command("fail", 500)
    await trial.command("leave", 500)
    await trial.command("flood 1", 200)


async def manage(trial: Trial) -> None:
    """Register, scale and remove models while they receive requests."""
    server = trial.server
    pack(
        trial.directory,
        "third",
        json.dumps({"minWorkers": 1, "maxWorkers": 1}),
        f"{trial.round + 1}.0",
    )
    await server.manage("POST", "/models?url=third.mar&initial_workers=1&synchronous=true")
    for workers in (4, 1, 3, 2):
        await server.manage(
            "PUT", f"/models/victim?min_worker={workers}&max_worker={workers}&synchronous=true"
        )
        await trial.tallies["victim"].good(trial.scale.clients)
    for count in (50, 1):
        request_tasks = [
            asyncio.create_task(server.call("POST", "/predictions/third", b"%d" % number))
            for number in range(count)
        ]
        await server.manage("DELETE", "/models/third")
        answers = await asyncio.gather(*request_tasks)
        trial.check(
            {answer.status for answer in answers} <= {200, 404, 503},
            f"a model that is removed answers {answers}",
        )
        await server.manage("POST", "/models?url=third.mar&initial_workers=1&synchronous=true")
    await server.manage("DELETE", "/models/third")


async def crash_loop(trial: Trial) -> None:
    """Add a model whose workers die after they loaded, and one that never loads."""
    for name, text in (("crashing", CRASHES), ("broken", "import not_there\n")):
        handler = trial.directory / f"{name}.py"
        handler.write_text(text)
        pack(
            trial.directory,
            name,
            json.dumps({"minWorkers": 2, "maxWorkers": 2, "maxRetryTimeoutInSec": 2}),
            handler=handler,
        )
        await trial.server.call(
            "POST", f"/models?url={name}.mar&initial_workers=2&synchronous=false", role="management"
        )

    async def is_given_up() -> bool:
        return all(
            worker["status"] == "FAILED" for worker in await trial.server.workers("crashing")
        )

    await trial.eventually("the crashing model is given up", is_given_up)
    description = (await trial.server.manage("GET", "/models/crashing"))[0]
    trial.check(
        bool(description.get("lastError")), "nothing says why the crashing model was given up"
    )
    for name in ("crashing", "broken"):
        await trial.server.call("DELETE", f"/models/{name}", role="management")


async def unread_output(trial: Trial) -> None:
    """Write more than fits into a pipe by a worker and the server; neither may wait for a reader."""
    await trial.command("flood 1", 200)
    await trial.command("leave", 500)


def dev_full(stack: ExitStack) -> int:
    return stack.enter_context(Path("/dev/full").open("wb")).fileno()


def unread_pipe(stack: ExitStack) -> int:
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    stack.callback(os.close, writer)
    return writer


SCENARIOS = (
    Scenario("the fork server is killed, then a worker", kill_fork_server, DEATH),
    Scenario("the server has no file descriptors left", no_descriptors, DEATH),
    Scenario(
        "no worker can be started for a while",
        no_descriptor_for_a_worker,
        DEATH,
        {"minWorkers": 1, "maxWorkers": 1},
    ),
    Scenario("the disk for the logs is full", full_disk, DEATH, output=dev_full),
    Scenario("nobody reads what the server prints", unread_output, DEATH, output=unread_pipe),
    Scenario("models are registered, scaled and removed", manage),
    Scenario("a third model crashes in a loop", crash_loop),
)
