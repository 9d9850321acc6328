"""Combines rounds into a point: one load on one configuration, with its figures and whether it
keeps the bounds.
"""

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
from tsx_cli.bench.search.machine import worth

# of the throughput of a load that was measured once: one of another load that is less is not that
# by chance
CHANCE = 0.9
# of the winner's throughput: what was measured apart from it and did as much may be as fast
ALIKE = 0.95
EQUAL = 0.97  # of it: what does as much, and differs within the noise, is as good
# of the requests that were due in an open loop; a server that answers fewer of them in the time is
# behind for good
KEPT_UP = 0.95


def point_of(offered: OfferedLoad, rounds: Sequence[Round], slo: Slo | None) -> Point:
    every, rounds = rounds, counted(rounds)
    throughput, latency, stream = (
        statistics.throughput(rounds),
        statistics.latency(rounds),
        statistics.stream(rounds),
    )
    sent = sum(each.sent for each in rounds)
    error_rate = (sent - sum(each.ok for each in rounds)) / sent if sent else 1.0
    broken = (slo or Slo(())).broken(times_of(latency, stream), error_rate)
    in_time = sum(each.throughput * each.seconds for each in rounds)
    due = sent + sum(each.unsent for each in rounds)
    behind = offered.mode == "open" and in_time < KEPT_UP * due
    return Point(
        offered=offered,
        throughput=throughput,
        latency=latency,
        stream=stream,
        p99_ms=statistics.percentile_figure(rounds, "p99_ms"),
        error_rate=error_rate,
        holds=not broken and not behind and throughput.value > 0,
        rounds=list(every),
    )


def with_round(points: list[Point], offered: OfferedLoad, fresh: Round, slo: Slo | None) -> int:
    """Add a round to the point of that load, or a point; returns its position."""
    at = next((position for position, point in enumerate(points) if point.offered == offered), None)
    if at is None:
        points.append(point_of(offered, [fresh], slo))
        return len(points) - 1
    points[at] = point_of(offered, [*points[at].rounds, fresh], slo)
    return at


def best_point(points: Sequence[Point]) -> int | None:
    """The one with the most throughput of those within the bounds; of equals that with the least
    latency.
    """
    holding = [position for position, point in enumerate(points) if point.holds]
    return max(
        holding,
        key=lambda each: (points[each].throughput.value, -points[each].latency.p99_ms),
        default=None,
    )


def confirmed_best(points: Sequence[Point]) -> int | None:
    """The best of those that were measured again, where one of them holds: of many figures the
    highest single one is partly luck, unless it is far higher.

    So is one that holds the bounds where a lower load did not when it was measured again. Loops of
    the other kind than the first, which show what else the configuration stands, are chosen only
    where no load of the first kind holds.
    """
    own = [
        (
            each
            if each.offered.mode == points[0].offered.mode
            else each.model_copy(update={"holds": False})
        )
        for each in points
    ]
    best = _confirmed(own)
    return _confirmed(points) if best is None else best


def _confirmed(points: Sequence[Point]) -> int | None:
    again = [
        each if len(each.counted) > 1 else each.model_copy(update={"holds": False})
        for each in points
    ]
    best, once = best_point(again), best_point(points)
    if (
        best is not None
        and once is not None
        and worth(points[best]) >= CHANCE * worth(points[once])
    ):
        return best
    broken = [each.offered for each in points if len(each.counted) > 1 and not each.holds]
    return best_point(
        [
            each.model_copy(update={"holds": each.holds and not _beyond(each.offered, broken)})
            for each in points
        ]
    )


def _beyond(offered: OfferedLoad, broken: Iterable[OfferedLoad]) -> bool:
    return any(
        (offered.mode, offered.arrivals) == (each.mode, each.arrivals)
        and (
            offered.connections >= each.connections
            if offered.mode == "closed"
            else (offered.rate or 0.0) >= (each.rate or 0.0)
        )
        for each in broken
    )


class Knee(NamedTuple):
    """The highest rate of an open loop that holds the bounds, and the lowest above it that does
    not; None where there is no such.
    """

    held: Point | None
    broken: Point | None

    def known(self, rounds: int) -> bool:
        """Whether both are known, and the first from so many rounds."""
        return (
            self.broken is not None and self.held is not None and len(self.held.counted) >= rounds
        )


def open_loops(points: Iterable[Point]) -> list[Point]:
    """Those of one kind of arrivals, the one with the most rates, by their rates."""
    kinds: dict[str | None, list[Point]] = {}
    for point in points:
        if point.offered.mode == "open" and point.offered.rate:
            kinds.setdefault(point.offered.arrivals, []).append(point)
    most: list[Point] = max(kinds.values(), key=lambda each: len(each), default=[])
    return sorted(most, key=lambda point: point.offered.rate or 0.0)


def knee_of(points: Iterable[Point]) -> Knee:
    loops = open_loops(points)
    held = max((at for at, point in enumerate(loops) if point.holds), default=-1)
    return Knee(loops[held] if held >= 0 else None, next(iter(loops[held + 1 :]), None))


def failures(rounds: Iterable[Round]) -> dict[str, int]:
    """Count the requests without an accepted answer by what came of them."""
    counts: Counter[str] = Counter()
    for each in rounds:
        others = {
            "refused (429, 503)": each.refused,
            "unanswered": each.unanswered,
            "not sent": each.unsent,
        }
        counts.update(each.errors | others)
    return {kind: count for kind, count in counts.items() if count}


def cost_per_million(price_per_hour: float, rate: float) -> float:
    """Of requests, by a server that answers so many a second all the time."""
    return price_per_hour / (rate * 3600) * 1e6


def winner_of(order: Sequence[int], trial: Callable[[int], Trial]) -> int | None:
    """Return the trial with the most throughput.

    Of those that differ within the noise, one that was measured again comes first.
    """
    figures = _figures(order, trial)
    near = [at for at in order if figures[at] >= EQUAL * max(figures.values())]
    return max(near, key=lambda at: (_repeats(trial(at)) > 1, figures[at]), default=None)


def choose(
    order: Sequence[int], trial: Callable[[int], Trial], paired: Iterable[PairedComparison]
) -> tuple[int | None, list[int]]:
    """The winner, and those that it is tied with: which one of them is faster, the measurements do
    not tell.

    Of those that are as fast as far as one can see, the one with the fewest workers wins, and of
    these the one with the lowest p99.
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
    if faster.get(leader) in order:  # a lucky round of the search makes a mean, and no comparison
        leader = faster[leader]
    figures, repeats = _figures(order, trial), _repeats(trial(leader))
    most = figures[leader]

    def tied(at: int) -> bool:
        together = frozenset((leader, at))
        return at != leader and (
            not real[together] if together in real else figures[at] >= ALIKE * most
        )

    rivals = [at for at in order if tied(at)]
    equals = [
        at
        for at in rivals
        if figures[at] >= EQUAL * most and _repeats(trial(at)) >= min(2, repeats)
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
    """Return each trial's measured throughput, or if all were disturbed, the undisturbed one."""
    points = {at: trial(at).points[confirmed_best(trial(at).points) or 0] for at in order}
    shared = all(any(round.disturbed for round in point.counted) for point in points.values())
    return {at: worth(point) if shared else point.throughput.value for at, point in points.items()}
