"""A point: one load on one configuration, with its figures and whether the bounds hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load import statistics
from tsx_cli.bench.load.results import (
    OfferedLoad,
    PairedComparison,
    Point,
    Round,
    Trial,
    counted,
    times_of,
)
from tsx_cli.bench.search.machine import comparable_throughput

# Luck explains a single throughput only if repeated ones reach this fraction of it.
LUCK_RATIO = 0.9
# A separate measurement with this fraction of the winner's throughput may be as fast.
TIE_RATIO = 0.95
EQUAL_RATIO = 0.97  # Throughputs that differ less, within the noise, are equal.
# In an open loop, a server that answers a smaller fraction of the due requests in time never
# catches up.
MIN_ANSWERED_SHARE = 0.95


def point_of(offered: OfferedLoad, rounds: Sequence[Round], slo: Slo | None) -> Point:
    all_rounds, rounds = rounds, counted(rounds)
    throughput = statistics.throughput(rounds)
    latency = statistics.latency(rounds)
    stream = statistics.stream(rounds)
    sent = sum(round_.sent for round_ in rounds)
    error_rate = (sent - sum(round_.ok for round_ in rounds)) / sent if sent else 1.0
    broken = (slo or Slo(())).broken(times_of(latency, stream), error_rate)
    in_time = sum(round_.throughput * round_.seconds for round_ in rounds)
    due = sent + sum(round_.unsent for round_ in rounds)
    falls_behind = offered.mode == "open" and in_time < MIN_ANSWERED_SHARE * due
    return Point(
        offered=offered,
        throughput=throughput,
        latency=latency,
        stream=stream,
        p99_ms=statistics.percentile_figure(rounds, "p99_ms"),
        error_rate=error_rate,
        holds=not broken and not falls_behind and throughput.value > 0,
        rounds=list(all_rounds),
    )


def with_round(points: list[Point], offered: OfferedLoad, new_round: Round, slo: Slo | None) -> int:
    """Add a round to the point of its load, or add a new point; return the point's position."""
    position = next((index for index, point in enumerate(points) if point.offered == offered), None)
    if position is None:
        points.append(point_of(offered, [new_round], slo))
        return len(points) - 1
    points[position] = point_of(offered, [*points[position].rounds, new_round], slo)
    return position


def best_point(points: Sequence[Point]) -> int | None:
    """Return the position of the point with the most throughput within the bounds.

    Of points with equal throughput, the quickest is the best.
    """
    holding_positions = [position for position, point in enumerate(points) if point.holds]
    return max(
        holding_positions,
        key=lambda position: (points[position].throughput.value, -points[position].latency.p99_ms),
        default=None,
    )


def confirmed_best(points: Sequence[Point]) -> int | None:
    """Return the position of the best point, preferably of one that was repeated.

    The highest of many single figures is partly luck, unless it is far higher. A load that holds is
    luck too if a lower load broke the bounds when it was repeated. Loads of another mode than the
    first point's are chosen only if no load of the first mode holds.
    """
    points_of_first_mode = [
        (
            point
            if point.offered.mode == points[0].offered.mode
            else point.model_copy(update={"holds": False})
        )
        for point in points
    ]
    best = _confirmed(points_of_first_mode)
    return _confirmed(points) if best is None else best


def _confirmed(points: Sequence[Point]) -> int | None:
    repeated = [
        point if len(point.counted) > 1 else point.model_copy(update={"holds": False})
        for point in points
    ]
    best, single_best = best_point(repeated), best_point(points)
    if (
        best is not None
        and single_best is not None
        and comparable_throughput(points[best])
        >= LUCK_RATIO * comparable_throughput(points[single_best])
    ):
        return best
    broken_loads = [point.offered for point in points if len(point.counted) > 1 and not point.holds]
    return best_point(
        [
            point.model_copy(
                update={"holds": point.holds and not _exceeds_any(point.offered, broken_loads)}
            )
            for point in points
        ]
    )


def _exceeds_any(offered: OfferedLoad, broken_loads: Iterable[OfferedLoad]) -> bool:
    return any(
        (offered.mode, offered.arrivals) == (limit.mode, limit.arrivals)
        and (
            offered.connections >= limit.connections
            if offered.mode == "closed"
            else (offered.rate or 0.0) >= (limit.rate or 0.0)
        )
        for limit in broken_loads
    )


class Knee(NamedTuple):
    """The highest rate of an open loop that holds, and the lowest higher rate that does not."""

    held: Point | None
    broken: Point | None

    def known(self, rounds: int) -> bool:
        """Tell whether both rates are known, the first one from at least `rounds` rounds."""
        return (
            self.broken is not None and self.held is not None and len(self.held.counted) >= rounds
        )


def open_loops(points: Iterable[Point]) -> list[Point]:
    """Return the open loops, sorted by rate; only of the kind of arrivals with the most rates."""
    loops_by_arrivals: dict[str | None, list[Point]] = {}
    for point in points:
        if point.offered.mode == "open" and point.offered.rate:
            loops_by_arrivals.setdefault(point.offered.arrivals, []).append(point)
    longest: list[Point] = max(loops_by_arrivals.values(), key=lambda loops: len(loops), default=[])
    return sorted(longest, key=lambda point: point.offered.rate or 0.0)


def knee_of(points: Iterable[Point]) -> Knee:
    loops = open_loops(points)
    highest_index = max((index for index, point in enumerate(loops) if point.holds), default=-1)
    return Knee(
        loops[highest_index] if highest_index >= 0 else None,
        next(iter(loops[highest_index + 1 :]), None),
    )


def failures(rounds: Iterable[Round]) -> dict[str, int]:
    """Count the requests without an accepted answer, by outcome."""
    counts: Counter[str] = Counter()
    for round_ in rounds:
        other_failures = {
            "refused (429, 503)": round_.refused,
            "unanswered": round_.unanswered,
            "not sent": round_.unsent,
        }
        counts.update(round_.errors | other_failures)
    return {kind: count for kind, count in counts.items() if count}


def cost_per_million(price_per_hour: float, rate: float) -> float:
    """Return the cost of a million requests on a server that always runs at this rate."""
    return price_per_hour / (rate * 3600) * 1e6


def winner_of(positions: Sequence[int], trial: Callable[[int], Trial]) -> int | None:
    """Return the trial with the most throughput.

    If trials differ by no more than the noise, a trial whose load was repeated is preferred.
    """
    figures = _figures(positions, trial)
    equal_positions = [
        position
        for position in positions
        if figures[position] >= EQUAL_RATIO * max(figures.values())
    ]
    return max(
        equal_positions,
        key=lambda position: (_repeats(trial(position)) > 1, figures[position]),
        default=None,
    )


def choose(
    positions: Sequence[int], trial: Callable[[int], Trial], paired: Iterable[PairedComparison]
) -> tuple[int | None, list[int]]:
    """Return the winner, and the trials that it is tied with.

    The measurements do not tell which of the tied trials is faster. Among trials that seem equally
    fast, the fewest workers win, then the lowest p99.
    """
    leader = winner_of(positions, trial)
    if leader is None:
        return None, []
    pairs = list(paired)
    real_differences = {frozenset((pair.first, pair.second)): pair.real for pair in pairs}
    faster_by_slower = {
        pair.second if pair.ratio > 1 else pair.first: pair.first if pair.ratio > 1 else pair.second
        for pair in pairs
        if pair.real
    }
    # A comparison in turn counts more than a round of the search, which may have been lucky.
    if faster_by_slower.get(leader) in positions:
        leader = faster_by_slower[leader]
    figures, repeats = _figures(positions, trial), _repeats(trial(leader))
    max_throughput = figures[leader]

    def tied(position: int) -> bool:
        pair_key = frozenset((leader, position))
        return position != leader and (
            not real_differences[pair_key]
            if pair_key in real_differences
            else figures[position] >= TIE_RATIO * max_throughput
        )

    rivals = [position for position in positions if tied(position)]
    equals = [
        position
        for position in rivals
        if figures[position] >= EQUAL_RATIO * max_throughput
        and _repeats(trial(position)) >= min(2, repeats)
    ]

    def simplest(position: int) -> tuple[int, float]:
        point = trial(position).points[confirmed_best(trial(position).points) or 0]
        return trial(position).as_configuration().workers, point.latency.p99_ms

    winner = min([leader, *equals], key=simplest)
    return winner, [position for position in [leader, *rivals] if position != winner]


def _repeats(trial: Trial) -> int:
    best = confirmed_best(trial.points)
    return 0 if best is None else len(trial.points[best].counted)


def _figures(positions: Sequence[int], trial: Callable[[int], Trial]) -> dict[int, float]:
    """Return each trial's throughput; if all were disturbed, corrected for the disturbances."""
    points = {
        position: trial(position).points[confirmed_best(trial(position).points) or 0]
        for position in positions
    }
    all_disturbed = all(
        any(round.disturbed for round in point.counted) for point in points.values()
    )
    return {
        position: comparable_throughput(point) if all_disturbed else point.throughput.value
        for position, point in points.items()
    }
