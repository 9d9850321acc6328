"""A point: one load on one configuration, with its figures and whether it keeps the bounds."""

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

# Throughputs below this share of another load's single measurement are no matter of luck.
LUCK_RATIO = 0.9
# From this share of the winner's throughput on, a separate measurement may be as fast.
TIE_RATIO = 0.95
EQUAL_RATIO = 0.97  # From this share on, and within the noise, a throughput is as good.
# A server that answers a smaller share of an open loop's due requests in time is behind for good.
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


def with_round(points: list[Point], offered: OfferedLoad, fresh: Round, slo: Slo | None) -> int:
    """Add a round to the point of its load, or add a point; return its position."""
    at = next((position for position, point in enumerate(points) if point.offered == offered), None)
    if at is None:
        points.append(point_of(offered, [fresh], slo))
        return len(points) - 1
    points[at] = point_of(offered, [*points[at].rounds, fresh], slo)
    return at


def best_point(points: Sequence[Point]) -> int | None:
    """Return the point with the most throughput within the bounds, and of equals the quickest."""
    holding = [position for position, point in enumerate(points) if point.holds]
    return max(
        holding,
        key=lambda position: (points[position].throughput.value, -points[position].latency.p99_ms),
        default=None,
    )


def confirmed_best(points: Sequence[Point]) -> int | None:
    """Return the best of the repeated points, if one of them holds.

    The highest of many single figures is partly luck, unless it is far higher. So is one that holds
    although a lower load broke the bounds when it was repeated. Loops of another mode than the
    first point's are chosen only if no load of its mode holds.
    """
    same_mode = [
        (
            point
            if point.offered.mode == points[0].offered.mode
            else point.model_copy(update={"holds": False})
        )
        for point in points
    ]
    best = _confirmed(same_mode)
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
    broken = [point.offered for point in points if len(point.counted) > 1 and not point.holds]
    return best_point(
        [
            point.model_copy(update={"holds": point.holds and not _beyond(point.offered, broken)})
            for point in points
        ]
    )


def _beyond(offered: OfferedLoad, broken: Iterable[OfferedLoad]) -> bool:
    return any(
        (offered.mode, offered.arrivals) == (limit.mode, limit.arrivals)
        and (
            offered.connections >= limit.connections
            if offered.mode == "closed"
            else (offered.rate or 0.0) >= (limit.rate or 0.0)
        )
        for limit in broken
    )


class Knee(NamedTuple):
    """The highest rate of an open loop that holds, and the lowest above it that does not."""

    held: Point | None
    broken: Point | None

    def known(self, rounds: int) -> bool:
        """Tell whether both are known, and the first from so many rounds."""
        return (
            self.broken is not None and self.held is not None and len(self.held.counted) >= rounds
        )


def open_loops(points: Iterable[Point]) -> list[Point]:
    """Return the open loops of the arrivals with the most rates, by their rates."""
    kinds: dict[str | None, list[Point]] = {}
    for point in points:
        if point.offered.mode == "open" and point.offered.rate:
            kinds.setdefault(point.offered.arrivals, []).append(point)
    most: list[Point] = max(kinds.values(), key=lambda loops: len(loops), default=[])
    return sorted(most, key=lambda point: point.offered.rate or 0.0)


def knee_of(points: Iterable[Point]) -> Knee:
    loops = open_loops(points)
    held = max((at for at, point in enumerate(loops) if point.holds), default=-1)
    return Knee(loops[held] if held >= 0 else None, next(iter(loops[held + 1 :]), None))


def failures(rounds: Iterable[Round]) -> dict[str, int]:
    """Count the requests without an accepted answer by their outcome."""
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
    """Return the cost of a million requests for a server that always answers at a rate."""
    return price_per_hour / (rate * 3600) * 1e6


def winner_of(order: Sequence[int], trial: Callable[[int], Trial]) -> int | None:
    """Return the trial with the most throughput.

    Of those that differ within the noise, one that was measured again comes first.
    """
    figures = _figures(order, trial)
    near = [at for at in order if figures[at] >= EQUAL_RATIO * max(figures.values())]
    return max(near, key=lambda at: (_repeats(trial(at)) > 1, figures[at]), default=None)


def choose(
    order: Sequence[int], trial: Callable[[int], Trial], paired: Iterable[PairedComparison]
) -> tuple[int | None, list[int]]:
    """Return the winner, and the trials that it is tied with.

    The measurements do not tell which of them is faster. Of trials that seem equally fast, the one
    with the fewest workers wins, and of these the one with the lowest p99.
    """
    leader = winner_of(order, trial)
    if leader is None:
        return None, []
    pairs = list(paired)
    real = {frozenset((pair.first, pair.second)): pair.real for pair in pairs}
    faster = {
        pair.second if pair.ratio > 1 else pair.first: pair.first if pair.ratio > 1 else pair.second
        for pair in pairs
        if pair.real
    }
    if faster.get(leader) in order:  # A comparison in turn outweighs a lucky round of the search.
        leader = faster[leader]
    figures, repeats = _figures(order, trial), _repeats(trial(leader))
    most = figures[leader]

    def tied(at: int) -> bool:
        together = frozenset((leader, at))
        return at != leader and (
            not real[together] if together in real else figures[at] >= TIE_RATIO * most
        )

    rivals = [at for at in order if tied(at)]
    equals = [
        at
        for at in rivals
        if figures[at] >= EQUAL_RATIO * most and _repeats(trial(at)) >= min(2, repeats)
    ]

    def simplest(at: int) -> tuple[int, float]:
        point = trial(at).points[confirmed_best(trial(at).points) or 0]
        return trial(at).as_configuration().workers, point.latency.p99_ms

    winner = min([leader, *equals], key=simplest)
    return winner, [at for at in [leader, *rivals] if at != winner]


def _repeats(trial: Trial) -> int:
    best = confirmed_best(trial.points)
    return 0 if best is None else len(trial.points[best].counted)


def _figures(order: Sequence[int], trial: Callable[[int], Trial]) -> dict[int, float]:
    """Return each trial's throughput, corrected for disturbances if all were disturbed."""
    points = {at: trial(at).points[confirmed_best(trial(at).points) or 0] for at in order}
    shared = all(any(round.disturbed for round in point.counted) for point in points.values())
    return {
        at: comparable_throughput(point) if shared else point.throughput.value
        for at, point in points.items()
    }
