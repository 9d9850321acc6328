"""Autoscaling with real workers: they start under load and stop when idle."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from types import SimpleNamespace

import pytest

from tests.kit.jobs import TIMEOUT, answer_of
from tests.support.clients.talker import (
    HANDLER,
    a_registry,
    a_talker,
    ask,
    register,
    submit,
    talker,
    until,
)
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.workers.instance import ResourceUsage
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import BadRequest
from tsx_runtime.features.elastic.controller import _measure_cores, _WatchedVersion
from tsx_runtime.features.elastic.decision import MIN_QUIET_S
from tsx_runtime.features.elastic.feature import ElasticFeature

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("processes")]


async def adjust_until(registry, condition) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await registry.feature(ElasticFeature).controller.adjust()
        await asyncio.sleep(0.02)


def advance_clock(registry, seconds: float) -> None:
    old_clock = registry.feature(ElasticFeature).controller.clock
    registry.feature(ElasticFeature).controller.clock = lambda: old_clock() + seconds


async def test_workers_start_under_load_and_stop_after_it_without_lost_requests(tmp_path):
    gate = tmp_path / "go"

    async with a_registry(cpus=8) as registry:
        version = await a_talker(registry, tmp_path, max_workers=3)
        fixed_version = await register(registry, tmp_path / "n", name="fixed")
        jobs = [
            submit(version, f"until {gate}")
            for version in (version, fixed_version)
            for _ in range(6)
        ]
        await adjust_until(registry, lambda: len(version.workers) == 3 and version.ready)
        await until(lambda: all(worker.state is WorkerState.READY for worker in version.workers))
        assert len(fixed_version.workers) == 1
        assert "requests wait" in version.last_scaling
        assert version.stats.scalings["queue"] == 2
        gate.touch()
        for job in jobs:
            await answer_of(job)
        for _ in range(3):
            await registry.feature(ElasticFeature).controller.adjust()
            advance_clock(registry, MIN_QUIET_S + 1)
        await adjust_until(registry, lambda: len(version.workers) == 1)
        assert version.stats.scalings["quiet"] == 1
        assert await ask(version, "still") == "still"


async def test_workers_start_if_one_cannot_keep_the_latency_target(tmp_path):
    handler = "import time\n\ndef handle(data, context):\n    time.sleep(0.02 * len(data or []))\n    return data and [b'ok'] * len(data)\n"

    async with a_registry(cpus=8) as registry:
        version = await a_talker(registry, tmp_path, handler, max_workers=3, slo="p99<200ms")
        end = time.monotonic() + TIMEOUT
        jobs = []
        while len(version.workers) < 2:
            assert time.monotonic() < end
            jobs += [submit(version, "x") for _ in range(4)]
            # 200 requests per second arrive; one worker can answer 50.
            await asyncio.sleep(0.02)
            await registry.feature(ElasticFeature).controller.adjust()
        assert "requests/s arrive, of which these answer" in version.last_scaling
        assert "(slo)" in version.last_scaling
        await asyncio.wait([job.done for job in jobs], timeout=TIMEOUT)
        assert {type(job.done.exception()).__name__ for job in jobs} <= {"NoneType", "QueueFull"}


async def test_an_idle_model_is_unloaded_and_reloaded_by_its_next_request(registry, tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    handler = f"import time\nfrom pathlib import Path\nwhile not Path({str(flag)!r}).exists():\n    time.sleep(0.01)\n{HANDLER}"

    version = await a_talker(registry, tmp_path, handler, config="scaleToZero: 10m\n")
    await ask(version, "a")
    advance_clock(registry, 590)
    await registry.feature(ElasticFeature).controller.adjust()
    assert len(version.workers) == 1
    advance_clock(registry, 20)
    await registry.feature(ElasticFeature).controller.adjust()
    assert version.asleep
    assert version.ready
    flag.unlink()
    jobs = [submit(version, body) for body in ("b", "c")]
    await until(lambda: version.workers and version.workers[0].pid)
    assert version.retry_after() >= 1
    os.kill(version.workers[0].pid, signal.SIGKILL)
    await until(lambda: version.workers[0].restarts == 1)
    flag.touch()
    answers = [await answer_of(job) for job in jobs]
    assert [answer.body for answer in answers] == [b"b", b"c"]
    assert all(
        float(answer.headers.decode().partition("x-tsx-cold-start: ")[2]) > 0 for answer in answers
    )
    warm_response = await answer_of(submit(version, "d"))
    assert b"cold-start" not in warm_response.headers
    assert version.stats.scalings == {"unused": 1, "request": 1}
    await version.scale(0, 0)
    assert not version.asleep


async def test_a_model_that_scales_to_zero_is_loaded_by_its_first_request(registry, tmp_path):
    config = "scaleToZero: 90\n"
    version = await registry.register_path(
        talker(tmp_path / "m", config=config), RegisterOrder(url="m", initial_workers=0)
    )
    assert (version.min_workers, version.max_workers, version.asleep) == (0, 1, True)
    assert await ask(version, "a") == "a"
    with pytest.raises(BadRequest, match="useJobTicket"):
        await registry.register_path(
            talker(tmp_path / "n", name="n", config=config + "useJobTicket: true\n"),
            RegisterOrder(url="n", model_name="n"),
        )


async def test_cpu_time_before_a_restart_is_not_counted():
    version, watched_version, worker = (
        SimpleNamespace(stats=SimpleNamespace()),
        _WatchedVersion(),
        Worker("1", (), 0.0),
    )
    for process, busy_seconds, cpu in [(1, 10.0, 50.0), (2, 12.0, 0.1), (2, 14.0, 1.1)]:
        worker.instance, version.stats.busy_seconds = process, busy_seconds
        _measure_cores(version, watched_version, {worker: ResourceUsage((1,), 0, cpu, 0)})
    assert watched_version.cores_per_worker == pytest.approx(0.5)
