"""What is made of rounds: points, the last comparison, the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tsx_cli.bench.asked import Asked
from tsx_cli.bench.configuration import Configuration
from tsx_cli.bench.confirm import _compare, confirm
from tsx_cli.bench.points import confirmed_best, point_of, with_round
from tsx_cli.bench.results import Environment, Inputs, Latency, ModelInfo, Offered, Results, Round, Trial
from tsx_cli.bench.search import ranking
from tsx_cli.bench.slo import parse_slo
from tsx_cli.bench.verdict import conclude

SLO = parse_slo("p99<50ms")


def one_round(rate: float, p99: float, *, lost: int = 0) -> Round:
    latency = Latency(mean_ms=p99 / 2, p50_ms=p99 / 2, p99_ms=p99, max_ms=p99)
    histogram = [(p99 / 2, 90), (p99, 10)]
    return Round(seconds=1, sent=100 + lost, ok=100, unanswered=lost, throughput=rate, latency=latency, histogram=histogram)


def test_a_point_holds_where_its_bounds_do_and_all_were_answered() -> None:
    assert point_of(Offered(), [one_round(100, 40), one_round(110, 45)], SLO).holds
    assert not point_of(Offered(), [one_round(100, 40), one_round(110, 60)], SLO).holds
    assert not point_of(Offered(), [one_round(100, 40, lost=1)], None).holds
    assert point_of(Offered(), [one_round(100, 900)], None).holds
    assert not point_of(Offered(mode="open", rate=100), [one_round(90, 10)], SLO).holds, "it is behind for good"


def test_what_was_measured_again_counts_before_what_was_higher_once() -> None:
    trial = Trial(configuration=Configuration().as_json())
    with_round(trial.points, Offered(connections=1), one_round(100, 10), SLO)
    lucky = with_round(trial.points, Offered(connections=2), one_round(104, 10), SLO)
    assert confirmed_best(trial.points) == lucky
    assert with_round(trial.points, Offered(connections=1), one_round(101, 10), SLO) == 0
    assert confirmed_best(trial.points) == 0


@dataclass
class Machine:
    """A run whose servers do as `does` says."""

    does: Callable[[int, int], Round | None]
    trials: list[Trial]
    asked: Asked = field(default_factory=lambda: Asked(slo="p99<50ms"))
    left: float = 1000.0
    attempts: list[int] = field(default_factory=list)
    round_seconds = 1.0

    def order(self) -> list[int]:
        return ranking(self.trials)

    def first(self) -> int | None:
        return 0

    def trial(self, at: int) -> Trial:
        return self.trials[at]

    def attempt(self, at: int, offered: Offered) -> bool:
        told = self.does(at, len(self.attempts))
        self.attempts.append(at)
        self.left -= 1
        if told is None:
            self.trials[at].state = "failed"
            return False
        with_round(self.trials[at].points, offered, told, SLO)
        return True

    def seconds_left(self) -> float:
        return self.left


def trials(*rates: float) -> list[Trial]:
    made = []
    for size, rate in enumerate(rates, 1):
        trial = Trial(configuration=Configuration(batch_size=size).as_json())
        with_round(trial.points, Offered(connections=4), one_round(rate, 20), SLO)
        made.append(trial)
    return made


def test_the_best_the_next_best_and_the_baseline_are_measured_in_turn() -> None:
    machine = Machine(lambda at, number: one_round((100, 150, 200)[at] * (1 + number % 2 / 100), 20), trials(100, 150, 200))
    pairs = confirm(machine)
    assert machine.attempts[:6] == [2, 1, 0, 2, 1, 0]
    assert machine.attempts[-1] == 2
    assert machine.trials[2].points[-1].offered.mode == "open"
    assert [(pair.first, pair.second, pair.real, round(pair.ratio, 1)) for pair in pairs] == [(2, 1, True, 1.3), (2, 0, True, 2.0)]


def test_rounds_are_compared_where_there_are_two_of_each() -> None:
    assert _compare([0, 1], {0: [190.0], 1: [75.0]}) == []
    assert _compare([0, 1], {0: [190.0, 191.0]}) == []
    (pair,) = _compare([0, 1], {0: [190.0, 191.0, 189.0], 1: [75.0, 76.0, 75.0]})
    assert pair.real
    assert pair.low > 2


def test_one_that_no_longer_holds_its_bounds_makes_room_for_the_next() -> None:
    machine = Machine(lambda at, number: one_round((100, 150, 200)[at], 80 if at == 2 else 20), trials(100, 150, 200))
    pairs = confirm(machine)
    assert machine.order()[0] == 1
    assert {pair.first for pair in pairs} == {1}


def test_one_that_fails_now_cannot_win_and_time_that_is_over_ends_it() -> None:
    machine = Machine(lambda at, number: None if at == 2 else one_round((100, 150)[at], 20), trials(100, 150, 200))
    confirm(machine)
    assert machine.order()[0] == 1
    hurried = Machine(lambda at, number: one_round(100 * (at + 1), 20), trials(100, 200), left=-0.5)
    confirm(hurried)
    assert hurried.attempts == [1, 0]


def results_of(made: list[Trial], slo: str | None = "p99<50ms") -> Results:
    environment, inputs = Environment(fingerprint="f"), Inputs(source="a", count=1)
    told = Results(started="now", model=ModelInfo(name="m"), environment=environment, inputs=inputs, trials=made, slo=slo)
    for trial in made:
        trial.best = confirmed_best(trial.points)
    told.winner, told.baseline = next(iter(ranking(made)), None), 0
    return told


def test_the_verdict_names_the_winner_or_says_what_nobody_can() -> None:
    machine = Machine(lambda at, number: one_round((100, 200)[at] * (1 + number % 2 / 100), 20), trials(100, 200))
    pairs = confirm(machine)
    results = results_of(machine.trials)
    results.paired = pairs
    conclude(results)
    assert "cpu, 1 worker, batch 2 does the most, within p99<50ms" in results.why
    assert "times the baseline, one worker and one request at a time" in results.why
    assert "requests/s that come at random" in results.why
    slow = Trial(configuration=Configuration().as_json())
    with_round(slow.points, Offered(), one_round(5, 200), SLO)
    nobody = results_of([slow])
    conclude(nobody)
    assert nobody.why == "No configuration holds p99<50ms: the quickest was cpu, 1 worker, batch 1 with 1 connection, p99 200 ms."
    lost = Trial(configuration=Configuration().as_json())
    for _ in range(2):
        with_round(lost.points, Offered(), one_round(5, 20, lost=100).model_copy(update={"errors": {"500": 3}}), SLO)
    failing = results_of([lost])
    conclude(failing)
    assert failing.why.startswith("No configuration answered all requests: cpu, 1 worker, batch 1 with 1 connection failed 50.0% of them")
    assert failing.why.endswith("(200 x unanswered, 6 x 500).")
    broken = results_of([Trial(configuration=Configuration().as_json(), state="failed", reason="no memory")])
    conclude(broken)
    assert broken.why == "Nothing was measured: no memory"
