"""Faults of a worker: from outside, by its handler, and on its connection to the server."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from .memory_group import memory_group, unavailable_reason
from .trial import Scenario, Trial

# WorkerDied; or OutOfResources after SIGKILL, which the kernel sends for lack of memory.
DEATH = frozenset({500, 507})
SHORT_TIMEOUT = {"responseTimeout": 1}
# Workers with their own environment are started as programs, not forked.
PROGRAM = {"useVenv": True}


async def kill_one(trial: Trial) -> None:
    os.kill((await trial.server.pids("victim"))[0], signal.SIGKILL)


async def kill_all(trial: Trial) -> None:
    for pid in await trial.server.pids("victim"):
        os.kill(pid, signal.SIGKILL)


async def stop_one(trial: Trial) -> None:
    pid = (await trial.server.pids("victim"))[0]
    os.kill(pid, signal.SIGSTOP)
    await wait_until_replaced(trial, pid)


async def wait_until_replaced(trial: Trial, pid: int) -> None:
    """Wait until the server has replaced a worker."""

    async def is_replaced() -> bool:
        return pid not in await trial.server.pids("victim")

    await trial.eventually(f"worker {pid} is replaced", is_replaced)


async def out_of_memory(trial: Trial) -> None:
    """Make the handler allocate memory until the kernel kills the only worker."""
    (pid,) = await trial.server.pids("victim")
    with memory_group(32 << 20) as group:
        group.take(pid)
        client = trial.client()
        answer = await client.ask("leak_memory 96")
        await client.close()
        # The status is 200 if the request was in a batch with others and was retried elsewhere.
        is_good = answer is not None and answer.status in (200, 507)
        trial.check(is_good, f"who used up the memory got {answer}")
        trial.check(group.kills() == 1, f"the kernel killed {group.kills()} processes")
        await wait_until_replaced(trial, pid)

        async def is_removed() -> bool:
            return group.remove()

        await trial.eventually("the control group is empty", is_removed)


async def memory_error(trial: Trial) -> None:
    old_pids = await trial.server.pids("victim")
    await trial.command("exhaust_memory", 507)
    trial.check(
        await trial.server.pids("victim") == old_pids,
        "a MemoryError, which the worker survives, cost the worker",
    )


async def leak_memory(trial: Trial) -> None:
    for _ in range(8):
        await trial.command("leak_memory 8")


async def leak_until_replaced(trial: Trial) -> None:
    """Leak memory until workers are replaced, which clients must not notice."""
    earlier_count = await count_recycled(trial)

    async def is_replaced() -> bool:
        await trial.command("leak_memory 50")
        return await count_recycled(trial) > earlier_count

    await trial.eventually("a worker that leaks is replaced", is_replaced)


async def replace_often(trial: Trial) -> None:
    """Replace workers after a few requests, under constant load."""
    earlier_count = await count_recycled(trial)

    async def is_replaced() -> bool:
        return await count_recycled(trial) >= earlier_count + 2

    await trial.eventually("workers are replaced after so many requests", is_replaced)


async def count_recycled(trial: Trial) -> float:
    samples = await trial.server.samples()
    return sum(
        value
        for name, labels, value in samples
        if name == "tsx_worker_recycles_total" and labels["model_name"] == "victim"
    )


async def leak_files(trial: Trial) -> None:
    """Leak files until the worker has no descriptor left; it must still answer."""
    for pid in await trial.server.pids("victim"):
        psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE, (100, 100))
    for _ in range(8):
        client = trial.client()
        await client.ask("leak_files 30")
        await client.close()


async def random_bytes(trial: Trial) -> None:
    for seed in range(3):
        await trial.command(f"random_bytes {3 * trial.round + seed}", 500)


async def random_frames(trial: Trial) -> None:
    for seed in range(3):
        await trial.command(f"random_frame {3 * trial.round + seed}", 500)


async def poisoned_batch(trial: Trial, poison: str) -> None:
    """Block the only worker, queue 31 good requests and a poisoned one; the good ones must succeed."""
    # The file is new for each trial: an earlier trial has created its own.
    gate = Path(tempfile.mkdtemp(dir=trial.directory)) / "gate"
    blocking_client = trial.client()
    blocking_request = asyncio.create_task(blocking_client.ask(f"wait {gate}"))

    async def has_begun() -> bool:
        return gate.with_suffix(".begun").exists()

    await trial.eventually("the worker is held", has_begun)
    clients = [trial.client() for _ in range(32)]
    request_tasks = [
        asyncio.create_task(client.ask(poison if number == 13 else ""))
        for number, client in enumerate(clients)
    ]

    async def waiting() -> bool:
        description = (await trial.server.manage("GET", "/models/victim"))[0]
        return int(description["jobQueueStatus"]["pendingRequests"]) >= 32

    await trial.eventually("32 requests wait", waiting)
    gate.touch()
    answers = await asyncio.gather(*request_tasks)
    await blocking_request
    statuses = [answer.status if answer else None for answer in answers]
    good_count = statuses.count(200)
    trial.check(
        good_count == 31 and statuses[13] != 200,
        f"of a batch with one poisonous request {good_count} were answered well: {statuses}",
    )
    for client in [blocking_client, *clients]:
        await client.close()


def _order(name: str, order: str, status: int, victim: Mapping[str, object] = {}) -> Scenario:
    async def fault(trial: Trial) -> None:
        await trial.command(order.format(megabytes=trial.scale.megabytes // 8), status)

    return Scenario(name, fault, frozenset() if status == 200 else DEATH | {status}, victim)


def _poison(name: str, poison: str, allowed: frozenset[int]) -> Scenario:
    async def fault(trial: Trial) -> None:
        await poisoned_batch(trial, poison)

    return Scenario(name, fault, allowed, {"minWorkers": 1, "maxWorkers": 1, "batchSize": 64})


SCENARIOS = (
    Scenario("one worker of two is killed", kill_one, DEATH),
    Scenario("all workers are killed at once", kill_all, DEATH),
    Scenario("all workers that are programs are killed at once", kill_all, DEATH, PROGRAM),
    Scenario("a worker that is a program is stopped by SIGSTOP", stop_one, victim=PROGRAM),
    Scenario("a worker is stopped by SIGSTOP", stop_one),
    _order("the handler is killed as the kernel does when memory is out", "die", 507),
    Scenario(
        "the kernel kills a worker for its memory",
        out_of_memory,
        DEATH,
        {"minWorkers": 1, "maxWorkers": 1},
        unavailable_reason=unavailable_reason,
    ),
    Scenario("memory is out in the handler, which survives it", memory_error, frozenset({507})),
    _order("the handler ends its process", "leave", 500),
    _order("the handler crashes by a segmentation fault", "segfault", 500),
    _order("the handler never returns", "loop", 500, SHORT_TIMEOUT),
    _order("the handler stops its own process", "freeze", 500, SHORT_TIMEOUT),
    _order("the handler floods stdout and stderr", "flood {megabytes}", 200),
    Scenario("the handler leaks memory", leak_memory),
    Scenario(
        "workers that leak memory are replaced",
        leak_until_replaced,
        victim={"maxWorkerMemory": 700},
    ),
    Scenario(
        "workers are replaced again and again", replace_often, victim={"maxWorkerRequests": 60}
    ),
    Scenario(
        "the handler leaks file descriptors until it has none",
        leak_files,
        frozenset({500}),
        needs_own_server=True,
    ),
    _order("the handler closes the connection to the server", "close_channel", 500),
    _order("the connection to a worker ends, and the worker does not", "shut_channel", 500),
    _order("a worker ends in the middle of a frame", "half_frame", 500),
    _order("a worker goes on after half a frame", "half_frame_and_on", 500, SHORT_TIMEOUT),
    _order("a worker announces a frame of 32 GiB", "endless_frame", 500, SHORT_TIMEOUT),
    _order("a worker answers what nobody asked", "stray_frame", 500),
    Scenario("workers send random bytes", random_bytes, DEATH, SHORT_TIMEOUT),
    Scenario("workers send frames of random content", random_frames, DEATH, SHORT_TIMEOUT),
    _poison("one request of a batch of 32 raises", "fail", frozenset({500})),
    _poison("one request of a batch of 32 kills the worker", "leave", DEATH),
)
