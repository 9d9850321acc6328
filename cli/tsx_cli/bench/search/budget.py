"""The time budget of a run: for the model alone, for the search, and for the final comparison."""

from __future__ import annotations

import math

from tsx_cli.bench.generator.plan import AUTO_SECONDS

FULL, SHORT = 3.0, 1.0  # seconds of a round where there is time for it, and where there is not
ANSWERS = 300  # that a round of the search sees, if `FULL` suffices: fewer tell no p99
# seconds of a round in which nothing is measured: the generator starts, and the server tells its
# metrics
BESIDE = 0.6
COMPARED = 3  # the best, the next best and the baseline
FEWEST = 4  # rounds of a comparison: two of each of two
AT_RANDOM = 3  # rounds of requests that come at random
OF_THE_LEFT = 0.025  # of the time that is left, for a round
# of it, for the curves with the loading of their models: one that would go beyond is not begun
FOR_LOADING = 0.3
FOR_CURVES = 0.15  # of the time that is left, for all curves together
FOR_THE_END = 0.35  # of the whole time, at most
CURVE = 20.0  # seconds that a curve may take at most


def round_cost(seconds: float) -> float:
    """What a round takes whose figures are of so many seconds; its warm-up counts as well where it
    turns out to be none.
    """
    return seconds + min(AUTO_SECONDS, seconds) + BESIDE


def seconds_in_search(
    requested: float | None, throughput: float | None, left: float = math.inf
) -> float:
    """Seconds of a round, where so many answers a second are expected: no more than it takes to see
    enough of them.

    Little time that is left is for more configurations, not for longer rounds.
    """
    if requested is not None:
        return requested
    needed = FULL if not throughput else ANSWERS / 2 / throughput
    return min(max(min(needed, left * OF_THE_LEFT), SHORT), FULL)


def seconds_at_end(requested: float | None, rounds: int, left: float, starting: float) -> float:
    """Seconds of a round, so that all rounds of the comparison come into the time that is left;
    servers start for so long.
    """
    if requested is not None:
        return requested
    each = (left - starting) / (COMPARED * rounds + AT_RANDOM)
    return min(max((each - BESIDE) / 2, SHORT), FULL)


def reserved_for_end(requested: float | None, rounds: int, whole: float, start: float) -> float:
    """Seconds that the search leaves over, of so many in all, where a server takes `start` seconds
    to start.
    """
    needed = COMPARED * start + (COMPARED * rounds + AT_RANDOM) * round_cost(
        FULL if requested is None else requested
    )
    return min(needed, FOR_THE_END * whole)


def reserved_for_another(rounds: int, start: float) -> float:
    """Seconds that it takes to compare the winner with one that was found after the comparison."""
    return 2 * start + (2 * rounds + 1) * round_cost(SHORT)


def of_a_curve(left: float, curves: int) -> float:
    """Seconds for each of so many curves."""
    return CURVE if math.isinf(left) else min(CURVE, FOR_CURVES * max(0.0, left) / curves)
