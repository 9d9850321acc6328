"""Splits without a server: what they hand on, what an observer's job passes on, and what cannot be
changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.models import make_model
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Flow, Job, ObservedJob, WaitingJob
from tsx_runtime.core.traffic.routing import make_table
from tsx_runtime.core.traffic.splitter import Splitter
from tsx_runtime.errors import Conflict
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.traffic_policy import NOTHING, Traffic

SILENT = "def handle(data, context):\n    return data and ['ok'] * len(data)\n"


def stand_in(number: str, client_timeout: float = 0.0) -> Any:
    """A version that keeps what is submitted."""
    plan = SimpleNamespace(strategy=SimpleNamespace(sequences=None))
    jobs: list[Job] = []
    return SimpleNamespace(
        version=number,
        client_timeout=client_timeout,
        plan=plan,
        jobs=jobs,
        submit=jobs.append,
        leave=jobs.remove,
    )


def in_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


def test_each_observer_has_a_draw_of_its_own_and_the_versions_another() -> None:
    """Else a share of one in ten would see only those who go to the first version."""
    draws = iter([0.7, 0.2, 0.9])
    seen: list[float] = []

    class Observer:
        def wants(self, draw: float) -> bool:
            seen.append(draw)
            return draw < 0.5

        def watch(self, job: Job, version: Any) -> Job:
            return ObservedJob(job, lambda *seen: None, 0)

    def test() -> None:
        versions = {"1.0": stand_in("1.0"), "2.0": stand_in("2.0")}
        split = Splitter("digits", lambda: next(draws))
        split.set(
            make_table(
                "digits", Traffic(weights={"1.0": 60, "2.0": 40}), versions, versions, "1.0"
            ),
            versions,
        )
        split.observers = [Observer(), Observer()]
        job = WaitingJob(b"", b"x", time.monotonic())
        split.submit(job)
        assert seen == [0.2, 0.9]
        assert job.routed is versions["2.0"]
        (submitted,) = versions["2.0"].jobs
        assert isinstance(submitted, ObservedJob)
        assert submitted.job is job
        split.leave(job)
        assert versions["2.0"].jobs == []

    in_loop(test)


@pytest.mark.parametrize(
    ("own", "of_version", "due"),
    [(None, 0.0, None), (None, 5.0, 105.0), (103.0, 5.0, 103.0), (107.0, 5.0, 105.0)],
)
def test_the_sooner_deadline_holds(own: float | None, of_version: float, due: float | None) -> None:
    def test() -> None:
        versions = {"1.0": stand_in("1.0", of_version)}
        split = Splitter("digits")
        split.set(make_table("digits", NOTHING, versions, versions, "1.0"), versions)
        job = WaitingJob(b"", b"x", 100.0, own)
        split.submit(job)
        assert job.deadline == due

    in_loop(test)


def test_a_client_that_reads_slowly_holds_the_job_that_the_worker_knows() -> None:
    held: list[tuple[str, Job]] = []

    class Worker:
        def hold(self, job: Job) -> None:
            held.append(("hold", job))

        def release(self, job: Job) -> None:
            held.append(("release", job))

    class Slow(WaitingJob):
        def piece(self, headers: Any, body: Any, flow: Flow) -> None:
            flow.hold(self)
            flow.release(self)

    def test() -> None:
        job = Slow(b"", b"x", 0.0)
        inner = ObservedJob(job, lambda *seen: None, 0)
        watched = ObservedJob(inner, lambda *seen: None, 0)
        watched.piece(b"", b"a", Worker())
        assert held == [("hold", watched), ("release", watched)]
        watched.gone = True
        assert job.gone

    in_loop(test)


def with_registry(tmp_path: Path, test: Callable[[Registry], None], workflow: str = "") -> None:
    for number in ("1.0", "2.0"):
        make_model(tmp_path / f"digits-{number}.mar", SILENT, name="digits", version=number)

    async def run() -> None:
        registry = Registry(
            Settings(model_store=tmp_path, cache_dir=tmp_path / "cache", worker_preload=False)
        )
        try:
            for number in ("1.0", "2.0"):
                await registry.register(
                    RegisterOrder(url=f"digits-{number}.mar", initial_workers=0, workflow=workflow)
                )
            test(registry)
            if not workflow:
                await registry.unregister(
                    "digits", "1.0" if registry.find("digits").version == "2.0" else "2.0"
                )
                with pytest.raises(Conflict, match="is no longer registered"):
                    registry.rollback("digits")
        finally:
            await registry.close()

    asyncio.run(run())


def test_the_way_back_does_not_lead_to_a_version_that_is_gone(tmp_path: Path) -> None:
    with_registry(tmp_path, lambda registry: registry.set_default("digits", "2.0"))


def test_a_node_of_a_workflow_has_no_traffic(tmp_path: Path) -> None:
    def test(registry: Registry) -> None:
        with pytest.raises(Conflict, match="Model digits is a node of workflow zoo"):
            registry.set_traffic("digits", Traffic(weights={"2.0": 1}))
        registry.set_traffic("digits", NOTHING)

    with_registry(tmp_path, test, "zoo")


def test_models_are_reported_when_their_traffic_changes_or_they_come_and_go(tmp_path: Path) -> None:
    reported: list[str] = []

    def test(registry: Registry) -> None:
        registry.on_traffic.append(reported.append)
        registry.set_traffic("digits", Traffic(labels={"stable": "1.0"}))
        registry.set_default("digits", "2.0")
        assert reported == ["digits", "digits"]

    with_registry(tmp_path, test)
    assert reported.count("digits") == 4  # two versions went
