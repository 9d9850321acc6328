"""The end of a run: a comparison in turn, and the rate of random arrivals that the winner sustains.

The best configuration, the second-best and the baseline are measured in turn, so that a
disturbance affects all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tsx_cli.bench.load.plan import MAX_AUTO_WARM_UP_S
from tsx_cli.bench.load.results import OfferedLoad, PairedComparison, Point, Trial
from tsx_cli.bench.load.statistics import is_precise, real_difference
from tsx_cli.bench.search.ladder import TARGET_LATENCY_RATIO, bisect, three_digits
from tsx_cli.bench.search.machine import correction
from tsx_cli.bench.search.options import BenchOptions
from tsx_cli.bench.search.points import choose, confirmed_best, knee_of, winner_of

FULL_ROUND_S, SHORT_ROUND_S = 3.0, 1.0  # length with enough time, and with little
ANSWERS_PER_ROUND = 300  # A p99 needs that many answers; a round still ends at `FULL_ROUND_S`.
ROUND_OVERHEAD_S = 0.6  # time of the generator's start, and of reading the metrics
COMPARED = 3  # configurations: the best, the second-best and the baseline
MIN_COMPARISON_ROUNDS = 4  # two rounds each of two configurations
OPEN_LOOP_ROUNDS = 3
ROUND_SHARE = 0.025  # fraction of the remaining time for a round
# Fraction of the remaining time after which no further curve is started. The loading of models
# counts.
MAX_CURVES_SHARE = 0.3
CURVES_SHARE = 0.15  # fraction of the remaining time for all curves, without loading
MAX_END_SHARE = 0.35  # fraction of the whole time for the comparison
MAX_CURVE_S = 20.0


def round_cost(seconds: float) -> float:
    """Return the time of a round including its warm-up and overhead, in seconds."""
    return seconds + min(MAX_AUTO_WARM_UP_S, seconds) + ROUND_OVERHEAD_S


def seconds_in_search(
    requested: float | None, throughput: float | None, remaining_s: float = math.inf
) -> float:
    """Return the length of a round for an expected throughput, in seconds.

    A round is only as long as it needs for enough answers. If little time remains, rounds are
    short, so that more configurations are measured.
    """
    if requested is not None:
        return requested
    needed_s = FULL_ROUND_S if not throughput else ANSWERS_PER_ROUND / 2 / throughput
    return min(max(min(needed_s, remaining_s * ROUND_SHARE), SHORT_ROUND_S), FULL_ROUND_S)


def seconds_at_end(
    requested: float | None, rounds: int, remaining_s: float, starting: float
) -> float:
    """Return the length of a round in seconds; the whole comparison fits into the remaining time.

    The servers of the comparison take `starting` seconds to start.
    """
    if requested is not None:
        return requested
    round_s = (remaining_s - starting) / (COMPARED * rounds + OPEN_LOOP_ROUNDS)
    return min(max((round_s - ROUND_OVERHEAD_S) / 2, SHORT_ROUND_S), FULL_ROUND_S)


def reserved_for_end(requested: float | None, rounds: int, total_s: float, start: float) -> float:
    """Return the seconds of the total time that the search must leave for the comparison.

    A server takes `start` seconds to start.
    """
    needed_s = COMPARED * start + (COMPARED * rounds + OPEN_LOOP_ROUNDS) * round_cost(
        FULL_ROUND_S if requested is None else requested
    )
    return min(needed_s, MAX_END_SHARE * total_s)


def reserved_for_another(rounds: int, start: float) -> float:
    """Return the seconds for comparing the winner with one that is found after the comparison."""
    return 2 * start + (2 * rounds + 1) * round_cost(SHORT_ROUND_S)


def curve_seconds(remaining_s: float, curves: int) -> float:
    """Return the seconds for each of `curves` curves."""
    return (
        MAX_CURVE_S
        if math.isinf(remaining_s)
        else min(MAX_CURVE_S, CURVES_SHARE * max(0.0, remaining_s) / curves)
    )


MAX_ATTEMPTS = 5  # attempts to find a winner that still holds its bounds when it is repeated
MAX_ROUNDS = 20
FIRST_RATE_SHARE = 0.8  # first rate of random arrivals, as a fraction of the maximum
# The next load after one that breaks the bounds, as a fraction of it.
MIN_STEP, MAX_STEP = 0.6, 0.9
RATE_RESOLUTION = 0.21  # smallest distance of two rates, as a fraction of the maximum


class Measurer(Protocol):
    """The interface of a run that the confirmation uses."""

    options: BenchOptions

    @property
    def round_seconds(self) -> float:
        """The time of a round, in seconds."""

    def ranked_trials(self) -> list[int]: ...

    def baseline_trial(self) -> int | None: ...

    def trial(self, position: int) -> Trial: ...

    def measure_round(self, position: int, offered: OfferedLoad) -> bool: ...

    def seconds_left(self) -> float: ...


def confirm(run: Measurer) -> list[PairedComparison]:
    """Measure the best configurations in turn; return the winner's comparisons with the others.

    Afterwards the winner has more rounds, some of them with random arrivals.
    """
    turns = ConfirmationRounds(run)
    for attempt in range(MAX_ATTEMPTS):
        ranked = run.ranked_trials()
        if not ranked:
            return []
        if attempt and run.seconds_left() < COMPARED * run.round_seconds:
            break
        if turns.is_still_best(_group(run, ranked)):
            break
    leader = winner_of(run.ranked_trials(), run.trial)
    if leader is not None and run.seconds_left() >= COMPARED * run.round_seconds:
        # If the group was measured often enough, this measures nothing.
        turns.measure(turns.loads(_group(run, [leader, *run.ranked_trials()])))
        leader = winner_of(run.ranked_trials(), run.trial)
    if leader is None:
        return []
    winner, tied = choose(
        run.ranked_trials(),
        run.trial,
        turns.comparisons(leader, _group(run, [leader, *run.ranked_trials()])),
    )
    assert winner is not None
    measure_open_loops(run, winner)
    return turns.comparisons(
        winner, dict.fromkeys([*_group(run, [winner, *run.ranked_trials()]), *tied])
    )


def _group(run: Measurer, positions: Sequence[int]) -> list[int]:
    """Return the best, the second-best, and the baseline if it was measured."""
    baseline = run.baseline_trial()
    return list(
        dict.fromkeys(
            [*list(dict.fromkeys(positions))[:2], *([] if baseline is None else [baseline])]
        )
    )


@dataclass
class ConfirmationRounds:
    """Measurements in turn. A turn is one round of each load.

    `figures` has the throughput by turn, for each trial and load. Attempts share their turns, so a
    change of the best configuration costs only the new measurements.
    """

    run: Measurer
    turn: int = 0
    figures: defaultdict[tuple[int, str], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def loads(self, group: Iterable[int]) -> dict[int, OfferedLoad]:
        return {
            position: load for position in group if (load := _best(self.run, position)) is not None
        }

    def is_still_best(self, group: Sequence[int]) -> bool:
        """Measure a group; return whether its first trial is still the best, with the same load.

        If the load breaks the bounds, a lower load is tried.
        """
        best, loads = group[0], self.loads(group)
        load = loads[best]
        self.measure(loads)
        if self.run.trial(best).state == "measured" and not _holds(self.run, best, load):
            lower_load = _lower(self.run, best, load)
            if lower_load is not None:
                self.run.measure_round(best, lower_load)
            return False
        return self.run.ranked_trials()[:1] == [best] and _best(self.run, best) == load

    def measure(self, loads: dict[int, OfferedLoad]) -> None:
        """Measure loads in turn until the winner's figures are precise enough.

        The winner is the first of the loads. The measurement ends earlier if the winner breaks its
        bounds, or if no time remains.
        """
        winner, first_turn = next(iter(loads)), self.turn
        while not self._is_complete(winner, loads, self.turn - first_turn):
            # The order alternates, so that a steady drift favours no configuration.
            for position in list(loads) if self.turn % 2 == 0 else list(reversed(loads)):
                if (
                    position == self.run.baseline_trial() != winner
                    and winner in loads
                    and self._is_decided(winner, position, loads)
                ):
                    continue
                if self.run.measure_round(position, loads[position]):
                    last = _point(self.run, position, loads[position]).rounds[-1]
                    self._figures_of(position, loads[position])[self.turn] = (
                        last.throughput * correction(last)
                    )
                else:
                    del loads[position]
            self.turn += 1
            if winner not in loads or (
                self.turn > first_turn + 1 and not _holds(self.run, winner, loads[winner])
            ):
                return

    def comparisons(self, winner: int, rivals: Iterable[int]) -> list[PairedComparison]:
        """Return the comparisons of the winner with its rivals, over their common turns.

        Rivals with fewer than two common turns are left out, because one turn shows nothing. So are
        throughputs of 0, because a report cannot store an infinite ratio.
        """
        pairs = []
        for rival in rivals:
            loads = _best(self.run, winner), _best(self.run, rival)
            if rival == winner or loads[0] is None or loads[1] is None:
                continue
            figure_pairs = self._common_figures(winner, rival, {winner: loads[0], rival: loads[1]})
            if len(figure_pairs) > 1 and min(map(min, figure_pairs)) > 0:
                difference = real_difference(*zip(*figure_pairs, strict=True))
                pairs.append(
                    PairedComparison(
                        first=winner,
                        second=rival,
                        ratio=difference.ratio,
                        low=difference.low,
                        high=difference.high,
                        real=difference.real,
                    )
                )
        return pairs

    def _figures_of(self, position: int, load: OfferedLoad) -> dict[int, float]:
        return self.figures[position, load.model_dump_json()]

    def _common_figures(
        self, winner: int, position: int, loads: dict[int, OfferedLoad]
    ) -> list[tuple[float, float]]:
        winner_figures = self._figures_of(winner, loads[winner])
        rival_figures = self._figures_of(position, loads[position])
        return [
            (rival_figures[turn], winner_figures[turn])
            for turn in sorted(winner_figures.keys() & rival_figures.keys())
        ]

    def _is_decided(self, winner: int, position: int, loads: dict[int, OfferedLoad]) -> bool:
        """Tell whether enough turns show a real difference between the winner and the baseline."""
        pairs = self._common_figures(winner, position, loads)
        return (
            len(pairs) >= self.run.options.rounds
            and len(pairs) > 1
            and real_difference(*zip(*pairs, strict=True)).real
        )

    def _is_complete(self, winner: int, loads: dict[int, OfferedLoad], turns: int) -> bool:
        remaining_s, baseline = self.run.seconds_left(), self.run.baseline_trial()
        common_turns = min(
            len(self._common_figures(winner, position, loads))
            for position in loads
            if position == winner
            or position != baseline
            or not self._is_decided(winner, position, loads)
        )
        if common_turns < self.run.options.rounds:
            return remaining_s < len(loads) * self.run.round_seconds and (
                turns > 0 or common_turns > 1
            )
        is_late = remaining_s < (len(loads) + OPEN_LOOP_ROUNDS) * self.run.round_seconds
        return (
            is_late
            or common_turns >= MAX_ROUNDS
            or is_precise(_point(self.run, winner, loads[winner]).counted, self.run.options.width)
        )


def measure_open_loops(run: Measurer, position: int) -> None:
    """Measure open loops of a trial, since a closed loop spaces its requests by itself.

    If a rate breaks the bounds, a lower rate that holds them is searched.
    """
    best = _best(run, position)
    if best is None or best.mode == "open":
        return
    max_rate = _point(run, position, best).throughput.value

    def holds(share: float) -> bool | None:
        offered = OfferedLoad(mode="open", rate=three_digits(share * max_rate), arrivals="poisson")
        if run.seconds_left() < run.round_seconds or not run.measure_round(position, offered):
            return None
        return _holds(run, position, offered)

    bisect(holds, 0.0, 1.0, FIRST_RATE_SHARE, RATE_RESOLUTION)


def _holds(run: Measurer, position: int, offered: OfferedLoad | None) -> bool:
    return any(point.holds for point in run.trial(position).points if point.offered == offered)


def _best(run: Measurer, position: int) -> OfferedLoad | None:
    """Return a trial's load with the most throughput within the bounds, or else the quickest."""
    points = run.trial(position).points
    best_point_index = confirmed_best(points)
    if best_point_index is None:
        best_point_index = min(
            range(len(points)), key=lambda index: points[index].latency.p99_ms, default=None
        )
    return None if best_point_index is None else points[best_point_index].offered


def _lower(run: Measurer, position: int, broken_load: OfferedLoad) -> OfferedLoad | None:
    """Return a load that is lower by the excess over the bounds, or None if it was measured."""
    bounds = run.options.bounds
    ratio = 1.0
    if bounds is not None:
        ratio = bounds.latency_ratio(_point(run, position, broken_load).latency.model_dump())
    share = min(max(TARGET_LATENCY_RATIO / ratio, MIN_STEP), MAX_STEP) if ratio > 0 else MAX_STEP
    if broken_load.mode == "open":
        lower_load = broken_load.model_copy(
            update={"rate": float(f"{share * (broken_load.rate or 0.0):.3g}")}
        )
    else:
        lower_load = broken_load.model_copy(
            update={"connections": int(share * broken_load.connections)}
        )
    measured_loads = [point.offered for point in run.trial(position).points]
    return None if lower_load in measured_loads or lower_load.connections < 1 else lower_load


def _point(run: Measurer, position: int, offered: OfferedLoad) -> Point:
    return next(point for point in run.trial(position).points if point.offered == offered)


RAMP_FIRST, RAMP_STEP = 0.1, 1.5  # first rate as a fraction of the throughput, and its growth
MIN_RATE_SHARE = 0.01  # lowest rate, as a fraction of a closed loop's throughput
KNEE_RESOLUTION = 0.05  # smallest distance of two rates, as a fraction
RAMP_SHARE = 0.3  # fraction of a run's time that is reserved for its ramp
MAX_LOWERINGS = 5  # attempts to find a lower rate if the highest breaks the bounds when repeated

# Measures one more round at a rate; None means that it failed, or that no time remains.
MeasureRate = Callable[[float], Point | None]


def measure_knee(measure_rate: MeasureRate, throughput: float, rounds: int = 3) -> None:
    """Measure rising rates up to the knee, narrow the knee, and repeat the highest rate that holds.

    `throughput` is the throughput of a closed loop. The measured points contain the result; see
    `points.knee_of`.
    """
    highest_rate, rate = 0.0, RAMP_FIRST * throughput
    while (point := measure_rate(three_digits(rate))) is not None and point.holds:
        highest_rate, rate = three_digits(rate), rate * RAMP_STEP
    if point is None:
        return
    lowest_broken_rate = three_digits(rate)
    while highest_rate == 0 and lowest_broken_rate > MIN_RATE_SHARE * throughput:
        if (point := measure_rate(three_digits(lowest_broken_rate / 2))) is None:
            return
        highest_rate, lowest_broken_rate = (
            (three_digits(lowest_broken_rate / 2), lowest_broken_rate)
            if point.holds
            else (0.0, three_digits(lowest_broken_rate / 2))
        )
    if highest_rate == 0:
        return
    highest_rate, _ = bisect(
        lambda rate: _rate_holds(measure_rate, rate),
        highest_rate,
        lowest_broken_rate,
        (highest_rate + lowest_broken_rate) / 2,
        KNEE_RESOLUTION * lowest_broken_rate,
    )
    for _ in range(MAX_LOWERINGS):
        point = measure_rate(highest_rate)
        while point is not None and point.holds and len(point.counted) < rounds:
            point = measure_rate(highest_rate)
        if point is None or point.holds:
            return
        highest_rate = three_digits((1 - KNEE_RESOLUTION) * highest_rate)


def _rate_holds(measure_rate: MeasureRate, rate: float) -> bool | None:
    point = measure_rate(rate)
    return None if point is None else point.holds


def measure_ramp(run: Measurer, position: int) -> bool:
    """Measure a configuration's ramp in the remaining time; return whether the knee is known."""
    points = run.trial(position).points
    best_point_index = confirmed_best(points)
    if best_point_index is None:
        return False

    def at_rate(rate: float) -> Point | None:
        offered = OfferedLoad(mode="open", rate=rate, arrivals="poisson")
        if run.seconds_left() < run.round_seconds or not run.measure_round(position, offered):
            return None
        return next(point for point in points if point.offered == offered)

    measure_knee(at_rate, points[best_point_index].throughput.value, run.options.rounds)
    return knee_of(points).known(run.options.rounds)
