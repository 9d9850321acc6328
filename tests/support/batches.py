"""Batches in the form that a dispatcher passes to `Stats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.kit.jobs import FakeJob
from tsx_runtime.core.scheduling.channel import pack_arrivals
from tsx_runtime.core.telemetry.batch_times import NO_TIMES, Batch
from tsx_runtime.core.telemetry.version_stats import Stats


def batch_of(
    points: tuple[float, float, float],
    jobs: Sequence[Any],
    worker_times: bytes = NO_TIMES,
    statuses: Sequence[int] | None = None,
) -> Batch:
    """Make a batch with its times (free, sent, answered); without `statuses`, all are 200."""
    return *points, len(jobs), worker_times, pack_arrivals(jobs), statuses


# A batch for tests in which its times do not matter.
BATCH = batch_of((1.0, 1.0, 2.0), [FakeJob(arrived=0.0)])


def count(
    stats: Stats,
    points: tuple[float, float, float],
    jobs: Sequence[Any],
    worker_times: bytes = NO_TIMES,
    statuses: Sequence[int] | None = None,
) -> None:
    """Count a batch as when its reply arrives."""
    stats.add_batch(batch_of(points, jobs, worker_times, statuses), jobs)
