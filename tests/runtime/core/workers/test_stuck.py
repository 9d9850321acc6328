"""Stuck or dead worker processes are replaced without losing requests."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from multiprocessing import forkserver

import psutil
import pytest

from tests.kit.jobs import TIMEOUT, answer_of, refusal_of
from tests.support.clients.talker import (
    a_registry,
    a_talker,
    ask,
    register,
    submit,
    until,
)
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.instance import WorkerInstance
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import WorkerDied

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="stops processes and reads /proc"),
]

FAST_HEARTBEAT = {"heartbeat": 0.2}


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with a_registry(**FAST_HEARTBEAT) as registry:
        yield registry


STUCK_HANDLER = """
import os, signal, threading, time
from pathlib import Path

def hold(seconds):
    import re
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        re.match(r"(a+)+$", "a" * 21 + "b")  # about 0.1 s each without releasing the GIL

def handle(data, context):
    if data is None:
        return None
    word = data[0]["body"].decode()
    if word == "stop myself":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word.startswith("hold "):
        threading.Thread(target=hold, args=(float(word[5:]),), daemon=True).start()
    return [row["body"].decode() for row in data]
"""


async def test_the_batch_of_a_stopped_worker_runs_on_another(registry, tmp_path):
    gate = tmp_path / "go"
    version = await a_talker(registry, tmp_path, batch_size=4)
    jobs = [submit(version, f"until {gate}") for _ in range(4)]
    await until(lambda: version.workers[0].channel.batches)
    os.kill(version.workers[0].pid, signal.SIGSTOP)
    await until(lambda: version.workers[0].restarts)
    gate.touch()
    answers = await asyncio.wait_for(asyncio.gather(*(job.done for job in jobs)), TIMEOUT)
    assert [answer.body.decode() for answer in answers] == [f"until {gate}"] * 4
    # The requests ran again as one batch, so none was suspected.
    assert version.stats.batches == 1
    assert version.stats.stuck == {"stopped": 1}


async def test_a_request_that_stops_its_workers_is_not_retried_endlessly(registry, tmp_path):
    version = await a_talker(registry, tmp_path, STUCK_HANDLER)
    await refusal_of(submit(version, "stop myself"), WorkerDied, "SIGSTOP")
    assert version.stats.stuck == {"stopped": 2}
    assert await ask(version, "next") == "next"


async def test_an_idle_worker_that_does_not_answer_pings_is_replaced(tmp_path):
    async with a_registry(**FAST_HEARTBEAT, heartbeat_timeout=1) as registry:
        version = await a_talker(registry, tmp_path, NEVER_ANSWERS)
        await until(lambda: version.workers[0].restarts)
        assert version.stats.stuck["silent"] >= 1


NEVER_ANSWERS = """
import ctypes, threading

def handle(data, context):
    if data is None:  # a library that blocks while it holds the GIL
        threading.Timer(0.2, lambda: ctypes.PyDLL(None).sleep(600)).start()
        return None
    return ["OK"] * len(data)
"""


async def test_a_worker_with_busy_threads_is_not_replaced(registry, tmp_path):
    version = await a_talker(registry, tmp_path, STUCK_HANDLER)
    assert await ask(version, "hold 2") == "hold 2"
    channel = version.workers[0].channel
    await until(lambda: channel.pings)
    await until(lambda: not channel.pings)
    assert not version.stats.stuck
    assert not version.stats.restarts


async def test_workers_survive_the_death_of_the_fork_server(registry, tmp_path):
    gate = tmp_path / "go"
    version = await a_talker(registry, tmp_path)
    job = submit(version, f"until {gate}")
    await until(lambda: version.workers[0].channel.batches)
    first, worker = forkserver._forkserver._forkserver_pid, version.workers[0].pid
    os.kill(first, signal.SIGKILL)
    # The new worker comes from a new fork server.
    await registry.scale("talker", None, 2)
    gate.touch()
    assert (await answer_of(job)).body.decode() == f"until {gate}"
    assert worker in {member.pid for member in version.workers}
    assert forkserver._forkserver._forkserver_pid != first
    assert not version.stats.restarts
    # The exit of an orphaned worker is also detected.
    os.kill(worker, signal.SIGKILL)
    await until(lambda: version.stats.restarts == 1)
    await until(lambda: all(member.state is WorkerState.READY for member in version.workers))


async def test_a_stopped_fork_server_is_replaced_and_no_start_hangs(
    registry, tmp_path, monkeypatch
):
    monkeypatch.setattr("tsx_runtime.core.workers.forked.START_CHECK_S", 0.1)

    version = await a_talker(registry, tmp_path)
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    await asyncio.wait_for(registry.scale("talker", None, 2), TIMEOUT)
    assert [member.state for member in version.workers] == [WorkerState.READY] * 2


async def test_a_worker_start_without_descriptors_is_retried(registry, tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.BACK_OFF_S", (0, 0, 0, 0, 0, 0.1))

    version = await a_talker(registry, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        os.kill(version.workers[0].pid, signal.SIGKILL)
        await until(lambda: version.stats.restarts > 5)
        assert "could not be started" in version.last_error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert await ask(version, "again") == "again"


LEFTOVER_CHILD = """
import os, time

def handle(data, context):
    if data is None:
        return None
    if data[0]["body"] == b"fork":
        pid = os.fork()
        if pid == 0:
            time.sleep(600)  # with the worker's socket open
        with open("child", "w") as file:
            file.write(str(pid))
        os._exit(3)
    return ["OK"] * len(data)
"""


async def test_a_leftover_child_does_not_hide_the_end_of_its_worker(registry, tmp_path):
    version = await a_talker(registry, tmp_path, LEFTOVER_CHILD)
    try:
        await refusal_of(submit(version, "fork"), WorkerDied, "exit code 3")
        assert await ask(version, "next") == "OK"
    finally:
        os.kill(int((tmp_path / "m" / "child").read_text()), signal.SIGKILL)


async def test_restarts_leak_no_descriptors(registry, tmp_path):
    version = await a_talker(registry, tmp_path)
    # Garbage collection would close leaked descriptors and hide the leak.
    gc.disable()
    try:
        counts = []
        for number in range(20):
            await refusal_of(submit(version, "exit"), WorkerDied)
            assert await ask(version, "good") == "good"
            assert version.stats.restarts == number + 1
            counts.append(psutil.Process().num_fds())
        # A leak grows with each of the 20 restarts; unrelated descriptors may come and go.
        assert counts[-1] - counts[0] < 10, counts
        assert len(registry.resources.starter._alive) <= 2
    finally:
        gc.enable()


async def test_a_model_that_fails_to_start_does_not_affect_others(registry, tmp_path):
    good_version = await register(registry, tmp_path / "good", initial_workers=2)
    failing_versions = [
        await register(
            registry,
            tmp_path / f"bad{number}",
            "import os\nos._exit(7)\n",
            name=f"bad{number}",
            wait=False,
        )
        for number in range(2)
    ]
    request_count = 0
    while any(version.workers[0].state is not WorkerState.FAILED for version in failing_versions):
        assert await asyncio.gather(*(ask(good_version, f"{number}") for number in range(8))) == [
            f"{number}" for number in range(8)
        ]
        request_count += 8
    assert request_count
    assert good_version.stats.answers == {200: request_count}
    assert not good_version.stats.refusals
    assert not good_version.stats.restarts
    for version in failing_versions:
        assert "exit code 7" in version.last_error


async def test_a_failed_health_check_is_logged_and_restarted(tmp_path, monkeypatch, caplog):
    checked_instances, is_stopped = [], WorkerInstance.is_stopped

    def fail_first(instance):
        checked_instances.append(instance)
        if len(checked_instances) == 1:
            raise ValueError("nobody foresaw this")
        return is_stopped(instance)

    monkeypatch.setattr(WorkerInstance, "is_stopped", fail_first)

    async with a_registry(**FAST_HEARTBEAT) as registry:
        version = await a_talker(registry, tmp_path)
        await until(lambda: checked_instances)
        os.kill(version.workers[0].pid, signal.SIGSTOP)
        await until(lambda: version.workers[0].restarts)
        assert await ask(version, "hello") == "hello"
    assert "watching worker 9000 failed and is restarted" in caplog.text
    assert "nobody foresaw this" in caplog.text
