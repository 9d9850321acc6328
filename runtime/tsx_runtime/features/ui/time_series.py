"""Throughput and latency of each version, for the charts of the web page.

There is one point per second for ten minutes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from tsx_runtime.core.telemetry.histogram import quantile
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.features.ui.generation import (
    GenerationPoint,
    GenerationSnapshot,
    generation_between,
    read_generation,
)

MAX_POINTS = 600


class SampledVersion(Protocol):
    """The part of a version that is sampled."""

    name: str
    version: str

    @property
    def stats(self) -> Stats: ...

    @property
    def pending(self) -> int: ...

    @property
    def batch_places(self) -> int: ...


class SampledModel(Protocol):
    @property
    def versions(self) -> Mapping[str, SampledVersion]: ...


class CounterSnapshot(NamedTuple):
    """A version's counters at one moment."""

    at: float
    answers: int
    failed: int
    latency: tuple[int, ...]  # see `Durations.counts`
    refused: int  # failed requests that no worker answered
    batches: int
    # Sums of seconds: first of requests (total, queue, batch wait), then of batches (each of the
    # handler's steps).
    stages: tuple[float, ...]
    generation: GenerationSnapshot | None = None


class SeriesPoint(NamedTuple):
    """The values of one second; a latency is in seconds, or None without answers."""

    number: int
    rate: float  # answers per second
    failures: float  # per second
    p50: float | None
    p99: float | None
    waiting: int
    refused: float = 0.0  # failures per second that no worker answered
    places: float = 0.0  # places for requests in the batches of this second
    # Mean seconds of a request: queue, batch, preprocess, inference, postprocess, other.
    stages: tuple[float, ...] | None = None
    generation: GenerationPoint | None = None  # only for a model that generates text


def read(stats: Stats, now: float) -> CounterSnapshot:
    sums = (
        stats.latency,
        stats.queue,
        stats.batch_wait,
        stats.preprocess,
        stats.inference,
        stats.postprocess,
    )
    return CounterSnapshot(
        now,
        sum(stats.answers.values()),
        stats.errors,
        stats.latency.counts(),
        stats.failed_refusals,
        stats.batches,
        tuple(durations.sum for durations in sums),
        read_generation(stats.handler_metrics),
    )


def between(
    before: CounterSnapshot,
    after: CounterSnapshot,
    number: int,
    waiting: int,
    batch_places: int = 0,
) -> SeriesPoint:
    seconds = max(after.at - before.at, 1e-9)
    answers = after.answers - before.answers
    latency = [new - old for new, old in zip(after.latency, before.latency, strict=True)]
    batches = after.batches - before.batches
    return SeriesPoint(
        number,
        round(answers / seconds, 2),
        round((after.failed - before.failed) / seconds, 2),
        quantile(latency, 0.5),
        quantile(latency, 0.99),
        waiting,
        round((after.refused - before.refused) / seconds, 2),
        round(batches * batch_places / seconds, 2),
        _stages(before.stages, after.stages, sum(latency), batches),
        generation_between(before.generation, after.generation, seconds),
    )


def _stages(
    before: tuple[float, ...], after: tuple[float, ...], requests: int, batches: int
) -> tuple[float, ...] | None:
    """Return the mean seconds of a request in each stage, or None without requests.

    A handler's step takes as long for each request as for its batch, so its mean is over batches.
    """
    if not requests or not batches:
        return None
    total, queue, wait, *steps = (new - old for new, old in zip(after, before, strict=True))
    stages = (queue / requests, wait / requests, *(step / batches for step in steps))
    return tuple(round(stage, 6) for stage in (*stages, max(0.0, total / requests - sum(stages))))


def _before_any_request(reading: CounterSnapshot) -> CounterSnapshot:
    """Return the counters of a version as they were before its first second."""
    latency, stages = (0,) * len(reading.latency), (0.0,) * len(reading.stages)
    return CounterSnapshot(reading.at - 1.0, 0, 0, latency, 0, 0, stages)


class _Track:
    """A version's points, and its counters at the newest point."""

    def __init__(self, version: SampledVersion, last: CounterSnapshot) -> None:
        self.version = version
        self.last = last
        self.points: deque[SeriesPoint] = deque(maxlen=MAX_POINTS)


class TimeSeries:
    """The points of all versions.

    `sample` is called once a second. Its cost grows with the number of versions, but not with that
    of requests.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[SampledModel]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._clock = clock
        self._tracks: dict[tuple[str, str], _Track] = {}
        self.number = 0  # number of the newest point, equal for all versions

    def sample(self) -> None:
        now = self._clock()
        self.number += 1
        tracks, self._tracks = self._tracks, {}
        for version in [version for model in self._models() for version in model.versions.values()]:
            key = (version.name, version.version)
            track, reading = tracks.get(key), read(version.stats, now)
            if track is None:
                track = _Track(version, _before_any_request(reading))
            elif track.version is not version:  # A replacement starts with its own counters.
                track.version, track.last = version, _before_any_request(reading)
            track.points.append(
                between(track.last, reading, self.number, version.pending, version.batch_places)
            )
            track.last = reading
            self._tracks[key] = track

    def since(self, number: int) -> dict[tuple[str, str], list[SeriesPoint]]:
        """Return the points after the one with this number, oldest first."""
        return {key: _points_after(track.points, number) for key, track in self._tracks.items()}


def _points_after(points: deque[SeriesPoint], number: int) -> list[SeriesPoint]:
    newer: list[SeriesPoint] = []
    for point in reversed(points):
        if point.number <= number:
            break
        newer.append(point)
    return newer[::-1]
