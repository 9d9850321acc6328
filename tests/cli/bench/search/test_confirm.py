"""Figures from rounds: points, the last comparison, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.support.benchmarked import a_run
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Latency, OfferedLoad, Results, Round, Trial, parse_slo
from tsx_cli.bench.report.verdict import conclude
from tsx_cli.bench.search import confirm as budget
from tsx_cli.bench.search.confirm import confirm
from tsx_cli.bench.search.options import BenchOptions
from tsx_cli.bench.search.points import confirmed_best, point_of, winner_of, with_round
from tsx_cli.bench.search.search import ranking

SLO = parse_slo("p99<50ms")


def one_round(rate: float, p99: float, *, lost: int = 0) -> Round:
    latency = Latency(mean_ms=p99 / 2, p50_ms=p99 / 2, p99_ms=p99, max_ms=p99)
    histogram = [(p99 / 2, 90), (p99, 10)]
    return Round(
        seconds=1,
        sent=100 + lost,
        ok=100,
        unanswered=lost,
        throughput=rate,
        latency=latency,
        histogram=histogram,
    )


def test_a_point_holds_where_its_bounds_do_and_all_were_answered() -> None:
    assert point_of(OfferedLoad(), [one_round(100, 40), one_round(110, 45)], SLO).holds
    assert not point_of(OfferedLoad(), [one_round(100, 40), one_round(110, 60)], SLO).holds
    assert not point_of(OfferedLoad(), [one_round(100, 40, lost=1)], None).holds
    assert point_of(OfferedLoad(), [one_round(100, 900)], None).holds
    assert not point_of(OfferedLoad(mode="open", rate=100), [one_round(90, 10)], SLO).holds, (
        "it is behind for good"
    )
    unsent = one_round(100, 10).model_copy(update={"unsent": 20})
    assert not point_of(OfferedLoad(mode="open", rate=120), [unsent], SLO).holds, (
        "what found no free connection counts as well"
    )


def test_a_repeated_load_counts_before_one_that_was_higher_once() -> None:
    trial = Trial(configuration=Configuration().as_json())
    with_round(trial.points, OfferedLoad(connections=1), one_round(100, 10), SLO)
    lucky = with_round(trial.points, OfferedLoad(connections=2), one_round(104, 10), SLO)
    assert confirmed_best(trial.points) == lucky
    assert with_round(trial.points, OfferedLoad(connections=1), one_round(101, 10), SLO) == 0
    assert confirmed_best(trial.points) == 0


@dataclass
class Machine:
    """A run whose servers behave as `does` decides."""

    does: Callable[[int, int], Round | None]
    trials: list[Trial]
    options: BenchOptions = field(default_factory=lambda: BenchOptions(slo="p99<50ms"))
    left: float = 1000.0
    attempts: list[int] = field(default_factory=list)
    round_seconds = 1.0

    def ranked_trials(self) -> list[int]:
        return ranking(self.trials)

    def baseline_trial(self) -> int | None:
        return 0

    def trial(self, position: int) -> Trial:
        return self.trials[position]

    def measure_round(self, position: int, offered: OfferedLoad) -> bool:
        reported = self.does(position, len(self.attempts))
        self.attempts.append(position)
        self.left -= 1
        if reported is None:
            self.trials[position].state = "failed"
            return False
        with_round(self.trials[position].points, offered, reported, SLO)
        return True

    def seconds_left(self) -> float:
        return self.left


def trials(*rates: float) -> list[Trial]:
    measured = []
    for size, rate in enumerate(rates, 1):
        trial = Trial(configuration=Configuration(batch_size=size).as_json())
        with_round(trial.points, OfferedLoad(connections=4), one_round(rate, 20), SLO)
        measured.append(trial)
    return measured


def test_the_best_the_next_best_and_the_baseline_are_measured_in_turn() -> None:
    machine = Machine(
        lambda at, number: one_round((100, 150, 200)[at] * (1 + number % 2 / 100), 20),
        trials(100, 150, 200),
    )
    pairs = confirm(machine)
    assert machine.attempts[:6] == [2, 1, 0, 0, 1, 2], (
        "there and back, so that what drifts favours nobody"
    )
    assert machine.attempts[-1:] == [2]
    most = machine.trials[2].points[0].throughput.value
    rates = [
        point.offered.rate or 0.0
        for point in machine.trials[2].points
        if point.offered.mode == "open"
    ]
    assert [round(rate / most, 1) for rate in rates] == [0.8]
    assert [(pair.first, pair.second, pair.real, round(pair.ratio, 1)) for pair in pairs] == [
        (2, 1, True, 1.3),
        (2, 0, True, 2.0),
    ]


def test_a_winner_that_no_longer_holds_its_bounds_makes_room_for_the_next() -> None:
    machine = Machine(
        lambda at, number: one_round((100, 150, 200)[at], 80 if at == 2 else 20),
        trials(100, 150, 200),
    )
    pairs = confirm(machine)
    assert machine.ranked_trials()[0] == 1
    assert [(pair.first, pair.second) for pair in pairs] == [(1, 0)]
    tried_lower = [point.offered.connections for point in machine.trials[2].points]
    assert tried_lower == [4, 2]
    assert machine.attempts == [2, 1, 0, 0, 1, 2, 2, 1, 0, 1], (
        "two turns of all, one with less load, a third of those left, one at random"
    )


@dataclass
class Latent(Machine):
    """A machine whose best trial takes 15 ms for each connection, after one lucky round."""

    def measure_round(self, position: int, offered: OfferedLoad) -> bool:
        reported = one_round(
            (100, 150, 60 * offered.connections)[position],
            15 * offered.connections if position == 2 else 20,
        )
        self.does = lambda at, number: reported
        return super().measure_round(position, offered)


def test_one_that_holds_its_bounds_with_less_load_may_still_win() -> None:
    machine = Latent(
        lambda at, number: None, trials(100, 150, 200), BenchOptions(slo="p99<50ms", width=0.99)
    )
    pairs = confirm(machine)
    best = machine.trials[2].points[confirmed_best(machine.trials[2].points) or 0]
    assert (best.offered.connections, best.throughput.value, len(best.rounds)) == (3, 180, 4)
    assert [(pair.first, pair.second, round(pair.ratio, 1)) for pair in pairs] == [
        (2, 1, 1.2),
        (2, 0, 1.8),
    ]


def test_a_load_that_holds_a_bound_once_after_a_lower_one_broke_it_is_luck() -> None:
    trial = Trial(configuration=Configuration().as_json())
    for connections, p99 in ((12, 40), (12, 70), (15, 49), (8, 30)):
        with_round(
            trial.points,
            OfferedLoad(connections=connections),
            one_round(10 * connections, p99),
            SLO,
        )
    best = confirmed_best(trial.points)
    assert best is not None
    assert trial.points[best].offered.connections == 8


def test_two_that_change_places_are_not_measured_again() -> None:
    options = BenchOptions(slo="p99<50ms", width=0.99)
    machine = Machine(
        lambda at, number: one_round((100, 205, 190)[at] * (1 + number % 2 / 100), 20),
        trials(100, 195, 200),
        options,
    )
    pairs = confirm(machine)
    assert machine.ranked_trials()[0] == 1
    assert machine.attempts == [2, 1, 0, 0, 1, 2, 2, 1, 0, 1], "the last one at random"
    assert [(pair.first, pair.second, pair.real) for pair in pairs] == [(1, 2, True), (1, 0, True)]


def test_one_round_each_is_no_comparison() -> None:
    options = BenchOptions(slo="p99<50ms", rounds=1, width=0.99)
    assert (
        confirm(
            Machine(
                lambda at, number: one_round((75, 190)[at], 20), trials(75, 190), options, left=-0.5
            )
        )
        == []
    )


def test_of_near_equals_one_that_was_measured_again_wins() -> None:
    candidates = trials(100, 198, 200)
    with_round(candidates[1].points, OfferedLoad(connections=4), one_round(198, 20), SLO)
    assert winner_of(ranking(candidates), candidates.__getitem__) == 1
    far = trials(100, 161, 200)
    with_round(far[1].points, OfferedLoad(connections=4), one_round(161, 20), SLO)
    assert winner_of(ranking(far), far.__getitem__) == 2
    assert winner_of([2, 0], candidates.__getitem__) == 2
    assert winner_of([], candidates.__getitem__) is None


@dataclass
class OpenMachine(Machine):
    """A machine that stands a given rate of random requests."""

    stands: float = 0.0

    def measure_round(self, position: int, offered: OfferedLoad) -> bool:
        if offered.mode == "open":
            rate = offered.rate or 0.0
            reported = one_round(rate, 600 if rate > self.stands else 30).model_copy(
                update={"sent": round(rate), "ok": round(rate)}
            )
            self.does = lambda at, number: reported
        return super().measure_round(position, offered)


@pytest.mark.parametrize(
    ("stands", "rates", "text"),
    [
        (170, [160], "With 160 requests/s that arrive at random: p99 30.0 ms."),
        (130, [160, 80, 120], "it sustains 120/s (p99 30.0 ms); with 160 it breaks"),
        (90, [160, 80, 120], "it sustains 80/s (p99 30.0 ms); with 120 it breaks"),
        (10, [160, 80, 40], "With 40 requests/s that arrive at random it breaks"),
    ],
)
def test_where_requests_at_random_break_the_bounds_a_rate_is_found_that_holds(
    stands: float, rates: list[float], text: str
) -> None:
    machine = OpenMachine(
        lambda at, number: one_round((100, 200)[at], 20), trials(100, 200), stands=stands
    )
    confirm(machine)
    assert [point.offered.rate for point in machine.trials[1].points[1:]] == rates
    results = results_of(machine.trials)
    conclude(results)
    assert text in results.why
    assert results.trials[1].best == 0


def test_the_time_of_a_run_is_enough_for_the_search_and_for_its_end() -> None:
    for time_limit in (30, 45, 80, 120, 400, 3600):
        reserve = budget.reserved_for_end(None, 3, time_limit, 4)
        assert reserve <= 0.35 * time_limit
        seconds = budget.seconds_at_end(None, 3, reserve, 8)
        assert budget.SHORT_ROUND_S <= seconds <= budget.FULL_ROUND_S
        if time_limit >= 120:
            assert 8 + 12 * budget.round_cost(seconds) <= reserve + 1e-9
    assert budget.reserved_for_end(None, 3, 3600, 4) < 100
    assert budget.seconds_at_end(5, 3, 10, 8) == budget.seconds_in_search(5, 1000) == 5, (
        "what was asked for is done"
    )
    assert [budget.seconds_in_search(None, rate) for rate in (10_000, 75, 1, None)] == [1, 2, 3, 3]
    assert budget.curve_seconds(math.inf, 2) == 20
    assert budget.curve_seconds(100, 3) == pytest.approx(5)


def test_a_failure_cannot_win_and_the_end_of_the_time_ends_the_comparison() -> None:
    machine = Machine(
        lambda at, number: None if at == 2 else one_round((100, 150)[at], 20), trials(100, 150, 200)
    )
    confirm(machine)
    assert machine.ranked_trials()[0] == 1
    hurried = Machine(lambda at, number: one_round(100 * (at + 1), 20), trials(100, 200), left=-0.5)
    confirm(hurried)
    assert hurried.attempts == [1, 0]


def results_of(measured: list[Trial], slo: str | None = "p99<50ms") -> Results:
    reported = a_run(trials=measured, slo=slo)
    for trial in measured:
        trial.best = confirmed_best(trial.points)
    reported.winner, reported.baseline = next(iter(ranking(measured)), None), 0
    return reported


def test_the_verdict_names_the_winner_or_why_there_is_none() -> None:
    machine = Machine(
        lambda at, number: one_round((100, 200)[at] * (1 + number % 2 / 100), 20), trials(100, 200)
    )
    pairs = confirm(machine)
    results = results_of(machine.trials)
    results.paired = pairs
    conclude(results)
    for text in (
        "cpu, 1 worker, batch 2 has the highest measured throughput, within p99<50ms",
        "times the baseline",
        "requests/s that arrive at random",
    ):
        assert text in results.why
    slow = Trial(configuration=Configuration().as_json())
    with_round(slow.points, OfferedLoad(), one_round(5, 200), SLO)
    nobody = results_of([slow])
    conclude(nobody)
    assert nobody.why.startswith("No configuration holds p99<50ms: ")
    assert nobody.why.endswith("1 connection, p99 200 ms.")
    lost = Trial(configuration=Configuration().as_json())
    for _ in range(2):
        with_round(
            lost.points,
            OfferedLoad(),
            one_round(5, 20, lost=100).model_copy(update={"errors": {"500": 3}}),
            SLO,
        )
    failing = results_of([lost])
    conclude(failing)
    assert "with 1 connection failed 50.0% of them" in failing.why
    assert failing.why.endswith("(6 x 500, 200 x unanswered).")
    broken = results_of(
        [Trial(configuration=Configuration().as_json(), state="failed", reason="no memory")]
    )
    conclude(broken)
    assert broken.why == "Nothing was measured: no memory"


def test_a_steady_drift_of_the_machine_favours_nobody() -> None:
    machine = Machine(lambda at, number: one_round(100 * 0.99**number, 10), trials(100, 101))
    assert not any(pair.real for pair in confirm(machine))


def test_a_tie_is_reported_with_a_recommendation() -> None:
    candidates = trials(100, 200, 199)
    for trial in candidates[1:]:
        with_round(trial.points, OfferedLoad(connections=4), trial.points[0].rounds[0], SLO)
    results = results_of(candidates)
    results.winner, results.tied = 1, [2]
    conclude(results)
    assert results.why.startswith("A tie of cpu, 1 worker, batch 2 and cpu, 1 worker, batch 3, ")
    assert "batch 2, as it has the lowest p99: 200 requests/s" in results.why
    candidates[2].configuration["workers"] = 4
    conclude(results)
    assert "as it has the fewest workers" in results.why


def test_a_verdict_says_if_the_winner_was_measured_once() -> None:
    results = results_of(trials(100, 200))
    conclude(results)
    assert "It was measured once, as the time ended" in results.why


def test_the_baseline_is_not_measured_more_often_than_its_difference_needs() -> None:
    rates = {0: 100.0, 1: 195.0, 2: 200.0}
    wobble = {number: 1 + (number * 7 % 5 - 2) / 50 for number in range(200)}
    machine = Machine(
        lambda at, number: one_round(rates[at] * wobble[number], 20), trials(100, 195, 200)
    )
    confirm(machine)
    counts = [machine.attempts.count(at) for at in range(3)]
    assert counts[0] == 3 < counts[1], counts
