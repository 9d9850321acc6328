"""The loads of one configuration: up until a bound breaks or gains end, then in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_RUNG_RATIO = 1.12  # closer rungs are not parted any more
MIN_GAIN = 1.02  # ratio to the throughput of an earlier rung
# Ratio of loads from which a gain should show; one connection more than workers may only wait.
GAIN_RATIO = 1.4
TARGET_SLACK = 0.95  # the aimed latency as a share of the bound
MAX_GROWTH = 2.0  # ratio of a load to the one before


class Rung(NamedTuple):
    """A measured load; `slack` is the latency in bounds, above 1 if one breaks, 0 without any."""

    level: float  # connections, or requests per second
    throughput: float
    holds: bool
    slack: float


def next_level(
    rungs: Sequence[Rung], *, start: float, is_whole: bool, max_level: float, beat: float = 0.0
) -> float | None:
    """Return the next number of connections (`is_whole`) or rate.

    It is None when the maximum within the bounds is known, or is below `beat`. Throughput and
    latency do not fall as the load grows, so a load that breaks a bound excludes all higher ones.
    """
    if not rungs:
        return _bounded(start, is_whole, max_level)
    holding = max((rung for rung in rungs if rung.holds), key=lambda rung: rung.level, default=None)
    lowest = 0.0 if holding is None else holding.level
    breaking = min(
        (rung for rung in rungs if not rung.holds and rung.level > lowest),
        key=lambda rung: rung.level,
        default=None,
    )
    if (
        breaking is not None
        and max(breaking.throughput, 0.0 if holding is None else holding.throughput) * MIN_GAIN
        < beat
    ):
        return None
    if holding is None:
        return None if breaking is None else _down(breaking, is_whole)
    if breaking is None:
        return _up(rungs, holding, is_whole, max_level)
    return _between(holding, breaking, is_whole)


def _down(breaking: Rung, is_whole: bool) -> float | None:
    if is_whole and breaking.level <= 1:
        return None
    factor = min(0.7, TARGET_SLACK / breaking.slack) if breaking.slack > 1 else 0.5
    level = breaking.level * max(factor, 0.1)
    if is_whole:
        return float(max(1, math.floor(level)))
    # Nothing slower than one request in ten seconds can be measured.
    return level if level >= 0.1 else None


def _up(rungs: Sequence[Rung], holding: Rung, is_whole: bool, max_level: float) -> float | None:
    earlier = [rung for rung in rungs if rung.holds and rung.level * GAIN_RATIO <= holding.level]
    before = max(earlier, key=lambda rung: rung.level, default=None)
    if holding.level >= max_level or (
        before is not None and holding.throughput < before.throughput * MIN_GAIN
    ):
        return None
    growth = (
        MAX_GROWTH
        if holding.slack <= 0
        else min(MAX_GROWTH, max(1.25, TARGET_SLACK / holding.slack))
    )
    level = holding.level * growth
    return _bounded(max(level, holding.level + 1) if is_whole else level, is_whole, max_level)


def _between(holding: Rung, breaking: Rung, is_whole: bool) -> float | None:
    low, high = holding.level, breaking.level
    if (
        high / low <= MIN_RUNG_RATIO
        or (is_whole and high - low <= 1)
        or breaking.throughput < holding.throughput * MIN_GAIN
    ):
        return None
    share = 0.5
    if holding.slack < 1 < breaking.slack:
        share = (1 - holding.slack) / (breaking.slack - holding.slack) * TARGET_SLACK
    level = low + (high - low) * min(max(share, 0.2), 0.8)
    return float(min(max(round(level), low + 1), high - 1)) if is_whole else level


def _bounded(level: float, is_whole: bool, max_level: float) -> float:
    level = min(level, max_level)
    return float(max(1, round(level))) if is_whole else level


def bisected(
    holds: Callable[[float], bool | None], low: float, high: float, first: float, resolution: float
) -> tuple[float, float]:
    """Return the highest value that holds and the lowest that does not, this near to each other.

    It ends earlier when `holds` returns None.
    """
    value = first
    while high - low > resolution:
        held = holds(three_digits(value))
        if held is None:
            break
        low, high = (three_digits(value), high) if held else (low, three_digits(value))
        value = (low + high) / 2
    return low, high


def three_digits(rate: float) -> float:
    return float(f"{rate:.3g}")
