"""Workers that reach a recycling limit are replaced without affecting requests."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from tests.kit.jobs import TIMEOUT, answer_of
from tests.support.clients.talker import (
    HANDLER,
    a_registry,
    a_talker,
    ask,
    order,
    register,
    submit,
    talker,
    until,
)
from tsx_runtime.api.management.describe import describe_version
from tsx_runtime.core.workers.worker import WorkerState

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("processes")]

LEAK = """
import os
held = []

def handle(data, context):
    if data is None:
        return None
    if data[0]["body"] == b"leak":
        held.append(os.urandom(1) * (200 << 20))
    return [str(os.getpid()) for _ in data]
"""

HANGING = "import time\nfrom pathlib import Path\nif Path('hang').exists():\n    Path('began').touch()\n    time.sleep(600)\n"

SWITCHABLE_LOAD_FAILURE = """
import os, time
from pathlib import Path
switch = Path("switch")

def handle(data, context):
    if data is None:
        if switch.exists():
            raise RuntimeError("no more of these")
        return None
    return [str(os.getpid()) for _ in data]
"""


async def test_a_recycled_worker_is_replaced_without_a_gap(tmp_path):
    async with a_registry(heartbeat=0.2) as registry:
        path = talker(tmp_path / "m", config="maxWorkerRequests: 20\nbatchSize: 4\n")
        version = await registry.register_path(path, order(initial_workers=2))
        pids = {worker.pid for worker in version.workers}
        request_count = 0
        while version.stats.recycled["requests"] < 3:
            answers = await asyncio.gather(*(ask(version, "pid") for _ in range(8)))
            request_count += len(answers)
            pids |= set(map(int, answers))
            assert version.workers[0].state is version.workers[1].state is WorkerState.READY
        assert version.stats.answers == {200: request_count}
        assert not version.stats.refusals
        assert version.stats.restarts == 0
        assert version.last_error is None
        current_pids = {worker.pid for worker in version.workers}
        await until(lambda: not any(map(psutil.pid_exists, pids - current_pids)))
        description = describe_version(version, {}, {})
        assert description.max_worker_requests == 20
        assert description.worker_recycles == {"requests": version.stats.recycled["requests"]}


async def test_the_old_worker_finishes_its_batch_after_the_takeover(tmp_path):
    async with a_registry(heartbeat=0.2, max_worker_age=1) as registry:
        gate = tmp_path / "go"
        version = await a_talker(registry, tmp_path)
        old_pid = version.workers[0].pid
        held_job = submit(version, f"until {gate}")
        await until(lambda: version.stats.recycled["age"])
        assert int(await ask(version, "pid")) == version.workers[0].pid != old_pid
        assert psutil.pid_exists(old_pid)
        assert not held_job.done.done()
        gate.touch()
        assert (await answer_of(held_job)).body.decode() == f"until {gate}"


async def test_an_old_process_finishes_its_batch_while_its_worker_is_removed(tmp_path):
    async with a_registry(heartbeat=0.2, max_worker_age=1) as registry:
        gate, directory = tmp_path / "go", talker(tmp_path / "m", HANGING + HANDLER)
        version = await registry.register_path(directory, order())
        held_job = submit(version, f"until {gate}")
        await until(lambda: version.stats.recycled["age"])
        (directory / "hang").touch()
        os.kill(version.workers[0].pid, signal.SIGKILL)
        await until((directory / "began").exists)
        assert version.workers[0].state is WorkerState.LOADING
        scaling = asyncio.create_task(registry.scale("talker", None, 0))
        await asyncio.sleep(0)
        gate.touch()
        assert (await answer_of(held_job)).status == 200
        await asyncio.wait_for(scaling, TIMEOUT)


async def test_a_growing_worker_is_replaced_unless_the_limit_is_too_low(tmp_path, caplog):
    async with a_registry(heartbeat=0.2) as registry:
        small_version = await register(
            registry, tmp_path / "s", LEAK, name="small", max_worker_memory=1
        )
        assert "more than maxWorkerMemory, which is 1" in caplog.text
        pid = await ask(small_version, "x")
        # After a heartbeat, the worker's memory has been measured.
        await until(lambda: small_version.workers[0].channel.pings)
        assert await ask(small_version, "x") == pid
        # Because of the jitter, a worker may be replaced at 90 % of its limit.
        limit_mb = small_version.workers[0].memory() // (1 << 20) + 100
        version = await a_talker(registry, tmp_path, LEAK, max_worker_memory=limit_mb)
        first_pid = await ask(version, "leak")
        await until(lambda: version.stats.recycled)
        assert await ask(version, "x") != first_pid
        assert version.stats.recycled == {"memory": 1}


async def test_a_worker_that_cannot_be_replaced_continues_and_logs_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.REPLACE_RETRY_S", 0)

    async with a_registry(heartbeat=0.2, max_worker_age=1) as registry:
        version = await a_talker(registry, tmp_path, SWITCHABLE_LOAD_FAILURE)
        first_pid = await ask(version, "x")
        (tmp_path / "m" / "switch").touch()
        await until(lambda: version.last_error)
        assert "no more of these" in version.last_error
        assert await ask(version, "x") == first_pid
        assert not version.stats.recycled
        (tmp_path / "m" / "switch").unlink()
        await until(lambda: version.stats.recycled["age"])
        assert await ask(version, "x") != first_pid


@pytest.mark.parametrize("drain", [True, False])
async def test_a_stop_during_a_worker_replacement_leaves_no_process(tmp_path, drain):
    async with a_registry(heartbeat=0.2, max_worker_age=1) as registry:
        version = await a_talker(registry, tmp_path, HANGING + SWITCHABLE_LOAD_FAILURE)
        (tmp_path / "m" / "hang").touch()
        await until((tmp_path / "m" / "began").exists)
        assert await ask(version, "x") == str(version.workers[0].pid)
        pids = [version.workers[0].pid, version.workers[0].successor.pid]
        if drain:
            await asyncio.wait_for(registry.scale("talker", None, 0), TIMEOUT)
        else:
            await asyncio.wait_for(registry.close(), TIMEOUT)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
