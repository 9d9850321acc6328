"""Supervision with real worker processes: deaths, timeouts, load errors, scaling."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver

import psutil
import pytest

from tests.kit.jobs import TIMEOUT, answer_of, refusal_of
from tests.support import forked, line_coverage
from tests.support.clients.talker import (
    a_registry,
    a_talker,
    ask,
    register,
    submit,
    talker,
    until,
)
from tsx_runtime.core import hidden_credentials
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.core.workers.instance import describe_exit
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import (
    BadRequest,
    LoadFailed,
    NoWorker,
    OutOfResources,
    QueueFull,
    WorkerDied,
)
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.cores import cpu_count

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("processes")]


FRONT_END = """
import asyncio, time
from pathlib import Path
from tsx_runtime import wire
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.shared.cores import cpu_count
from tsx_runtime.core import hidden_credentials
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.settings.schema import Settings

async def main():
    async with open_model(Path({directory!r}), Settings(worker_preload=False), workers=2) as version:
        print(*[worker.pid for worker in version.workers], flush=True)
        job = WaitingJob(wire.request_meta("id", b"", []), b"hang", time.monotonic())
        version.submit(job)
        await job.done

asyncio.run(main())
"""


NEEDS_WEIGHTS = """
open("weights")

def handle(data, context):
    return data and ["x"] * len(data)
"""


@pytest.fixture
def own_fork_server(monkeypatch):
    """Start a fork server as the front end does, without the imports of the tests."""
    server = forkserver._forkserver
    server_state = dict(vars(server))
    monkeypatch.setattr(hidden_credentials, "Popen", line_coverage.Popen)
    server.__init__()
    yield
    os.close(server._forkserver_alive_fd)
    os.waitpid(server._forkserver_pid, 0)
    vars(server).update(server_state)


async def test_a_worker_does_not_import_the_front_end(own_fork_server, tmp_path):
    async with open_model(talker(tmp_path / "m"), Settings()) as version:
        assert await ask(version, "hello") == "hello"
        [worker] = version.workers
        assert worker.state is WorkerState.READY
        assert worker.memory() > 0
        modules = json.loads(await ask(version, "modules"))
        assert not [
            name
            for name in modules
            if name.startswith(("tsx_runtime.core", "tsx_runtime.http", "tsx_cli", "pytest"))
        ]
        assert "ts" not in sys.modules
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.skipif(cpu_count() == 1, reason="needs two cores")
async def test_cores_are_redistributed_when_models_come_and_go(registry, tmp_path):
    first = await a_talker(registry, tmp_path)
    assert await ask(first, "threads") == str(cpu_count())
    second = await register(registry, tmp_path / "n", name="other")
    assert await ask(second, "threads") == str(max(1, cpu_count() // 2))
    registry.resources.cores.share()
    assert await ask(first, "threads") == str(max(1, cpu_count() // 2))
    await registry.unregister("other")
    await ask(first, "again")
    registry.resources.cores.share()
    assert await ask(first, "threads") == str(cpu_count())
    assert await ask(first, "wait policy") == "PASSIVE"
    single_threaded = await register(registry, tmp_path / "s", name="single", config="threads: 1\n")
    assert await ask(single_threaded, "threads") == "1"


@pytest.mark.parametrize(
    ("end", "error", "text"),
    [
        ("exit", WorkerDied, "Worker died.*exit code 3"),
        ("kill", OutOfResources, "Out of resources"),
    ],
)
async def test_a_new_worker_serves_the_request_after_a_worker_death(tmp_path, end, error, text):
    async with open_model(talker(tmp_path / "m"), Settings()) as version:
        job = submit(version, "exit" if end == "exit" else "hang")
        waiting_job = submit(version, "next")
        if end == "kill":
            await until(lambda: version.workers[0].channel.batches)
            os.kill(version.workers[0].pid, signal.SIGKILL)
        await refusal_of(job, error, text)
        assert (await answer_of(waiting_job)).body == b"next"
        assert version.workers[0].restarts == version.stats.restarts == 1


async def test_a_request_that_keeps_killing_workers_does_not_block_others(tmp_path, monkeypatch):
    # The pause is longer than this test, but too short for the worker to be given up.
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.BACK_OFF_S", (0, 250))

    async with open_model(talker(tmp_path / "m"), Settings()) as version:
        for _ in range(3):
            await refusal_of(submit(version, "exit"), WorkerDied)
            assert await ask(version, "good") == "good"
        for _ in range(2):
            await refusal_of(submit(version, "exit"), WorkerDied)
        # A worker that has answered nothing backs off.
        await until(lambda: version.workers[0].state is WorkerState.BACKING_OFF)


async def test_a_worker_past_its_response_timeout_is_replaced(registry, tmp_path):
    version = await a_talker(registry, tmp_path, response_timeout=1)
    job = submit(version, "hang")
    await refusal_of(job, WorkerDied, r"within 1 s \(responseTimeout\)")
    assert await ask(version, "again") == "again"


async def test_a_persistent_load_error_gives_the_worker_up(registry, tmp_path):
    version = await a_talker(registry, tmp_path, "1 / 0\n", wait=False)
    waiting_job = submit(version, "x")
    await until(lambda: version.workers[0].state is WorkerState.FAILED)
    assert "ZeroDivisionError" in version.last_error
    assert version.workers[0].restarts == 2
    for job in (waiting_job, submit(version, "y")):
        await refusal_of(job, NoWorker, r"were given up.*has the last error")


async def test_scaling_restarts_workers_that_were_given_up(registry, tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.MAX_SAME_LOAD_ERRORS", 1)

    version = await a_talker(registry, tmp_path, NEEDS_WEIGHTS, wait=False)
    await until(lambda: version.workers[0].state is WorkerState.FAILED)
    await refusal_of(submit(version, "x"), NoWorker, "tsx models scale talker 1")
    with pytest.raises(LoadFailed, match="No such file"):
        await version.scale(1, 1)
    await until(lambda: version.workers[0].state is WorkerState.FAILED)
    (tmp_path / "m" / "weights").touch()
    await version.scale(1, 1)
    assert [worker.state for worker in version.workers] == [WorkerState.READY]


async def test_a_given_up_worker_is_retried_until_it_loads(registry, tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.MAX_SAME_LOAD_ERRORS", 1)
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.GIVEN_UP_PAUSES_S", (0.01,))

    version = await a_talker(registry, tmp_path, NEEDS_WEIGHTS, wait=False)
    [worker] = version.workers
    await until(lambda: worker.restarts >= 2)
    assert worker.given_up
    (tmp_path / "m" / "weights").touch()
    await until(lambda: version.ready)
    assert not worker.given_up
    assert await ask(version, "x") == "x"


async def test_scaling_does_not_wait_for_a_worker_in_back_off(registry, tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.BACK_OFF_S", (250,))

    version = await a_talker(registry, tmp_path, NEEDS_WEIGHTS, wait=False)
    await until(lambda: version.workers[0].state is WorkerState.BACKING_OFF)
    with pytest.raises(LoadFailed, match="No such file"):
        await version.scale(1, 1)
    (tmp_path / "m" / "weights").touch()
    await version.scale(1, 1)
    assert version.ready


async def test_the_exit_of_given_up_workers_is_reported(registry, tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.BACK_OFF_S", (0, 1000))
    crashing = "import os, threading\ndef handle(data, context): ...\nthreading.Timer(0.01, os._exit, [9]).start()\n"

    version = await a_talker(registry, tmp_path, crashing, wait=False)
    await until(lambda: version.workers[0].state is WorkerState.FAILED)
    assert "exit code 9" in version.last_error


async def test_retry_after_covers_back_off_and_loading(registry, tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.workers.lifecycle.BACK_OFF_S", (200,))

    version = await a_talker(registry, tmp_path, job_queue_size=1)
    [worker] = version.workers
    assert version.retry_after() == 1
    usual_load_seconds = worker.load_seconds
    submit(version, "exit")
    await until(lambda: worker.state is WorkerState.BACKING_OFF)
    submit(version, "waits")
    refusal = await refusal_of(submit(version, "too many"), QueueFull)
    assert 200 - TIMEOUT < refusal.retry_after <= 201 + usual_load_seconds
    assert version.retry_after() <= 201 + usual_load_seconds
    for state, since, seconds in (
        (WorkerState.LOADING, 0.0, usual_load_seconds),
        # A load that exceeds its usual time is expected to take as long again.
        (WorkerState.LOADING, 10 * usual_load_seconds, 10 * usual_load_seconds),
        (WorkerState.UNLOADING, 0.0, None),
        (WorkerState.FAILED, 0.0, None),
    ):
        worker.state, worker.since = state, 0.0
        assert worker.seconds_until_ready(since, usual_load_seconds) == seconds
    assert version.retry_after() is None
    worker.state = WorkerState.LOADING
    assert worker.seconds_until_ready(7.0, None) == 7.0


async def test_a_worker_that_dies_during_its_load_is_reported_with_its_exit(registry, tmp_path):
    with pytest.raises(LoadFailed, match=r"ended while it loaded .* 7"):
        await a_talker(registry, tmp_path, "import os\nos._exit(7)\n")


LINGERING = """
import threading, time

def handle(data, context):
    if data is None:
        return None
    if data[0]["body"] == b"break":
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise RuntimeError("CUDA error: device-side assert triggered")
    return ["OK"] * len(data)
"""


async def test_an_exiting_worker_with_a_lingering_thread_is_replaced(
    registry, tmp_path, monkeypatch
):
    monkeypatch.setattr("tsx_runtime.core.workers.instance.EXIT_GRACE_S", 0.1)

    version = await a_talker(registry, tmp_path, LINGERING)
    pid = version.workers[0].pid
    assert (await answer_of(submit(version, "break"))).status == 507
    await until(lambda: version.workers[0].restarts)
    assert await ask(version, "next") == "OK"
    assert not psutil.pid_exists(pid)


UNHEARD = """
import os, socket, stat, time

def handle(data, context):
    if data is None:
        return None
    if any(row["body"] == b"hang up" for row in data):
        for fd in range(3, 256):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        time.sleep(600)
    return [row["body"] for row in data]
"""


async def test_a_worker_that_closes_its_connection_counts_as_dead(registry, tmp_path, monkeypatch):
    """Check that the exit is not awaited and that only the guilty request is refused."""
    monkeypatch.setattr("tsx_runtime.core.workers.instance.EXIT_GRACE_S", 600)

    version = await a_talker(registry, tmp_path, UNHEARD, config="batchSize: 2\n")
    jobs = [submit(version, "hang up"), submit(version, "good")]
    assert (await answer_of(jobs[1])).body == b"good"
    await refusal_of(jobs[0], WorkerDied, "closed its connection")


async def test_loading_has_its_own_timeout(registry, tmp_path):
    with pytest.raises(LoadFailed, match="within 1 s; raise startupTimeout"):
        await a_talker(registry, tmp_path, "import time\ntime.sleep(600)\n", startup_timeout=1)


async def test_workers_are_scaled_and_requests_without_workers_refused(registry, tmp_path):
    version = await a_talker(registry, tmp_path)
    first = version.workers[0].pid
    await registry.scale("talker", None, 3)
    assert len({worker.pid for worker in version.workers}) == 3
    # The maximum caps the workers; the minimum removes none.
    await registry.scale("talker", None, 1, 2)
    assert len(version.workers) == 2
    await registry.scale("talker", None, 1)
    assert [worker.pid for worker in version.workers] == [first]
    await registry.scale("talker", None, 0)
    with pytest.raises(NoWorker):
        await ask(version, "x")
    with pytest.raises(BadRequest, match=r"max_worker .* min_worker"):
        await registry.scale("talker", None, 3, 1)


async def test_a_removed_worker_finishes_its_requests(registry, tmp_path):
    version = await a_talker(registry, tmp_path, initial_workers=2)
    gate = tmp_path / "go"
    jobs = [submit(version, f"until {gate}") for _ in range(2)]
    await until(lambda: all(worker.channel.batches for worker in version.workers))
    scaling = asyncio.create_task(registry.scale("talker", None, 0))
    await until(lambda: not version.workers)
    gate.touch()
    await scaling
    assert [(await job.done).body.decode() for job in jobs] == [f"until {gate}"] * 2


def test_workers_end_when_the_front_end_is_killed(tmp_path):
    talker(tmp_path / "m")
    script = FRONT_END.format(directory=str(tmp_path / "m"))
    with forked.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as front_end:
        pids = [int(pid) for pid in front_end.stdout.readline().split()]
        front_end.kill()
    assert len(pids) == 2
    _, remaining_processes = psutil.wait_procs(
        [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=TIMEOUT
    )
    assert not remaining_processes


def test_exits_are_reported_in_words():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert "out of memory" in describe_exit(-9)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or os.cpu_count() == 1, reason="needs two cores and Linux"
)
async def test_pinned_workers_stay_on_their_cores_and_follow_changes(tmp_path):
    pinning_settings = Settings(cpu_launcher_enable=True, cpu_launcher_args="--use-logical-core")

    first, *_ = available_cores = sorted(os.sched_getaffinity(0))
    async with open_model(talker(tmp_path / "m"), pinning_settings) as version:
        [worker] = version.workers
        assert psutil.Process(worker.pid).cpu_affinity() == available_cores
        assert await ask(version, "threads") == str(len(available_cores))
        before = worker.pid
        await version.scale(2, 2)
        await until(lambda: version.stats.recycled["cores"] == 1)
        affinities = [psutil.Process(member.pid).cpu_affinity() for member in version.workers]
        assert (
            sorted(affinities[0] + affinities[1])
            == available_cores[: len(available_cores) // 2 * 2]
        )
        assert first in affinities[0]
        assert worker.pid != before


async def test_a_load_failure_is_logged_once_for_all_workers(tmp_path, caplog):
    async with a_registry() as registry:
        version = await a_talker(
            registry, tmp_path, "raise ValueError('no weights')\n", initial_workers=2, wait=False
        )
        await until(lambda: all(worker.given_up for worker in version.workers))
    failures = [record for record in caplog.records if "no weights" in record.getMessage()]
    assert [record.name for record in failures] == ["tsx.supervisor"]
    assert "handler.py:1 in <module>: raise ValueError('no weights')" in failures[0].getMessage()
