"""The next load to measure for one configuration.

Loads rise until a bound is exceeded or the throughput stops growing. Then the search narrows the
interval between the highest load that holds the bounds and the lowest that exceeds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_RUNG_RATIO = 1.12  # ratio of two rungs; closer rungs are not divided further
MIN_GAIN = 1.02  # ratio of throughputs; a smaller ratio does not count as a gain
# A load that is higher by this ratio should have more throughput. A smaller step, such as one more
# connection than there are workers, may only lengthen the queue.
GAIN_RATIO = 1.4
TARGET_LATENCY_RATIO = 0.95  # the target latency as a fraction of the bound
MAX_GROWTH = 2.0  # ratio of a load to the previous load


class Rung(NamedTuple):
    """A measured load.

    `latency_ratio` is the latency divided by its bound. It is above 1 if the bound is exceeded, and
    0 if there is no bound.
    """

    level: float  # connections, or requests per second
    throughput: float
    holds: bool
    latency_ratio: float


def next_level(
    rungs: Sequence[Rung],
    *,
    start: float,
    is_whole: bool,
    max_level: float,
    throughput_to_beat: float = 0.0,
) -> float | None:
    """Return the next number of connections (`is_whole`) or the next rate.

    Return None if the maximum within the bounds is known, or if it cannot reach
    `throughput_to_beat`. Throughput and latency do not fall as the load grows, so a load that
    exceeds a bound rules out all higher loads.
    """
    if not rungs:
        return _clamp(start, is_whole, max_level)
    lower = max((rung for rung in rungs if rung.holds), key=lambda rung: rung.level, default=None)
    lower_level = 0.0 if lower is None else lower.level
    upper = min(
        (rung for rung in rungs if not rung.holds and rung.level > lower_level),
        key=lambda rung: rung.level,
        default=None,
    )
    if (
        upper is not None
        and max(upper.throughput, 0.0 if lower is None else lower.throughput) * MIN_GAIN
        < throughput_to_beat
    ):
        return None
    if lower is None:
        return None if upper is None else _down(upper, is_whole)
    if upper is None:
        return _up(rungs, lower, is_whole, max_level)
    return _between(lower, upper, is_whole)


def _down(upper: Rung, is_whole: bool) -> float | None:
    if is_whole and upper.level <= 1:
        return None
    factor = (
        min(0.7, TARGET_LATENCY_RATIO / upper.latency_ratio) if upper.latency_ratio > 1 else 0.5
    )
    level = upper.level * max(factor, 0.1)
    if is_whole:
        return float(max(1, math.floor(level)))
    # Rates below one request in ten seconds cannot be measured.
    return level if level >= 0.1 else None


def _up(rungs: Sequence[Rung], lower: Rung, is_whole: bool, max_level: float) -> float | None:
    earlier = [rung for rung in rungs if rung.holds and rung.level * GAIN_RATIO <= lower.level]
    previous = max(earlier, key=lambda rung: rung.level, default=None)
    if lower.level >= max_level or (
        previous is not None and lower.throughput < previous.throughput * MIN_GAIN
    ):
        return None
    growth = (
        MAX_GROWTH
        if lower.latency_ratio <= 0
        else min(MAX_GROWTH, max(1.25, TARGET_LATENCY_RATIO / lower.latency_ratio))
    )
    level = lower.level * growth
    return _clamp(max(level, lower.level + 1) if is_whole else level, is_whole, max_level)


def _between(lower: Rung, upper: Rung, is_whole: bool) -> float | None:
    low, high = lower.level, upper.level
    if (
        high / low <= MIN_RUNG_RATIO
        or (is_whole and high - low <= 1)
        or upper.throughput < lower.throughput * MIN_GAIN
    ):
        return None
    fraction = 0.5
    if lower.latency_ratio < 1 < upper.latency_ratio:
        fraction = (
            (1 - lower.latency_ratio)
            / (upper.latency_ratio - lower.latency_ratio)
            * TARGET_LATENCY_RATIO
        )
    level = low + (high - low) * min(max(fraction, 0.2), 0.8)
    return float(min(max(round(level), low + 1), high - 1)) if is_whole else level


def _clamp(level: float, is_whole: bool, max_level: float) -> float:
    level = min(level, max_level)
    return float(max(1, round(level))) if is_whole else level


def bisect(
    holds: Callable[[float], bool | None], low: float, high: float, first: float, resolution: float
) -> tuple[float, float]:
    """Return the highest value that holds and the lowest that does not.

    They are at most `resolution` apart. If `holds` returns None, the search ends early.
    """
    value = first
    while high - low > resolution:
        is_held = holds(three_digits(value))
        if is_held is None:
            break
        low, high = (three_digits(value), high) if is_held else (low, three_digits(value))
        value = (low + high) / 2
    return low, high


def three_digits(rate: float) -> float:
    return float(f"{rate:.3g}")
