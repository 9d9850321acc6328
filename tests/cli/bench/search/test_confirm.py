"""Repeated rounds: points, the final comparison, and the conclusion."""

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


def one_round(rate: float, p99: float, *, unanswered: int = 0) -> Round:
    latency = Latency(mean_ms=p99 / 2, p50_ms=p99 / 2, p99_ms=p99, max_ms=p99)
    histogram = [(p99 / 2, 90), (p99, 10)]
    return Round(
        seconds=1,
        sent=100 + unanswered,
        ok=100,
        unanswered=unanswered,
        throughput=rate,
        latency=latency,
        histogram=histogram,
    )


def test_a_point_passes_if_all_limits_hold_and_all_requests_are_answered() -> None:
    assert point_of(OfferedLoad(), [one_round(100, 40), one_round(110, 45)], SLO).holds
    assert not point_of(OfferedLoad(), [one_round(100, 40), one_round(110, 60)], SLO).holds
    assert not point_of(OfferedLoad(), [one_round(100, 40, unanswered=1)], None).holds
    assert point_of(OfferedLoad(), [one_round(100, 900)], None).holds
    assert not point_of(OfferedLoad(mode="open", rate=100), [one_round(90, 10)], SLO).holds, (
        "it is behind for good"
    )
    unsent = one_round(100, 10).model_copy(update={"unsent": 20})
    assert not point_of(OfferedLoad(mode="open", rate=120), [unsent], SLO).holds, (
        "what found no free connection counts as well"
    )


def test_a_repeated_load_takes_precedence_over_a_higher_single_round() -> None:
    trial = Trial(configuration=Configuration().as_json())
    with_round(trial.points, OfferedLoad(connections=1), one_round(100, 10), SLO)
    lucky_position = with_round(trial.points, OfferedLoad(connections=2), one_round(104, 10), SLO)
    assert confirmed_best(trial.points) == lucky_position
    assert with_round(trial.points, OfferedLoad(connections=1), one_round(101, 10), SLO) == 0
    assert confirmed_best(trial.points) == 0


@dataclass
class Machine:
    """A run whose servers return the rounds of `round_of`."""

    round_of: Callable[[int, int], Round | None]
    trials: list[Trial]
    options: BenchOptions = field(default_factory=lambda: BenchOptions(slo="p99<50ms"))
    remaining_s: float = 1000.0
    attempts: list[int] = field(default_factory=list)
    round_seconds = 1.0

    def ranked_trials(self) -> list[int]:
        return ranking(self.trials)

    def baseline_trial(self) -> int | None:
        return 0

    def trial(self, position: int) -> Trial:
        return self.trials[position]

    def measure_round(self, position: int, offered: OfferedLoad) -> bool:
        measured_round = self.round_of(position, len(self.attempts))
        self.attempts.append(position)
        self.remaining_s -= 1
        if measured_round is None:
            self.trials[position].state = "failed"
            return False
        with_round(self.trials[position].points, offered, measured_round, SLO)
        return True

    def seconds_left(self) -> float:
        return self.remaining_s


def trials(*rates: float) -> list[Trial]:
    measured = []
    for size, rate in enumerate(rates, 1):
        trial = Trial(configuration=Configuration(batch_size=size).as_json())
        with_round(trial.points, OfferedLoad(connections=4), one_round(rate, 20), SLO)
        measured.append(trial)
    return measured


def test_the_two_best_and_the_baseline_are_measured_in_turn() -> None:
    machine = Machine(
        lambda position, number: one_round((100, 150, 200)[position] * (1 + number % 2 / 100), 20),
        trials(100, 150, 200),
    )
    pairs = confirm(machine)
    assert machine.attempts[:6] == [2, 1, 0, 0, 1, 2], (
        "there and back, so that what drifts favours nobody"
    )
    assert machine.attempts[-1:] == [2]
    highest_rate = machine.trials[2].points[0].throughput.value
    rates = [
        point.offered.rate or 0.0
        for point in machine.trials[2].points
        if point.offered.mode == "open"
    ]
    assert [round(rate / highest_rate, 1) for rate in rates] == [0.8]
    assert [(pair.first, pair.second, pair.real, round(pair.ratio, 1)) for pair in pairs] == [
        (2, 1, True, 1.3),
        (2, 0, True, 2.0),
    ]


def test_a_winner_that_misses_its_limits_is_replaced_by_the_next() -> None:
    machine = Machine(
        lambda position, number: one_round((100, 150, 200)[position], 80 if position == 2 else 20),
        trials(100, 150, 200),
    )
    pairs = confirm(machine)
    assert machine.ranked_trials()[0] == 1
    assert [(pair.first, pair.second) for pair in pairs] == [(1, 0)]
    tried_connections = [point.offered.connections for point in machine.trials[2].points]
    assert tried_connections == [4, 2]
    assert machine.attempts == [2, 1, 0, 0, 1, 2, 2, 1, 0, 1], (
        "two turns of all, one with less load, a third of those left, one at random"
    )


@dataclass
class Latent(Machine):
    """A machine whose best trial takes 15 ms for each connection, after one lucky round."""

    def measure_round(self, position: int, offered: OfferedLoad) -> bool:
        measured_round = one_round(
            (100, 150, 60 * offered.connections)[position],
            15 * offered.connections if position == 2 else 20,
        )
        self.round_of = lambda position, number: measured_round
        return super().measure_round(position, offered)


def test_a_trial_that_keeps_its_limits_with_less_load_may_still_win() -> None:
    machine = Latent(
        lambda position, number: None,
        trials(100, 150, 200),
        BenchOptions(slo="p99<50ms", width=0.99),
    )
    pairs = confirm(machine)
    best = machine.trials[2].points[confirmed_best(machine.trials[2].points) or 0]
    assert (best.offered.connections, best.throughput.value, len(best.rounds)) == (3, 180, 4)
    assert [(pair.first, pair.second, round(pair.ratio, 1)) for pair in pairs] == [
        (2, 1, 1.2),
        (2, 0, 1.8),
    ]


def test_a_load_above_one_that_missed_a_limit_is_not_the_best() -> None:
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


def test_two_trials_that_change_places_are_not_measured_again() -> None:
    options = BenchOptions(slo="p99<50ms", width=0.99)
    machine = Machine(
        lambda position, number: one_round((100, 205, 190)[position] * (1 + number % 2 / 100), 20),
        trials(100, 195, 200),
        options,
    )
    pairs = confirm(machine)
    assert machine.ranked_trials()[0] == 1
    assert machine.attempts == [2, 1, 0, 0, 1, 2, 2, 1, 0, 1], "the last one at random"
    assert [(pair.first, pair.second, pair.real) for pair in pairs] == [(1, 2, True), (1, 0, True)]


def test_one_round_each_is_not_a_comparison() -> None:
    options = BenchOptions(slo="p99<50ms", rounds=1, width=0.99)
    assert (
        confirm(
            Machine(
                lambda position, number: one_round((75, 190)[position], 20),
                trials(75, 190),
                options,
                remaining_s=-0.5,
            )
        )
        == []
    )


def test_of_two_similar_trials_the_repeated_one_wins() -> None:
    candidates = trials(100, 198, 200)
    with_round(candidates[1].points, OfferedLoad(connections=4), one_round(198, 20), SLO)
    assert winner_of(ranking(candidates), candidates.__getitem__) == 1
    distant = trials(100, 161, 200)
    with_round(distant[1].points, OfferedLoad(connections=4), one_round(161, 20), SLO)
    assert winner_of(ranking(distant), distant.__getitem__) == 2
    assert winner_of([2, 0], candidates.__getitem__) == 2
    assert winner_of([], candidates.__getitem__) is None


@dataclass
class OpenMachine(Machine):
    """A machine that sustains a given rate of random requests."""

    capacity: float = 0.0

    def measure_round(self, position: int, offered: OfferedLoad) -> bool:
        if offered.mode == "open":
            rate = offered.rate or 0.0
            measured_round = one_round(rate, 600 if rate > self.capacity else 30).model_copy(
                update={"sent": round(rate), "ok": round(rate)}
            )
            self.round_of = lambda position, number: measured_round
        return super().measure_round(position, offered)


@pytest.mark.parametrize(
    ("capacity", "rates", "text"),
    [
        (170, [160], "With 160 requests/s that arrive at random: p99 30.0 ms."),
        (130, [160, 80, 120], "it sustains 120/s (p99 30.0 ms); with 160 it breaks"),
        (90, [160, 80, 120], "it sustains 80/s (p99 30.0 ms); with 120 it breaks"),
        (10, [160, 80, 40], "With 40 requests/s that arrive at random it breaks"),
    ],
)
def test_a_sustainable_rate_of_random_requests_is_searched(
    capacity: float, rates: list[float], text: str
) -> None:
    machine = OpenMachine(
        lambda position, number: one_round((100, 200)[position], 20),
        trials(100, 200),
        capacity=capacity,
    )
    confirm(machine)
    assert [point.offered.rate for point in machine.trials[1].points[1:]] == rates
    results = results_of(machine.trials)
    conclude(results)
    assert text in results.why
    assert results.trials[1].best == 0


def test_the_time_limit_covers_the_search_and_the_final_comparison() -> None:
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


def test_a_failed_trial_cannot_win_and_the_time_limit_ends_the_comparison() -> None:
    machine = Machine(
        lambda position, number: None if position == 2 else one_round((100, 150)[position], 20),
        trials(100, 150, 200),
    )
    confirm(machine)
    assert machine.ranked_trials()[0] == 1
    machine_without_time = Machine(
        lambda position, number: one_round(100 * (position + 1), 20),
        trials(100, 200),
        remaining_s=-0.5,
    )
    confirm(machine_without_time)
    assert machine_without_time.attempts == [1, 0]


def results_of(measured: list[Trial], slo: str | None = "p99<50ms") -> Results:
    measured_round = a_run(trials=measured, slo=slo)
    for trial in measured:
        trial.best = confirmed_best(trial.points)
    measured_round.winner, measured_round.baseline = next(iter(ranking(measured)), None), 0
    return measured_round


def test_the_conclusion_names_the_winner_or_the_reason_for_none() -> None:
    machine = Machine(
        lambda position, number: one_round((100, 200)[position] * (1 + number % 2 / 100), 20),
        trials(100, 200),
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
    slow_trial = Trial(configuration=Configuration().as_json())
    with_round(slow_trial.points, OfferedLoad(), one_round(5, 200), SLO)
    results_without_winner = results_of([slow_trial])
    conclude(results_without_winner)
    assert results_without_winner.why.startswith("No configuration holds p99<50ms: ")
    assert results_without_winner.why.endswith("1 connection, p99 200 ms.")
    trial_with_losses = Trial(configuration=Configuration().as_json())
    for _ in range(2):
        with_round(
            trial_with_losses.points,
            OfferedLoad(),
            one_round(5, 20, unanswered=100).model_copy(update={"errors": {"500": 3}}),
            SLO,
        )
    results_with_losses = results_of([trial_with_losses])
    conclude(results_with_losses)
    assert "with 1 connection failed 50.0% of them" in results_with_losses.why
    assert results_with_losses.why.endswith("(6 x 500, 200 x unanswered).")
    failed_results = results_of(
        [Trial(configuration=Configuration().as_json(), state="failed", reason="no memory")]
    )
    conclude(failed_results)
    assert failed_results.why == "Nothing was measured: no memory"


def test_a_steady_drift_of_the_machine_favours_no_trial() -> None:
    machine = Machine(lambda position, number: one_round(100 * 0.99**number, 10), trials(100, 101))
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


def test_the_conclusion_says_if_the_winner_was_measured_once() -> None:
    results = results_of(trials(100, 200))
    conclude(results)
    assert "It was measured once, as the time ended" in results.why


def test_the_baseline_is_measured_only_as_often_as_needed() -> None:
    rates = {0: 100.0, 1: 195.0, 2: 200.0}
    variation = {number: 1 + (number * 7 % 5 - 2) / 50 for number in range(200)}
    machine = Machine(
        lambda position, number: one_round(rates[position] * variation[number], 20),
        trials(100, 195, 200),
    )
    confirm(machine)
    counts = [machine.attempts.count(position) for position in range(3)]
    assert counts[0] == 3 < counts[1], counts
