"""Statistics of rounds: the end of the warm-up, confidence intervals, and whether a difference is
significant.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from tsx_cli.bench.load.results import Figure, Latency, Round, StreamFigures
from tsx_runtime.shared.quantiles import bucket_of

CONFIDENCE = 0.95
DRAWS = 400  # of a bootstrap
FEWEST = 3  # rounds before one may be sure of anything
PIECES = 60  # that the time is cut into where the end of the warm-up is looked for
PIECE = 10  # answers that make one, where there are enough
CERTAIN = 6.0  # standard errors that the beginning must differ by to be a warm-up
SLIGHT = 0.02  # of the steady rate: a beginning that differs by less is none

QUANTILES: dict[str, float] = {
    "p50_ms": 0.5,
    "p90_ms": 0.9,
    "p95_ms": 0.95,
    "p99_ms": 0.99,
    "p999_ms": 0.999,
}
Histogram = Sequence[tuple[float, int]]  # (upper end of a bucket, how many)


class RatioInterval(NamedTuple):
    """How many times the first's figure the second's is, and the interval that this lies in; `real`
    where 1 is outside of it.
    """

    ratio: float
    low: float
    high: float
    real: bool


def warm_up_end(slots: Sequence[float], most: float = 0.5) -> int:
    """How many of the slots, each with its number of answers, come before the steady state; at most
    this share of them.

    The time is parted in two where that leaves the least squares, and again from there on, which
    follows a ramp to its end, as long as the first part is not like the rest in its median: so a
    stall in the middle is no warm-up, and one at the beginning is. Where there are too few answers
    to tell, and where nothing changed, it is 0.
    """
    length = _piece(slots)
    pieces = [
        sum(slots[start : start + length]) for start in range(0, len(slots) - length + 1, length)
    ]
    if len(pieces) < 6:
        return 0
    tail = pieces[len(pieces) // 2 :]
    level = median(tail)
    if level <= 0:
        return 0
    noise = _noise(tail, level)
    clipped = [
        min(max(piece, level - 6 * noise), level + 6 * noise) for piece in pieces
    ]  # a stall is no more than an outlier
    start, last = 0, int(len(pieces) * most)
    while (cut := _parting(pieces, clipped, start, last, level, noise)) is not None:
        start = cut
    return start * length


def _noise(tail: Sequence[float], level: float) -> float:
    """The standard deviation of a piece, without what is far off; not less than where answers come
    in an even stream.
    """
    middle = max(
        1.4826 * median(abs(piece - level) for piece in tail), math.sqrt(level) / 2, 0.005 * level
    )
    near = [piece for piece in tail if abs(piece - level) <= 3 * middle]
    return max(middle, stdev(near) if len(near) > 1 else 0.0)


def _parting(
    pieces: Sequence[float],
    clipped: Sequence[float],
    start: int,
    last: int,
    level: float,
    noise: float,
) -> int | None:
    """Where what comes from `start` on is parted best, if what is before that is not like the
    steady state.
    """
    sums, end = [0.0, *accumulate(clipped)], len(clipped)
    found = []
    for cut in range(start + 1, last + 1):
        before, after = sums[cut] - sums[start], sums[end] - sums[cut]
        if _differs(pieces[start:cut], level, noise):
            found.append(
                (before**2 / (cut - start) + after**2 / (end - cut), cut)
            )  # the greater, the less the squares that are left
    return max(found)[1] if found else None


def _piece(slots: Sequence[float]) -> int:
    """Slots that are looked at together, so that one has answers enough and there are not too
    many.
    """
    total = sum(slots)
    enough = math.ceil(PIECE * len(slots) / total) if total > 0 else 1
    return max(1, math.ceil(len(slots) / PIECES), min(enough, len(slots) // 10))


def _differs(pieces: Sequence[float], level: float, noise: float) -> bool:
    return abs(median(pieces) - level) > max(
        SLIGHT * level, CERTAIN * noise / math.sqrt(len(pieces))
    )


def interval(values: Sequence[float]) -> Figure:
    """The mean of repetitions, and the t-interval around it, which ends at 0 as no figure is
    negative.

    One repetition says nothing of its noise: both ends are the value itself.
    """
    mean = fmean(values)
    if len(values) < 2:
        return Figure(value=mean, low=mean, high=mean)
    half = t_quantile(len(values) - 1, CONFIDENCE) * stdev(values) / math.sqrt(len(values))
    return Figure(value=mean, low=max(0.0, mean - half), high=mean + half)


def throughput(rounds: Sequence[Round]) -> Figure:
    return interval([each.throughput for each in rounds])


def percentile_figure(rounds: Sequence[Round], which: str = "p99_ms") -> Figure:
    """A field of `Latency`, of all rounds' answers together; `ttft.p99_ms` of event streams. Its
    interval is by bootstrap: rounds are resampled, and answers within them.

    One round has none: its answers waited in one queue, so that they tell much less than as many
    that were drawn apart.
    """
    part, _, field = which.rpartition(".")
    timed = [_timed(each, part) for each in rounds]
    histograms = [each.histogram for each in timed if each.histogram]
    if not histograms or field not in QUANTILES:
        return interval([float(getattr(each.latency, field)) for each in timed])
    quantile, count = QUANTILES[field], len(histograms)
    value = percentile(merged(histograms), quantile)
    if count == 1:
        return Figure(value=value, low=value, high=value)
    drawn = _redrawn(histograms, quantile, random.Random(0))
    # A few resampled rounds differ less than rounds do; the factor and the t distribution correct
    # for that.
    half = t_quantile(count - 1, CONFIDENCE) * stdev(drawn) * math.sqrt(count / (count - 1))
    return Figure(value=value, low=max(0.0, value - half), high=value + half)


def _redrawn(
    histograms: Sequence[Histogram], quantile: float, chance: random.Random
) -> list[float]:
    """The percentile of each draw."""
    ends = [end for end, _ in merged(histograms)]
    sums = []
    for histogram in histograms:
        counts = dict(histogram)
        sums.append(list(accumulate(counts.get(end, 0) for end in ends)))
    drawn = []
    for _ in range(DRAWS):
        chosen = chance.choices(sums, k=len(sums))
        answers = sum(each[-1] for each in chosen)
        moved = quantile + chance.gauss(0, 1) * math.sqrt(
            quantile * (1 - quantile) / answers
        )  # where that of so many answers may lie
        rank = min(max(moved, 0.0), 1.0) * answers
        found = bisect_left(
            range(len(ends)), rank, key=lambda position: sum(each[position] for each in chosen)
        )
        drawn.append(ends[min(found, len(ends) - 1)])
    return drawn


def merged(histograms: Sequence[Histogram]) -> list[tuple[float, int]]:
    counts: dict[float, int] = {}
    for histogram in histograms:
        for end, count in histogram:
            counts[end] = counts.get(end, 0) + count
    return sorted(counts.items())


def percentile(histogram: Histogram, quantile: float) -> float:
    """The upper end of the bucket in which so large a share is reached; 0 where there is nothing.
    `histogram` is in order.
    """
    return (
        histogram[bucket_of((count for _, count in histogram), quantile)][0]
        if any(count for _, count in histogram)
        else 0.0
    )


class _Timed(NamedTuple):
    latency: Latency
    histogram: Histogram
    answers: int


def _timed(one: Round, part: str) -> _Timed:
    """Of a round its latency, or `ttft` or `tpot` of its event streams."""
    if not part:
        return _Timed(one.latency, one.histogram, one.ok)
    stream = one.stream or StreamFigures()
    histogram: Histogram = getattr(stream, f"{part}_histogram")
    return _Timed(getattr(stream, part), histogram, sum(count for _, count in histogram))


def stream(rounds: Sequence[Round]) -> StreamFigures | None:
    """Of all rounds together; None where no answer was an event stream."""
    found = [each.stream for each in rounds if each.stream is not None]
    if not found:
        return None
    good = [each.goodput for each in found if each.goodput is not None]
    return StreamFigures(
        answers=sum(each.answers for each in found),
        tokens=sum(each.tokens for each in found),
        prompt_tokens=sum(each.prompt_tokens for each in found),
        tokens_per_second=fmean(each.tokens_per_second for each in found),
        prompt_tokens_per_second=fmean(each.prompt_tokens_per_second for each in found),
        goodput=fmean(good) if good else None,
        ttft=latency(rounds, "ttft"),
        tpot=latency(rounds, "tpot"),
        ttft_histogram=merged([each.ttft_histogram for each in found]),
        tpot_histogram=merged([each.tpot_histogram for each in found]),
    )


def latency(rounds: Sequence[Round], part: str = "") -> Latency:
    """Of all rounds together."""
    timed = [_timed(each, part) for each in rounds]
    together = merged([each.histogram for each in timed])
    answers = sum(count for _, count in together)
    if not answers:
        return timed[0].latency if len(timed) == 1 else Latency()
    weight = sum(each.answers for each in timed) or 1
    mean = sum(each.latency.mean_ms * each.answers for each in timed) / weight
    slowest = max(
        each.latency.max_ms for each in timed
    )  # is known exactly, and lies within a bucket
    quantiles = {
        name: min(percentile(together, quantile), slowest or math.inf)
        for name, quantile in QUANTILES.items()
    }
    return Latency(mean_ms=mean, max_ms=slowest, **quantiles)


def enough(rounds: Sequence[Round], width: float) -> bool:
    """Whether the interval of the throughput is no wider, from end to end, than this share of
    it.
    """
    if len(rounds) < FEWEST:
        return False
    found = throughput(rounds)
    return found.high - found.low <= width * found.value


def real_difference(first: Sequence[float], second: Sequence[float]) -> RatioInterval:
    """Of two configurations that were measured alternately: the n-th figure of the one was measured
    beside the n-th of the other.

    What disturbed both of a pair is in neither's favour. The interval is of the mean of the
    logarithms of the ratios.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"pairs are needed: there are {len(first)} and {len(second)} figures")
    if min(*first, *second) <= 0:
        return RatioInterval(
            1.0 if fmean(first) == fmean(second) else math.inf if fmean(first) <= 0 else 0.0,
            0.0,
            math.inf,
            real=False,
        )
    logs = [math.log(right / left) for left, right in zip(first, second, strict=True)]
    if len(logs) == 1:
        return RatioInterval(math.exp(logs[0]), 0.0, math.inf, real=False)
    return _from_logs(
        fmean(logs), t_quantile(len(logs) - 1, CONFIDENCE) * stdev(logs) / math.sqrt(len(logs))
    )


def difference_of(first: Figure, second: Figure) -> RatioInterval:
    """Of figures that were measured apart.

    Where one of them has no interval, no difference is real.
    """
    if min(first.value, second.value) <= 0:
        return RatioInterval(
            1.0 if first.value == second.value else math.inf if first.value <= 0 else 0.0,
            0.0,
            math.inf,
            real=False,
        )
    ratio = second.value / first.value
    if first.low == first.high or second.low == second.high:
        return RatioInterval(ratio, 0.0, math.inf, real=False)
    return _from_logs(
        math.log(ratio),
        math.hypot(*((each.high - each.value) / each.value for each in (first, second))),
    )


def _from_logs(middle: float, half: float) -> RatioInterval:
    return RatioInterval(
        math.exp(middle),
        math.exp(middle - half),
        math.exp(min(middle + half, 700.0)),
        real=abs(middle) > half,
    )


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation; 0 where there are too few values to tell."""
    return stdev(values) / fmean(values) if len(values) > 1 and fmean(values) > 0 else 0.0


def machine_noise() -> float:
    """How much the time of a fixed computation varies on this machine now: 0.01 is quiet, 0.1 is
    not. It takes about half a second.
    """
    times = []
    for _ in range(20):
        started = time.perf_counter()
        sum(number * number for number in range(300_000))
        times.append(time.perf_counter() - started)
    return variation(times)


def t_quantile(freedom: int, confidence: float) -> float:
    """What Student's t with so many degrees of freedom does not exceed, on either side, with this
    probability.
    """
    if freedom > 200:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The probability of -t to t, by the finite series for whole degrees of freedom (Abramowitz and
    Stegun, 26.7.3 and 26.7.4).
    """
    angle = math.atan(t / math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= square * (step - 1) / step
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
