"""Times two workers in turn: how many times as fast as the reference a form answers batches of one
size.
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

LEAST = 5  # rounds, each a chunk of batches of either worker
MOST = 40
PRECISE = 0.03  # half the width of the interval that is narrow enough, as a share of the ratio


class ReferenceFailed(Exception):
    """The reference failed, not the form. The message says how."""


class RoundTimes(NamedTuple):
    """Seconds of a batch in a round: the median, or, in a disturbed round, the minimum, since
    disturbances only add time.
    """

    reference: float
    form: float
    disturbed: str = ""  # what disturbed it


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
    """Warms up, then measures until the ratio is precise enough, or the time is over and there are
    enough rounds. Raises WorkerFailed, ReferenceFailed.
    """

    def times_of(worker: StandaloneWorker, number: int, seconds: float) -> list[float]:
        try:
            return [each.seconds for each in measure_chunk(worker, items, size, number, seconds)]
        except WorkerFailed as error:
            if worker is reference:
                raise ReferenceFailed(str(error)) from error
            raise

    ends = time.monotonic() + seconds
    chunk = min(CHUNK_S, seconds / LEAST / 4)
    for worker in (reference, form):
        _warm_up(partial(times_of, worker), chunk, time.monotonic() + seconds / 4)
    rounds: list[RoundTimes] = []
    while len(rounds) < LEAST or (
        len(rounds) < MOST and time.monotonic() < ends and not _precise(ratio_of(rounds))
    ):
        order = (
            (reference, form) if len(rounds) % 2 else (form, reference)
        )  # so that neither is always the second
        with watch() as watched:
            times = {
                worker: times_of(worker, len(rounds), chunk)[1:] for worker in order
            }  # before the first, the worker was idle
        disturbed = judge(watched.noise, cores)
        figure = min if disturbed else statistics.median
        rounds.append(
            RoundTimes(
                figure(times[reference]), figure(times[form]), disturbed[0] if disturbed else ""
            )
        )
    found, used = ratio_of(rounds), undisturbed(rounds)
    figures = SizeFigures(
        batch_size=size,
        median_ms=1000 * statistics.median(each.form for each in used),
        reference_ms=1000 * statistics.median(each.reference for each in used),
        ratio=found.ratio,
        low=found.low,
        high=found.high,
    )
    return PairedTiming(figures, rounds)


def undisturbed(rounds: Sequence[RoundTimes]) -> Sequence[RoundTimes]:
    """The rounds without disturbances, if there are enough; else all."""
    quiet = [each for each in rounds if not each.disturbed]
    return quiet if len(quiet) >= LEAST else rounds


def ratio_of(rounds: Sequence[RoundTimes]) -> RatioInterval:
    """The reference's time divided by the form's."""
    used = undisturbed(rounds)
    return real_difference([each.form for each in used], [each.reference for each in used])


def _precise(found: RatioInterval) -> bool:
    return found.high <= (1 + PRECISE) * found.ratio


def _warm_up(times: Callable[[int, float], list[float]], seconds: float, ends: float) -> None:
    chunks: list[list[float]] = []
    while (
        not is_settled(chunks)
        and len(chunks) < MAX_WARM_UP_CHUNKS
        and (len(chunks) < MIN_CHUNK_BATCHES or time.monotonic() < ends)
    ):
        chunks.append(times(len(chunks), seconds if chunks else 0.0))
