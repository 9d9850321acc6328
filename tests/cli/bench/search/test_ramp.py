"""The ramp of an open loop to its knee, with a server of known capacity."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarked import one_round
from tests.support.simulated_bench import SimulatedMachine, search
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import OfferedLoad, Point, Round, parse_slo
from tsx_cli.bench.search.confirm import KNEE_RESOLUTION, measure_knee
from tsx_cli.bench.search.ladder import bisect
from tsx_cli.bench.search.points import confirmed_best, knee_of, open_loops, with_round
from tsx_cli.bench.search.trial import LoadMeasurement, TrialFailed

SLO = parse_slo("p99<100ms")


class Server:
    """A server that answers in 10 ms up to the rate `capacity`, and in a second above it.

    `unlucky` maps rounds to rates above which they are slow nevertheless.
    """

    def __init__(
        self, capacity: float, *, rounds: int = 1000, unlucky: dict[int, float] | None = None
    ) -> None:
        self.capacity, self.rounds_left, self.unlucky = capacity, rounds, unlucky or {}
        self.points: list[Point] = []
        self.rates: list[float] = []

    def attempt(self, rate: float) -> Point | None:
        if not self.rounds_left:
            return None
        self.rounds_left -= 1
        self.rates.append(rate)
        slow = rate > self.capacity or rate > self.unlucky.get(len(self.rates), rate)
        return self.points[
            with_round(self.points, offered(rate), self.round(rate, 1000 if slow else 10), SLO)
        ]

    def round(self, rate: float, middle_ms: float) -> Round:
        return one_round(rate, middle_ms, len(self.rates))


def offered(rate: float, arrivals: str = "poisson") -> OfferedLoad:
    return OfferedLoad.model_validate(
        {"mode": "open", "connections": 256, "rate": rate, "arrivals": arrivals}
    )


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [4, 17, 93, 100, 340, 1200])
def test_the_knee_is_found_from_any_closed_loop_rate(capacity: float) -> None:
    server = Server(capacity)
    measure_knee(server.attempt, 100, rounds=3)
    passing_point, failing_point = knee_of(server.points)
    assert passing_point is not None
    assert failing_point is not None
    rate, failing_rate = passing_point.offered.rate or 0.0, failing_point.offered.rate or 0.0
    assert rate <= capacity < failing_rate <= rate * (1 + 2 * KNEE_RESOLUTION)
    assert len(passing_point.rounds) == 3, "so that its figures have an interval"
    assert len(server.rates) <= 20
    points_up_to_knee = [
        point for point in open_loops(server.points) if (point.offered.rate or 0.0) <= rate
    ]
    assert capacity < 10 or len(points_up_to_knee) >= 3, "the course of the latency up to the knee"


def test_a_rate_that_misses_its_limits_in_a_later_round_is_not_the_knee() -> None:
    lucky = Server(93)
    measure_knee(lucky.attempt, 100, rounds=3)
    knee = knee_of(lucky.points).held
    assert knee is not None
    rate = knee.offered.rate or 0.0
    second_round = next(
        number
        for number, offered in enumerate(lucky.rates, 1)
        if offered == rate and lucky.rates[: number - 1].count(rate) == 1
    )
    server = Server(93, unlucky={second_round: rate - 1})
    measure_knee(server.attempt, 100, rounds=3)
    passing_point = knee_of(server.points).held
    assert passing_point is not None
    assert (passing_point.offered.rate or 0.0) < rate
    assert len(passing_point.rounds) == 3


@pytest.mark.slow
def test_the_ramp_ends_without_a_sustainable_rate_or_without_time() -> None:
    server = Server(0)
    measure_knee(server.attempt, 100)
    assert knee_of(server.points).held is None
    assert 0.5 < min(server.rates) < 1
    assert len(server.rates) == 5, "each lower than the one before, and none between them"
    for rounds in range(12):
        short = Server(93, rounds=rounds)
        measure_knee(short.attempt, 100)
        assert len(short.rates) == rounds
    assert knee_of([]) == (None, None)


def test_loads_with_other_arrivals_do_not_belong_to_the_ramp() -> None:
    server = Server(50)
    for rate in (10, 20, 90):
        server.attempt(rate)
    with_round(server.points, offered(70, "constant"), server.round(70, 10), SLO)
    with_round(server.points, OfferedLoad(connections=8), server.round(80, 10), SLO)
    assert [point.offered.rate for point in open_loops(server.points)] == [10, 20, 90]
    passing_point, failing_point = knee_of(server.points)
    assert passing_point is not None
    assert failing_point is not None
    assert (passing_point.offered.rate, failing_point.offered.rate) == (20, 90)


def test_a_rate_of_the_ramp_replaces_the_closed_loop_load_only_if_that_fails() -> None:
    closed = OfferedLoad(connections=8)
    server = Server(90)
    with_round(server.points, closed, server.round(80, 10), SLO)
    measure_knee(server.attempt, 80)
    best = confirmed_best(server.points)
    assert best is not None
    assert server.points[best].offered == closed
    only_open = confirmed_best(server.points[1:])
    assert only_open is not None
    assert server.points[1:][only_open] == knee_of(server.points).held
    server.points[0].holds = False
    fallback = confirmed_best(server.points)
    assert fallback is not None
    assert server.points[fallback] == knee_of(server.points).held


def test_a_bisection_ends_near_the_boundary_or_on_request() -> None:
    assert bisect(lambda value: value <= 0.7, 0.0, 1.0, 0.8, 0.1) == (0.7, 0.75)
    assert bisect(lambda value: None, 0.0, 1.0, 0.8, 0.1) == (0.0, 1.0)


@pytest.mark.slow
def test_a_run_reserves_time_to_ramp_its_winner(tmp_path: Path) -> None:
    results = search(SimulatedMachine(3), 300, tmp_path / "long", ramp=True)
    assert results.winner is not None
    winner = results.trials[results.winner]
    passing_point, failing_point = knee_of(winner.points)
    assert passing_point is not None
    assert failing_point is not None
    assert (failing_point.offered.rate or 0.0) <= 1.12 * (passing_point.offered.rate or 0.0)
    assert len(passing_point.rounds) >= 3
    assert len(open_loops(winner.points)) > 5
    assert not [note for note in results.notes if "--ramp" in note]
    short = search(SimulatedMachine(3), 45, tmp_path / "short", ramp=True)
    assert [note for note in short.notes if "the time was too short for --ramp" in note]


class FragileMachine(SimulatedMachine):
    """A machine whose servers die above a rate, and are fast below it."""

    def truth(self, configuration: Configuration, offered: OfferedLoad) -> tuple[float, float]:
        if offered.mode == "open" and offered.rate:
            return offered.rate, 50.0
        return super().truth(configuration, offered)

    def load(
        self, configuration: Configuration, offered: OfferedLoad, seconds: float
    ) -> LoadMeasurement:
        if offered.mode == "open" and (offered.rate or 0.0) > self.best(configuration):
            raise TrialFailed("a worker died")
        return super().load(configuration, offered, seconds)


def test_a_crash_of_the_winner_during_the_ramp_is_reported(tmp_path: Path) -> None:
    results = search(FragileMachine(3), 300, tmp_path, ramp=True)
    (note,) = [note for note in results.notes if "--ramp" in note]
    (failed,) = [trial for trial in results.trials if trial.state == "failed"]
    assert note == f"--ramp ended as {failed.as_configuration()} failed: a worker died"
