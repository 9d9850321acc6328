"""The measurement of two workers in turn.

It shows how many times faster than the reference a form computes batches of one size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tsx_cli.bench.load.statistics import RatioInterval, real_difference
from tsx_cli.bench.search.latency_curve import (
    CHUNK_S,
    MAX_WARM_UP_CHUNKS,
    MIN_CHUNK_BATCHES,
    is_settled,
    measure_chunk,
)
from tsx_cli.bench.search.machine import Watch, judge
from tsx_cli.bench.search.worker import StandaloneWorker, WorkerFailed
from tsx_cli.optimize.results import SizeFigures
from tsx_runtime.wire import Item

MIN_ROUNDS, MAX_ROUNDS = 5, 40  # A round is a chunk of batches on each worker.
MAX_RELATIVE_ERROR = 0.03  # half-width of the ratio's interval, relative to the ratio


class ReferenceFailed(Exception):
    """The reference failed, not the form."""


class RoundTimes(NamedTuple):
    """The time of a batch in a round, in seconds, for the reference and for the form.

    It is the median. In a disturbed round it is the minimum, since disturbances only add time.
    """

    reference: float
    form: float
    disturbed: str = ""  # description of a disturbance


class PairedTiming(NamedTuple):
    figures: SizeFigures
    rounds: list[RoundTimes]


def measure_pair(
    reference: StandaloneWorker,
    form: StandaloneWorker,
    items: Sequence[Item],
    size: int,
    seconds: float,
    *,
    watch: Callable[[], Watch],
    cores: int,
) -> PairedTiming:
    """Warm up both workers, and measure rounds until the ratio is precise or the time is over.

    Raises:
        WorkerFailed: The form's worker failed.
        ReferenceFailed: The reference's worker failed.
    """

    def times_of(worker: StandaloneWorker, number: int, seconds: float) -> list[float]:
        try:
            return [batch.seconds for batch in measure_chunk(worker, items, size, number, seconds)]
        except WorkerFailed as error:
            if worker is reference:
                raise ReferenceFailed(str(error)) from error
            raise

    deadline = time.monotonic() + seconds
    chunk_s = min(CHUNK_S, seconds / MIN_ROUNDS / 4)
    for worker in (reference, form):
        _warm_up(partial(times_of, worker), chunk_s, time.monotonic() + seconds / 4)
    rounds: list[RoundTimes] = []
    while len(rounds) < MIN_ROUNDS or (
        len(rounds) < MAX_ROUNDS
        and time.monotonic() < deadline
        and not _is_precise(ratio_of(rounds))
    ):
        # The order alternates, so that neither worker is always the second.
        order = (reference, form) if len(rounds) % 2 else (form, reference)
        with watch() as noise_watch:
            # The first batch is left out, because the worker was idle before it.
            times = {worker: times_of(worker, len(rounds), chunk_s)[1:] for worker in order}
        disturbed = judge(noise_watch.noise, cores)
        figure = min if disturbed else statistics.median
        rounds.append(
            RoundTimes(
                figure(times[reference]), figure(times[form]), disturbed[0] if disturbed else ""
            )
        )
    interval, valid_rounds = ratio_of(rounds), undisturbed(rounds)
    figures = SizeFigures(
        batch_size=size,
        median_ms=1000 * statistics.median(entry.form for entry in valid_rounds),
        reference_ms=1000 * statistics.median(entry.reference for entry in valid_rounds),
        ratio=interval.ratio,
        low=interval.low,
        high=interval.high,
    )
    return PairedTiming(figures, rounds)


def undisturbed(rounds: Sequence[RoundTimes]) -> Sequence[RoundTimes]:
    """Return the undisturbed rounds if there are enough, or else all rounds."""
    undisturbed_rounds = [entry for entry in rounds if not entry.disturbed]
    return undisturbed_rounds if len(undisturbed_rounds) >= MIN_ROUNDS else rounds


def ratio_of(rounds: Sequence[RoundTimes]) -> RatioInterval:
    """Return the ratio of the reference's time to the form's time."""
    valid_rounds = undisturbed(rounds)
    return real_difference(
        [entry.form for entry in valid_rounds], [entry.reference for entry in valid_rounds]
    )


def _is_precise(interval: RatioInterval) -> bool:
    return interval.high <= (1 + MAX_RELATIVE_ERROR) * interval.ratio


def _warm_up(times: Callable[[int, float], list[float]], seconds: float, deadline: float) -> None:
    chunks: list[list[float]] = []
    while (
        not is_settled(chunks)
        and len(chunks) < MAX_WARM_UP_CHUNKS
        and (len(chunks) < MIN_CHUNK_BATCHES or time.monotonic() < deadline)
    ):
        chunks.append(times(len(chunks), seconds if chunks else 0.0))
