"""Registry and supervision with real worker processes; the handler does what the request's body says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.models import make_model
from tsx_runtime import wire
from tsx_runtime.core.jobs import WaitingJob
from tsx_runtime.core.local import open_model
from tsx_runtime.core.model import ModelVersion, RegisterOrder
from tsx_runtime.core.registry import Registry
from tsx_runtime.core.supervisor import WorkerState, describe_exit
from tsx_runtime.errors import (
    BadRequest,
    CannotRemoveDefault,
    CleanupTimeout,
    Conflict,
    LoadFailed,
    ModelNotFound,
    ModelVersionNotFound,
    NoWorker,
    OutOfResources,
    Unavailable,
    WorkerDied,
)
from tsx_runtime.settings import Settings

TIMEOUT = 30.0

HANDLER = """
import json, os, sys, time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    return [act(row["body"].decode(), context) for row in data]

def act(word, context):
    if word == "exit":
        os._exit(3)
    if word == "hang":
        time.sleep(600)
    if word == "slow":
        time.sleep(0.5)
    if word.startswith("until "):  # the test decides how long
        while not Path(word[6:]).exists():
            time.sleep(0.005)
    if word == "modules":
        return json.dumps(sorted(sys.modules))
    if word == "pid":
        return str(os.getpid())
    if word == "threads":
        import torch
        return str(torch.get_num_threads())
    return word
"""

FRONT_END = """
import asyncio, time
from pathlib import Path
from tsx_runtime import wire
from tsx_runtime.core.jobs import WaitingJob
from tsx_runtime.core.local import open_model
from tsx_runtime.settings import Settings

async def main():
    async with open_model(Path({directory!r}), Settings(worker_preload=False), workers=2) as version:
        print(*[worker.pid for worker in version.workers], flush=True)
        job = WaitingJob(wire.request_meta("id", b"", []), b"hang", time.monotonic())
        version.submit(job)
        await job.done

asyncio.run(main())
"""


def talker(directory: Path, handler: str = HANDLER, **what: str) -> Path:
    return make_model(directory, handler, **{"name": "talker", **what})


def submit(version: ModelVersion, word: str) -> WaitingJob:
    job = WaitingJob(wire.request_meta("id", b"", []), word.encode(), time.monotonic())
    version.submit(job)
    return job


async def ask(version: ModelVersion, word: str) -> str:
    return (await asyncio.wait_for(submit(version, word).done, TIMEOUT)).body.decode()


async def until(condition) -> None:
    """Worker states change between turns of the loop; there is nothing to wait on from outside."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


def with_registry(test, **settings) -> None:
    async def main():
        registry = Registry(Settings(**settings))
        try:
            await test(registry)
        finally:
            await registry.close()

    asyncio.run(main())


def order(**values) -> RegisterOrder:
    return RegisterOrder(url="talker", **{"initial_workers": 1, **values})


def test_a_model_answers_and_its_worker_knows_nothing_of_the_front_end(tmp_path):
    async def main():
        async with open_model(talker(tmp_path / "m"), Settings()) as version:
            assert await ask(version, "hello") == "hello"
            [worker] = version.workers
            assert worker.state is WorkerState.READY
            assert worker.memory() > 0
            modules = json.loads(await ask(version, "modules"))
            assert not [name for name in modules if name.startswith(("tsx_runtime.core", "tsx_runtime.http", "tsx_cli", "pytest"))]
            assert "ts" not in sys.modules
        assert not psutil.pid_exists(worker.pid)

    asyncio.run(main())


def test_torch_threads_are_the_cores_shared_out_over_the_workers(tmp_path):
    async def main():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        async with open_model(talker(tmp_path / "m"), Settings(), workers=2) as version:
            assert int(await ask(version, "threads")) <= max(1, cores // 2)
        async with open_model(talker(tmp_path / "n", config="threads: 3\n"), Settings()) as version:
            assert await ask(version, "threads") == "3"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("how", "error", "text"), [("exit", WorkerDied, "Worker died.*exit code 3"), ("kill", OutOfResources, "Out of resources")]
)
def test_what_a_dying_worker_had_begun_is_answered_and_a_new_worker_goes_on(tmp_path, how, error, text):
    async def main():
        async with open_model(talker(tmp_path / "m"), Settings()) as version:
            job = submit(version, "exit" if how == "exit" else "hang")
            waiting = submit(version, "next")
            if how == "kill":
                await until(lambda: version.workers[0].channel.batches)
                os.kill(version.workers[0].pid, signal.SIGKILL)
            with pytest.raises(error, match=text):
                await asyncio.wait_for(job.done, TIMEOUT)
            assert (await asyncio.wait_for(waiting.done, TIMEOUT)).body == b"next"
            assert version.workers[0].restarts == version.stats.restarts == 1

    asyncio.run(main())


def test_a_request_that_kills_workers_does_not_shut_out_the_others_by_coming_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.supervisor.BACK_OFF", (0, 10 * TIMEOUT))

    async def main():
        async with open_model(talker(tmp_path / "m"), Settings()) as version:
            for _ in range(3):
                with pytest.raises(WorkerDied):
                    await asyncio.wait_for(submit(version, "exit").done, TIMEOUT)
                assert await ask(version, "good") == "good"
            with pytest.raises(WorkerDied):
                await asyncio.wait_for(submit(version, "exit").done, TIMEOUT)
            with pytest.raises(WorkerDied):  # a worker that has answered nothing backs off
                await asyncio.wait_for(submit(version, "exit").done, TIMEOUT)
            await until(lambda: version.workers[0].state is WorkerState.BACKING_OFF)

    asyncio.run(main())


def test_a_worker_that_does_not_answer_in_time_is_killed_and_replaced(tmp_path):
    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m"), order(response_timeout=1))
        job = submit(version, "hang")
        with pytest.raises(WorkerDied, match=r"did not answer within 1 s \(responseTimeout\)"):
            await asyncio.wait_for(job.done, TIMEOUT)
        assert await ask(version, "again") == "again"

    with_registry(test)


def test_a_model_that_does_not_load_is_told_with_the_workers_own_traceback_and_is_not_registered(tmp_path):
    async def test(registry):
        path = talker(tmp_path / "m", "import nothing_of_that_name\n")
        with pytest.raises(LoadFailed, match="nothing_of_that_name") as caught:
            await registry.register_path(path, order())
        assert "handler.py" in caught.value.traceback
        assert not registry.models

    with_registry(test)


def test_a_load_error_that_stays_the_same_is_given_up_visibly(tmp_path):
    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m", "1 / 0\n"), order(), wait=False)
        waiting = submit(version, "x")
        await until(lambda: version.workers[0].state is WorkerState.FAILED)
        assert "ZeroDivisionError" in version.last_error
        assert version.workers[0].restarts == 2
        for job in (waiting, submit(version, "y")):
            with pytest.raises(NoWorker):
                await asyncio.wait_for(job.done, TIMEOUT)

    with_registry(test)


def test_a_worker_that_dies_while_it_loads_is_told_with_how_it_ended(tmp_path):
    async def test(registry):
        with pytest.raises(LoadFailed, match="ended while it loaded the model: exit code 7"):
            await registry.register_path(talker(tmp_path / "m", "import os\nos._exit(7)\n"), order())

    with_registry(test)


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


def test_a_worker_that_has_ended_but_for_a_thread_of_its_handler_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.supervisor.EXIT_GRACE", 0.1)

    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m", LINGERING), order())
        pid = version.workers[0].pid
        assert (await asyncio.wait_for(submit(version, "break").done, TIMEOUT)).status == 507
        await until(lambda: version.workers[0].restarts)
        assert await ask(version, "next") == "OK"
        assert not psutil.pid_exists(pid)

    with_registry(test)


def test_loading_has_a_timeout_of_its_own(tmp_path):
    async def test(registry):
        path = talker(tmp_path / "m", "import time\ntime.sleep(600)\n")
        with pytest.raises(LoadFailed, match="not loaded within 1 s; raise startupTimeout"):
            await registry.register_path(path, order(startup_timeout=1))

    with_registry(test)


def test_workers_are_added_and_taken_away_and_none_means_refusal(tmp_path):
    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m"), order())
        first = version.workers[0].pid
        await registry.scale("talker", None, 3)
        assert len({worker.pid for worker in version.workers}) == 3
        await registry.scale("talker", None, 1, 2)  # the maximum caps, the minimum does not take away
        assert len(version.workers) == 2
        await registry.scale("talker", None, 1)
        assert [worker.pid for worker in version.workers] == [first]
        await registry.scale("talker", None, 0)
        with pytest.raises(NoWorker):
            await ask(version, "x")
        with pytest.raises(BadRequest, match="max_worker cannot be less than min_worker"):
            await registry.scale("talker", None, 3, 1)

    with_registry(test)


def test_a_worker_that_is_taken_away_answers_what_it_has_first(tmp_path):
    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m"), order(initial_workers=2))
        go = tmp_path / "go"
        jobs = [submit(version, f"until {go}") for _ in range(2)]
        await until(lambda: all(worker.channel.batches for worker in version.workers))
        scaling = asyncio.create_task(registry.scale("talker", None, 0))
        await until(lambda: not version.workers)
        go.touch()
        await scaling
        assert [(await job.done).body.decode() for job in jobs] == [f"until {go}"] * 2

    with_registry(test)


def test_versions_stand_side_by_side(tmp_path):
    async def test(registry):
        one = await registry.register_path(talker(tmp_path / "1"), order())
        two = await registry.register_path(talker(tmp_path / "2", version="2.0"), order())
        assert registry.find("talker") is one
        registry.set_default("talker", "2.0")
        assert registry.find("talker") is two
        assert registry.find("talker", "1.0") is one
        with pytest.raises(Conflict, match=r"Model version 2.0 is already registered for model talker"):
            await registry.register_path(tmp_path / "2", order())
        with pytest.raises(CannotRemoveDefault):
            await registry.unregister("talker")
        with pytest.raises(ModelVersionNotFound, match=r"Model version 9 does not exist for model talker"):
            registry.set_default("talker", "9")
        await registry.unregister("talker", "1.0")
        await registry.unregister("talker")
        with pytest.raises(ModelNotFound):
            registry.find("talker")

    with_registry(test)


def test_unregistering_waits_for_what_was_accepted_and_gives_up_after_its_timeout(tmp_path):
    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m"), order())
        go = tmp_path / "go"
        job = submit(version, f"until {go}")
        with pytest.raises(CleanupTimeout, match="Timed out while cleaning resources: talker"):
            await registry.unregister("talker")
        assert registry.find("talker") is version
        go.touch()
        await registry.unregister("talker")
        assert (await job.done).status == 200

    with_registry(test, unregister_model_timeout=1)


def test_unregistering_does_not_wait_for_requests_to_stop_coming(tmp_path):
    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m"), order())
        go = tmp_path / "go"
        accepted = [submit(version, f"until {go}") for _ in range(3)]
        unregistering = asyncio.create_task(registry.unregister("talker"))
        await asyncio.sleep(0)
        with pytest.raises(ModelNotFound):  # what comes now would keep it busy for ever
            registry.find("talker")
        with pytest.raises(Conflict):
            await registry.register_path(tmp_path / "m", order())
        go.touch()
        await asyncio.wait_for(unregistering, TIMEOUT)
        assert [job.done.result().status for job in accepted] == [200] * 3
        await registry.register_path(tmp_path / "m", order())

    with_registry(test)


def test_closing_ends_a_model_that_is_being_unregistered(tmp_path):
    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m"), order())
        job = submit(version, "hang")
        await until(lambda: version.workers[0].channel.batches)
        pid = version.workers[0].pid
        unregistering = asyncio.create_task(registry.unregister("talker"))
        await asyncio.sleep(0)
        await registry.close()
        await asyncio.wait_for(unregistering, TIMEOUT)
        with pytest.raises(WorkerDied):
            await job.done
        assert not psutil.pid_exists(pid)

    with_registry(test)


def test_closing_answers_what_is_accepted_and_refuses_what_time_does_not_allow(tmp_path):
    async def test(registry):
        version = await registry.register_path(talker(tmp_path / "m"), order())
        quick = submit(version, "slow")
        await registry.close(drain=TIMEOUT)
        assert (await quick.done).body == b"slow"

    with_registry(test)

    async def test_late(registry):
        version = await registry.register_path(talker(tmp_path / "n"), order(initial_workers=2))
        hanging = [submit(version, "hang") for _ in range(2)]
        late = submit(version, "late")
        await until(lambda: all(worker.channel.batches for worker in version.workers))
        await registry.close(drain=0.05)
        with pytest.raises(Unavailable, match="stopping"):
            await late.done
        for job in hanging:
            with pytest.raises(WorkerDied):
                await asyncio.wait_for(job.done, TIMEOUT)

    with_registry(test_late)


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("", BadRequest, "Parameter url is required"),
        ("missing.mar", ModelNotFound, "Model not found: missing.mar"),
        ("../fake.mar", ModelNotFound, "Relative path is not allowed in url: ../fake.mar"),
        ("a\\..\\b.mar", ModelNotFound, "Relative path is not allowed"),
        ("/etc/passwd", ModelNotFound, "Relative path is not allowed"),
        ("http://169.254.169.254/m.mar", ModelNotFound, "does not match any allowed URL"),
        ("file:///etc/passwd", ModelNotFound, "does not match any allowed URL"),
        ("text.mar", BadRequest, "text.mar"),
    ],
)
def test_only_archives_in_the_model_store_are_registered(tmp_path, url, error, text):
    (tmp_path / "text.mar").write_text("this is no archive")

    async def test(registry):
        with pytest.raises(error, match=text):
            await registry.register(RegisterOrder(url=url))

    with_registry(test, model_store=tmp_path)


def test_names_that_could_leave_their_place_are_refused(tmp_path):
    async def test(registry):
        path = talker(tmp_path / "m")
        for bad in ({"model_name": "../x"}, {"version": "1/2"}, {"model_name": "a b"}):
            with pytest.raises(BadRequest, match="cannot be used"):
                await registry.register_path(path, order(**bad))

    with_registry(test)


def test_workers_end_when_the_front_end_is_killed_even_one_whose_handler_never_returns(tmp_path):
    talker(tmp_path / "m")
    script = FRONT_END.format(directory=str(tmp_path / "m"))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as front:
        pids = [int(pid) for pid in front.stdout.readline().split()]
        front.kill()
    assert len(pids) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=TIMEOUT)
    assert not alive


def test_exits_are_told_in_words():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert "out of memory" in describe_exit(-9)
