"""Throughput and latency of each version, one point per second for ten minutes, for the charts of
the web page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from tsx_runtime.core.telemetry.generation import (
    GenerationPoint,
    GenerationSnapshot,
    generation_between,
    read_generation,
)
from tsx_runtime.core.telemetry.histogram import quantile
from tsx_runtime.core.telemetry.version_stats import Stats

KEPT = 600  # points


class SampledVersion(Protocol):
    """The counters of one version that are sampled."""

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
    refused: int  # of the failed, those that no worker answered
    batches: int
    stages: tuple[
        float,
        ...,
        # seconds: of all requests the total, the queue and the wait for a batch; of all batches the
        # handler's steps
    ]
    generation: GenerationSnapshot | None = None


class SeriesPoint(NamedTuple):
    """The values of the preceding second. A latency is in seconds, or None if nothing was
    answered.
    """

    number: int
    rate: float  # answers a second
    failures: float  # a second
    p50: float | None
    p99: float | None
    waiting: int
    refused: float = 0.0  # of the failures, those that no worker answered
    places: float = 0.0  # for requests, in the batches of that second; 0 where there are no batches
    stages: tuple[float, ...] | None = (
        None  # mean seconds of a request: queue, batch, preprocess, inference, postprocess, other
    )
    generation: GenerationPoint | None = None  # of a model that generates text


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
        tuple(each.sum for each in sums),
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
    latency = [now - then for now, then in zip(after.latency, before.latency, strict=True)]
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
    """A handler's step takes as long for each request of a batch as for the batch: here, as for a
    mean batch.
    """
    if not requests or not batches:
        return None
    total, queue, wait, *steps = (now - then for now, then in zip(after, before, strict=True))
    parts = (queue / requests, wait / requests, *(step / batches for step in steps))
    return tuple(round(part, 6) for part in (*parts, max(0.0, total / requests - sum(parts))))


def _before_any_request(reading: CounterSnapshot) -> CounterSnapshot:
    """Return the counters of a version that was registered within the last second."""
    latency, stages = (0,) * len(reading.latency), (0.0,) * len(reading.stages)
    return CounterSnapshot(reading.at - 1.0, 0, 0, latency, 0, 0, stages)


class _Track:
    """One version's points, and its counters when the newest was made."""

    def __init__(self, version: SampledVersion, last: CounterSnapshot) -> None:
        self.version = version
        self.last = last
        self.points: deque[SeriesPoint] = deque(maxlen=KEPT)


class TimeSeries:
    """`sample` is called once a second; its cost grows with the number of versions, not of
    requests.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[SampledModel]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._clock = clock
        self._tracks: dict[tuple[str, str], _Track] = {}
        self.number = 0  # of the newest point; each second has one, the same for all versions

    def sample(self) -> None:
        now = self._clock()
        self.number += 1
        tracks, self._tracks = self._tracks, {}
        for version in [version for model in self._models() for version in model.versions.values()]:
            key = (version.name, version.version)
            track, reading = tracks.get(key), read(version.stats, now)
            if track is None:
                track = _Track(version, _before_any_request(reading))
            elif track.version is not version:  # a replacement has counters of its own
                track.version, track.last = version, _before_any_request(reading)
            track.points.append(
                between(track.last, reading, self.number, version.pending, version.batch_places)
            )
            track.last = reading
            self._tracks[key] = track

    def since(self, number: int) -> dict[tuple[str, str], list[SeriesPoint]]:
        """The points behind that number, oldest first."""
        return {key: _behind(track.points, number) for key, track in self._tracks.items()}


def _behind(points: deque[SeriesPoint], number: int) -> list[SeriesPoint]:
    newer: list[SeriesPoint] = []
    for point in reversed(points):
        if point.number <= number:
            break
        newer.append(point)
    return newer[::-1]
