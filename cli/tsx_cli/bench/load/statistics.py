"""Statistics of rounds: the end of the warm-up, confidence intervals and real differences."""

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
BOOTSTRAP_DRAWS = 400
MIN_ROUNDS = 3  # minimum number of rounds for a conclusion
MAX_PIECES = 60  # The time is cut into pieces to find the end of the warm-up.
ANSWERS_PER_PIECE = 10  # minimum, unless there are too few answers
MIN_STANDARD_ERRORS = 6.0  # minimum difference of a warm-up from the steady state
MIN_RATE_CHANGE = 0.02  # minimum difference of a warm-up, as a fraction of the steady rate

QUANTILES: dict[str, float] = {
    "p50_ms": 0.5,
    "p90_ms": 0.9,
    "p95_ms": 0.95,
    "p99_ms": 0.99,
    "p999_ms": 0.999,
}
Histogram = Sequence[tuple[float, int]]  # (upper end of a bucket, count)


class RatioInterval(NamedTuple):
    """The ratio of the second figure to the first, and its confidence interval.

    `real` tells that the interval excludes 1.
    """

    ratio: float
    low: float
    high: float
    real: bool


def warm_up_end(slots: Sequence[float], max_share: float = 0.5) -> int:
    """Return the number of slots before the steady state, at most the fraction `max_share` of them.

    A slot is a number of answers. The time is divided into two parts where the sum of squares
    within them is smallest. The second part is then divided again, which follows a ramp to its end.
    This is repeated as long as the median of the first part differs from the steady state. So a
    stall at the beginning counts as warm-up, and a stall in the middle does not. The result is 0 if
    there are too few answers, or if nothing changes.
    """
    length = _piece_slots(slots)
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
    # Values are clipped, so that a stall is not more than an outlier.
    clipped = [min(max(piece, level - 6 * noise), level + 6 * noise) for piece in pieces]
    start, max_cut = 0, int(len(pieces) * max_share)
    while (cut := _best_cut(pieces, clipped, start, max_cut, level, noise)) is not None:
        start = cut
    return start * length


def _noise(tail: Sequence[float], level: float) -> float:
    """Return the standard deviation of a piece, without outliers.

    It is at least the deviation that a uniform stream of answers has.
    """
    middle = max(
        1.4826 * median(abs(piece - level) for piece in tail), math.sqrt(level) / 2, 0.005 * level
    )
    near = [piece for piece in tail if abs(piece - level) <= 3 * middle]
    return max(middle, stdev(near) if len(near) > 1 else 0.0)


def _best_cut(
    pieces: Sequence[float],
    clipped: Sequence[float],
    start: int,
    max_cut: int,
    level: float,
    noise: float,
) -> int | None:
    """Return the best position at which to divide the time after `start`.

    Return None if no part before such a position differs from the steady state.
    """
    sums, end = [0.0, *accumulate(clipped)], len(clipped)
    cuts = []
    for cut in range(start + 1, max_cut + 1):
        before, after = sums[cut] - sums[start], sums[end] - sums[cut]
        if _differs(pieces[start:cut], level, noise):
            # The larger this term, the smaller the sum of squares within the parts.
            cuts.append((before**2 / (cut - start) + after**2 / (end - cut), cut))
    return max(cuts)[1] if cuts else None


def _piece_slots(slots: Sequence[float]) -> int:
    """Return the number of slots per piece: enough for its answers, and not too many pieces."""
    total = sum(slots)
    min_slots = math.ceil(ANSWERS_PER_PIECE * len(slots) / total) if total > 0 else 1
    return max(1, math.ceil(len(slots) / MAX_PIECES), min(min_slots, len(slots) // 10))


def _differs(pieces: Sequence[float], level: float, noise: float) -> bool:
    return abs(median(pieces) - level) > max(
        MIN_RATE_CHANGE * level, MIN_STANDARD_ERRORS * noise / math.sqrt(len(pieces))
    )


def interval(values: Sequence[float]) -> Figure:
    """Return the mean of repetitions with its t-interval, cut off at 0.

    From one repetition the noise is unknown, so both ends are the value itself.
    """
    mean = fmean(values)
    if len(values) < 2:
        return Figure(value=mean, low=mean, high=mean)
    half_width = t_quantile(len(values) - 1, CONFIDENCE) * stdev(values) / math.sqrt(len(values))
    return Figure(value=mean, low=max(0.0, mean - half_width), high=mean + half_width)


def throughput(rounds: Sequence[Round]) -> Figure:
    return interval([round_.throughput for round_ in rounds])


def percentile_figure(rounds: Sequence[Round], name: str = "p99_ms") -> Figure:
    """Return a percentile of all rounds' answers, with a bootstrap interval.

    The name is a field of `Latency`, or `ttft.p99_ms` for event streams. Rounds are resampled, and
    answers within them. A single round has no interval: its answers waited in the same queue, so
    they are not independent.
    """
    part, _, field = name.rpartition(".")
    timed = [_timed(round_, part) for round_ in rounds]
    histograms = [figures.histogram for figures in timed if figures.histogram]
    if not histograms or field not in QUANTILES:
        return interval([float(getattr(figures.latency, field)) for figures in timed])
    quantile, count = QUANTILES[field], len(histograms)
    value = percentile(merged(histograms), quantile)
    if count == 1:
        return Figure(value=value, low=value, high=value)
    samples = _bootstrap(histograms, quantile, random.Random(0))
    # A few resampled rounds vary less than real rounds. The factor and the t distribution correct
    # this bias.
    half_width = t_quantile(count - 1, CONFIDENCE) * stdev(samples) * math.sqrt(count / (count - 1))
    return Figure(value=value, low=max(0.0, value - half_width), high=value + half_width)


def _bootstrap(
    histograms: Sequence[Histogram], quantile: float, chance: random.Random
) -> list[float]:
    """Return the percentile of each sample."""
    ends = [end for end, _ in merged(histograms)]
    sums = []
    for histogram in histograms:
        counts = dict(histogram)
        sums.append(list(accumulate(counts.get(end, 0) for end in ends)))
    percentiles = []
    for _ in range(BOOTSTRAP_DRAWS):
        sample = chance.choices(sums, k=len(sums))
        answers = sum(cumulative[-1] for cumulative in sample)
        # The fraction of answers below a percentile varies, and varies more if answers are few.
        sampled_quantile = quantile + chance.gauss(0, 1) * math.sqrt(
            quantile * (1 - quantile) / answers
        )
        rank = min(max(sampled_quantile, 0.0), 1.0) * answers
        position = bisect_left(
            range(len(ends)),
            rank,
            key=lambda index: sum(cumulative[index] for cumulative in sample),
        )
        percentiles.append(ends[min(position, len(ends) - 1)])
    return percentiles


def merged(histograms: Sequence[Histogram]) -> list[tuple[float, int]]:
    counts: dict[float, int] = {}
    for histogram in histograms:
        for end, count in histogram:
            counts[end] = counts.get(end, 0) + count
    return sorted(counts.items())


def percentile(histogram: Histogram, quantile: float) -> float:
    """Return the upper end of the bucket that contains the quantile, or 0 if there are no answers.

    `histogram` must be sorted.
    """
    return (
        histogram[bucket_of((count for _, count in histogram), quantile)][0]
        if any(count for _, count in histogram)
        else 0.0
    )


class _TimedAnswers(NamedTuple):
    latency: Latency
    histogram: Histogram
    answers: int


def _timed(round_: Round, part: str) -> _TimedAnswers:
    """Return the latency of a round's answers, or the `ttft` or `tpot` of its event streams."""
    if not part:
        return _TimedAnswers(round_.latency, round_.histogram, round_.ok)
    stream = round_.stream or StreamFigures()
    histogram: Histogram = getattr(stream, f"{part}_histogram")
    return _TimedAnswers(getattr(stream, part), histogram, sum(count for _, count in histogram))


def stream(rounds: Sequence[Round]) -> StreamFigures | None:
    """Return the figures of all rounds' event streams, or None if there are none."""
    streams = [round_.stream for round_ in rounds if round_.stream is not None]
    if not streams:
        return None
    goodputs = [figures.goodput for figures in streams if figures.goodput is not None]
    return StreamFigures(
        answers=sum(figures.answers for figures in streams),
        tokens=sum(figures.tokens for figures in streams),
        prompt_tokens=sum(figures.prompt_tokens for figures in streams),
        tokens_per_second=fmean(figures.tokens_per_second for figures in streams),
        prompt_tokens_per_second=fmean(figures.prompt_tokens_per_second for figures in streams),
        goodput=fmean(goodputs) if goodputs else None,
        ttft=latency(rounds, "ttft"),
        tpot=latency(rounds, "tpot"),
        ttft_histogram=merged([figures.ttft_histogram for figures in streams]),
        tpot_histogram=merged([figures.tpot_histogram for figures in streams]),
    )


def latency(rounds: Sequence[Round], part: str = "") -> Latency:
    """Return the latency of all rounds together."""
    timed = [_timed(round_, part) for round_ in rounds]
    histogram = merged([figures.histogram for figures in timed])
    answers = sum(count for _, count in histogram)
    if not answers:
        return timed[0].latency if len(timed) == 1 else Latency()
    weight = sum(figures.answers for figures in timed) or 1
    mean = sum(figures.latency.mean_ms * figures.answers for figures in timed) / weight
    # The maximum is known exactly, while quantiles are upper ends of buckets.
    slowest_ms = max(figures.latency.max_ms for figures in timed)
    quantiles = {
        name: min(percentile(histogram, quantile), slowest_ms or math.inf)
        for name, quantile in QUANTILES.items()
    }
    return Latency(mean_ms=mean, max_ms=slowest_ms, **quantiles)


def is_precise(rounds: Sequence[Round], width: float) -> bool:
    """Tell whether the interval of the throughput is at most this fraction of the throughput."""
    if len(rounds) < MIN_ROUNDS:
        return False
    figure = throughput(rounds)
    return figure.high - figure.low <= width * figure.value


def real_difference(first: Sequence[float], second: Sequence[float]) -> RatioInterval:
    """Compare two configurations that were measured alternately, pair by pair.

    A disturbance that affects both measurements of a pair favours neither. The interval belongs to
    the mean of the logarithms of the ratios.
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
    logs = [
        math.log(second_value / first_value)
        for first_value, second_value in zip(first, second, strict=True)
    ]
    if len(logs) == 1:
        return RatioInterval(math.exp(logs[0]), 0.0, math.inf, real=False)
    return _from_logs(
        fmean(logs), t_quantile(len(logs) - 1, CONFIDENCE) * stdev(logs) / math.sqrt(len(logs))
    )


def difference_of(first: Figure, second: Figure) -> RatioInterval:
    """Compare two figures that were measured independently.

    If one of them has no interval, the difference is not real.
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
        math.hypot(*((figure.high - figure.value) / figure.value for figure in (first, second))),
    )


def _from_logs(middle: float, half_width: float) -> RatioInterval:
    return RatioInterval(
        math.exp(middle),
        math.exp(middle - half_width),
        math.exp(min(middle + half_width, 700.0)),
        real=abs(middle) > half_width,
    )


def variation(values: Sequence[float]) -> float:
    """Return the coefficient of variation, or 0 if there are too few values."""
    return stdev(values) / fmean(values) if len(values) > 1 and fmean(values) > 0 else 0.0


def machine_noise() -> float:
    """Return the variation of the time of a fixed computation: 0.01 is quiet, 0.1 is noisy.

    This takes about half a second.
    """
    times = []
    for _ in range(20):
        started = time.perf_counter()
        sum(number * number for number in range(300_000))
        times.append(time.perf_counter() - started)
    return variation(times)


def t_quantile(freedom: int, confidence: float) -> float:
    """Return the value that |t| does not exceed with this probability (Student's t)."""
    if freedom > 200:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = 0.0, 1.0
    while _probability_within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _probability_within(middle, freedom) < confidence else (low, middle)
        )
    return high


def _probability_within(t: float, freedom: int) -> float:
    """Return the probability that t is between -t and t.

    This is the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and
    26.7.4).
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
