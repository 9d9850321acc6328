"""Traffic splits without a server: which versions and observers get a job, and refused changes."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.clients.talker import a_registry
from tests.support.models import make_model
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Flow, Job, ObservedJob, WaitingJob
from tsx_runtime.core.telemetry.batch_times import NO_TIMES
from tsx_runtime.core.traffic.routing import make_table
from tsx_runtime.core.traffic.splitter import Splitter
from tsx_runtime.errors import Conflict
from tsx_runtime.settings.traffic_policy import NOTHING, Traffic

pytestmark = pytest.mark.anyio
SILENT = "def handle(data, context):\n    return data and ['ok'] * len(data)\n"


def a_version(number: str, client_timeout: float = 0.0) -> Any:
    """Make a version that records the jobs that are submitted to it."""
    jobs: list[Job] = []
    return SimpleNamespace(
        version=number,
        client_timeout=client_timeout,
        plan=SimpleNamespace(strategy=SimpleNamespace(sequences=None)),
        jobs=jobs,
        submit=jobs.append,
        leave=jobs.remove,
    )


def split(traffic: Traffic, *versions: Any, draws: tuple[float, ...] = (0.5,)) -> Splitter:
    by_number = {version.version: version for version in versions}
    splitter = Splitter("digits", iter(draws).__next__)
    splitter.set(make_table("digits", traffic, by_number, by_number, "1.0"), by_number)
    return splitter


async def test_observers_share_a_draw_that_does_not_choose_the_version() -> None:
    """Check this, since the draw of the version would show a 1 % observer only one version.

    With a draw of their own, a request of a small share would often be missing in a larger one.
    """
    draws_seen: list[float] = []

    class Observer:
        def __init__(self, share: float) -> None:
            self.share = share

        def should_observe(self, draw: float) -> bool:
            draws_seen.append(draw)
            return draw < self.share

        def wrap_job(self, job: Job, version: Any) -> Job:
            return ObservedJob(job, lambda *values: None, 0)

    first, second = a_version("1.0"), a_version("2.0")
    weights = Traffic(weights={"1.0": 60, "2.0": 40})
    splitter = split(weights, first, second, draws=(0.7, 0.2))
    splitter.observers = [Observer(0.5), Observer(0.1)]
    job = WaitingJob(b"", b"x", time.monotonic())
    splitter.submit(job)
    assert draws_seen == [0.2, 0.2]
    assert job.routed is second
    (submitted_job,) = second.jobs
    assert isinstance(submitted_job, ObservedJob)
    assert submitted_job.job is job
    splitter.leave(job)
    assert second.jobs == []


async def test_an_answered_job_is_released_without_garbage_collection() -> None:
    version = a_version("1.0")
    splitter = split(NOTHING, version, draws=(0.5,) * 4)
    observer: Any = SimpleNamespace(
        should_observe=lambda draw: True,
        wrap_job=lambda job, version: ObservedJob(job, lambda answer: None, 0),
    )
    splitter.observers = [observer, observer]
    answers = [
        lambda job: job.answer(200, b"", b"a", (0.0, 0.0, 0.0, 1, NO_TIMES, b"", None)),
        lambda job: job.refuse(Conflict("full")),
    ]
    gc.disable()
    try:
        for answer in answers:
            splitter.submit(Job(b"", b"x", 0.0, None, 0))
            job = version.jobs.pop()
            answer(job)
            reference = weakref.ref(job)
            del job
            assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("deadline", "client_timeout", "expected_deadline"),
    [(None, 0.0, None), (None, 5.0, 105.0), (103.0, 5.0, 103.0), (107.0, 5.0, 105.0)],
)
async def test_the_earlier_deadline_applies(
    deadline: float | None, client_timeout: float, expected_deadline: float | None
) -> None:
    job = WaitingJob(b"", b"x", 100.0, deadline)
    split(NOTHING, a_version("1.0", client_timeout)).submit(job)
    assert job.deadline == expected_deadline


async def test_a_slow_client_pauses_the_workers_job() -> None:
    calls: list[tuple[str, Job]] = []
    worker: Any = SimpleNamespace(
        hold=lambda job: calls.append(("hold", job)),
        release=lambda job: calls.append(("release", job)),
    )

    class SlowJob(WaitingJob):
        def piece(self, headers: Any, body: Any, flow: Flow) -> None:
            flow.hold(self)
            flow.release(self)

    job = SlowJob(b"", b"x", 0.0)
    inner = ObservedJob(job, lambda *values: None, 0)
    outer = ObservedJob(inner, lambda *values: None, 0)
    outer.piece(b"", b"a", worker)
    assert calls == [("hold", outer), ("release", outer)]
    outer.gone = True
    assert job.gone


async def register(registry: Registry, directory: Path, workflow: str = "") -> None:
    """Register versions 1.0 and 2.0 of a model without workers."""
    for number in ("1.0", "2.0"):
        path = make_model(directory / f"{number}.mar", SILENT, name="digits", version=number)
        options = RegisterOrder(url=path.name, initial_workers=0, workflow=workflow)
        await registry.register_path(path, options)


@pytest.fixture
async def digits(tmp_path: Path) -> AsyncIterator[Registry]:
    async with a_registry(cache_dir=tmp_path / "cache", worker_preload=False) as registry:
        await register(registry, tmp_path)
        yield registry


async def test_undo_does_not_restore_a_removed_version(digits: Registry) -> None:
    digits.set_default("digits", "2.0")
    await digits.unregister("digits", "1.0")
    with pytest.raises(Conflict, match="is no longer registered"):
        digits.traffic_manager.rollback("digits")


async def test_a_workflow_node_has_no_traffic_policy(tmp_path: Path) -> None:
    async with a_registry(cache_dir=tmp_path / "cache", worker_preload=False) as registry:
        await register(registry, tmp_path, workflow="zoo")
        with pytest.raises(Conflict, match="digits is a node of workflow zoo"):
            registry.set_traffic("digits", Traffic(weights={"2.0": 1}))
        registry.set_traffic("digits", NOTHING)


async def test_changes_of_traffic_or_versions_are_reported(digits: Registry) -> None:
    reported_models: list[str] = []
    digits.traffic_manager.on_traffic.append(reported_models.append)
    digits.set_traffic("digits", Traffic(labels={"stable": "1.0"}))
    digits.set_default("digits", "2.0")
    assert reported_models == ["digits", "digits"]
    await digits.unregister("digits", "1.0")
    assert reported_models == ["digits"] * 3
