"""The loads of one configuration: increasing until a bound breaks or throughput stops growing, then
between these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

NEAR = 1.12  # rungs that are closer than this are not parted any more
FLAT = 1.02  # times the throughput of an earlier rung: less is no gain
# times the load, at least, where a gain should show: one connection more than there are workers may
# only wait
APART = 1.4
AIM = 0.95  # of the bound
STEP = 2.0  # the most that a load grows by at once


class Rung(NamedTuple):
    """A measured load. `slack` is the latency in bounds: beyond 1 it breaks one; 0 without
    bounds.
    """

    level: float  # connections, or requests per second
    throughput: float
    holds: bool
    slack: float


def next_level(
    rungs: Sequence[Rung], *, start: float, whole: bool, most: float, beat: float = 0.0
) -> float | None:
    """The next load, connections (`whole`) or a rate; None when the most that is possible within
    the bounds is known, or is below `beat`.

    The throughput does not fall as the load grows, and the latency neither: what broke a bound
    tells that all beyond it does.
    """
    if not rungs:
        return _sound(start, whole, most)
    holding = max((rung for rung in rungs if rung.holds), key=lambda rung: rung.level, default=None)
    lowest = 0.0 if holding is None else holding.level
    breaking = min(
        (rung for rung in rungs if not rung.holds and rung.level > lowest),
        key=lambda rung: rung.level,
        default=None,
    )
    if (
        breaking is not None
        and max(breaking.throughput, 0.0 if holding is None else holding.throughput) * FLAT < beat
    ):
        return None
    if holding is None:
        return None if breaking is None else _down(breaking, whole)
    if breaking is None:
        return _up(rungs, holding, whole, most)
    return _between(holding, breaking, whole)


def _down(breaking: Rung, whole: bool) -> float | None:
    if whole and breaking.level <= 1:
        return None
    factor = min(0.7, AIM / breaking.slack) if breaking.slack > 1 else 0.5
    level = breaking.level * max(factor, 0.1)
    if whole:
        return float(max(1, math.floor(level)))
    return (
        level if level >= 0.1 else None
    )  # one request in ten seconds breaks it: there is no slower load to be measured


def _up(rungs: Sequence[Rung], holding: Rung, whole: bool, most: float) -> float | None:
    earlier = [rung for rung in rungs if rung.holds and rung.level * APART <= holding.level]
    before = max(earlier, key=lambda rung: rung.level, default=None)
    if holding.level >= most or (
        before is not None and holding.throughput < before.throughput * FLAT
    ):
        return None
    grow = STEP if holding.slack <= 0 else min(STEP, max(1.25, AIM / holding.slack))
    level = holding.level * grow
    return _sound(max(level, holding.level + 1) if whole else level, whole, most)


def _between(holding: Rung, breaking: Rung, whole: bool) -> float | None:
    low, high = holding.level, breaking.level
    if (
        high / low <= NEAR
        or (whole and high - low <= 1)
        or breaking.throughput < holding.throughput * FLAT
    ):
        return None
    share = 0.5
    if holding.slack < 1 < breaking.slack:
        share = (1 - holding.slack) / (breaking.slack - holding.slack) * AIM
    level = low + (high - low) * min(max(share, 0.2), 0.8)
    return float(min(max(round(level), low + 1), high - 1)) if whole else level


def _sound(level: float, whole: bool, most: float) -> float:
    level = min(level, most)
    return float(max(1, round(level))) if whole else level


def bisected(
    holds: Callable[[float], bool | None], low: float, high: float, first: float, near: float
) -> tuple[float, float]:
    """The highest value that holds, and the lowest that does not, as near to each other as that;
    earlier where `holds` is None.
    """
    value = first
    while high - low > near:
        held = holds(three_digits(value))
        if held is None:
            break
        low, high = (three_digits(value), high) if held else (low, three_digits(value))
        value = (low + high) / 2
    return low, high


def three_digits(rate: float) -> float:
    return float(f"{rate:.3g}")
