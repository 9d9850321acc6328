"""A batch as a dispatcher hands it to `Stats`, without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.kit.jobs import FakeJob
from tsx_runtime.core.scheduling.channel import arrivals
from tsx_runtime.core.telemetry.batch_times import NOTHING, Batch
from tsx_runtime.core.telemetry.version_stats import Stats


def batch_of(
    points: tuple[float, float, float],
    jobs: Sequence[Any],
    reported: bytes = NOTHING,
    statuses: Sequence[int] | None = None,
) -> Batch:
    """`points`: free, sent, answered; `statuses`: None where all are 200."""
    return *points, len(jobs), reported, arrivals(jobs), statuses


BATCH = batch_of((1.0, 1.0, 2.0), [FakeJob(arrived=0.0)])  # of an answer whose times do not matter


def count(
    stats: Stats,
    points: tuple[float, float, float],
    jobs: Sequence[Any],
    reported: bytes = NOTHING,
    statuses: Sequence[int] | None = None,
) -> None:
    """As the reply to a batch does."""
    stats.add_batch(batch_of(points, jobs, reported, statuses), jobs)
