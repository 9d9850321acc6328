"""Disturbed measurements: how they are recognized, and their effect on the winner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.bench.search.test_confirm import one_round
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Noise, OfferedLoad, PairedComparison, Round, Trial, parse_slo
from tsx_cli.bench.search.machine import (
    comparable_throughput,
    correction,
    judge,
    should_repeat,
    summary,
)
from tsx_cli.bench.search.points import choose, point_of

LOAD = OfferedLoad(connections=4)


def disturbed(rate: float, p99: float, **noise: float) -> Round:
    moment = Noise(**noise)  # type: ignore[arg-type]
    return one_round(rate, p99).model_copy(
        update={"noise": moment, "disturbed": judge(moment, 2) or ["by hand"]}
    )


def trial_of(workers: int, *rounds: Round) -> Trial:
    return Trial(
        configuration=Configuration(workers=workers).as_json(),
        points=[point_of(LOAD, rounds, None)],
    )


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (
            Noise(others=0.11, busiest="cc"),
            "other processes used 0.11 cores (limit 0.1, most by cc)",
        ),
        (Noise(steal=0.03), "the hypervisor took 3% of the time (limit 2%)"),
        (Noise(throttled=0.5), "the container's CPU quota was used up 50% of the time (limit 2%)"),
        (Noise(memory_pressure=0.2), "tasks waited for memory 20% of the time (limit 5%)"),
        (Noise(io_pressure=0.2), "tasks waited for a disk 20% of the time (limit 10%)"),
        (Noise(heat=3), "a core was slowed down for its temperature 3 times (limit 0)"),
        (Noise(probe=1.5), "a fixed computation took 1.50 times as long as at best (limit 1.25)"),
    ],
)
def test_a_disturbance_is_reported_with_its_figure_and_its_limit(
    noise: Noise, message: str
) -> None:
    assert judge(noise, 2) == [message]


def test_waiting_for_its_own_workers_does_not_disturb_a_server() -> None:
    noise = Noise(
        cores=2,
        others=0.1,
        steal=0.02,
        cpu_pressure=1.0,
        memory_pressure=0.05,
        probe=1.25,
        throttled=0.02,
    )
    assert judge(noise, 2) == []
    assert judge(Noise(others=0.4), 8) == [], "what counts is the share of the cores"


@given(st.lists(st.booleans(), max_size=30), st.floats(0, 100), st.floats(0.1, 100))
def test_only_disturbed_rounds_are_repeated_if_there_is_time(
    rounds: list[bool], seconds: float, cost: float
) -> None:
    if should_repeat(rounds, seconds, cost):
        assert rounds[-1]
        assert seconds >= cost


def test_no_rounds_are_repeated_if_all_are_disturbed() -> None:
    assert should_repeat([False, False, True], 60, 3)
    assert not should_repeat([True, False, True, True], 60, 3)
    assert not should_repeat(4 * [False, False, True, True, False, False, False] + [True], 60, 3), (
        "a share of the rounds, and no more"
    )


def test_only_undisturbed_rounds_count_if_there_are_any() -> None:
    rounds = [disturbed(50, 90, others=1.0), one_round(100, 20)]
    point = point_of(LOAD, rounds, parse_slo("p99<50ms"))
    assert (
        point.throughput.value,
        point.latency.p99_ms,
        point.holds,
        len(point.rounds),
        len(point.counted),
    ) == (100, 20, True, 2, 1)
    assert point_of(LOAD, rounds[:1], parse_slo("p99<50ms")).throughput.value == 50


def test_disturbed_rounds_are_compared_by_the_servers_fraction_of_the_cores() -> None:
    assert correction(disturbed(50, 90, cores=1.0, others=1.0, cpu_pressure=0.9)) == pytest.approx(
        1.9
    )
    assert correction(disturbed(50, 90, cores=1.0, others=1.0, cpu_pressure=0.0)) == 1.0, (
        "it used cores that were free"
    )
    assert correction(disturbed(50, 90, cores=0.1, others=1.9)) == 3.0
    assert correction(disturbed(50, 90, cores=1.0, steal=0.5)) == 2.0
    assert correction(one_round(50, 90)) == 1.0
    four, two = (
        trial_of(4, disturbed(80, 9, cores=1.6, others=0.4, cpu_pressure=1)),
        trial_of(2, disturbed(70, 9, cores=1.3, others=0.7)),
    )
    assert comparable_throughput(two.points[0]) > comparable_throughput(four.points[0]), (
        "more workers get more of a shared machine, and do not more with it"
    )


def test_a_run_reports_its_disturbed_and_its_repeated_rounds() -> None:
    repeated, marked = (
        [disturbed(50, 9, others=0.8), one_round(90, 9)],
        [disturbed(50, 9, others=0.9)],
    )
    counts = summary([trial_of(1, *repeated), trial_of(2, *marked), trial_of(3, one_round(1, 1))])
    assert (counts.rounds, counts.disturbed, counts.repeated) == (4, 2, 1)
    assert (
        counts.says
        == "2 of 4 rounds were disturbed by other processes (median 0.9 cores); 1 was repeated"
    )
    assert summary([trial_of(1, one_round(1, 1))]).says == ""
    assert (
        "so configurations were compared by their throughput for the processor time"
        in summary([trial_of(1, *marked)]).says
    )
    stolen = summary([trial_of(1, disturbed(50, 9, steal=0.2)), trial_of(2, one_round(1, 1))])
    assert (
        stolen.says
        == "1 of 2 rounds was disturbed (the hypervisor took 20% of the time (limit 2%)); none was repeated, and they are marked"
    )


def pair(first: int, second: int, *, real: bool) -> PairedComparison:
    return PairedComparison(first=first, second=second, ratio=1.02, low=0.9, high=1.1, real=real)


def test_fewer_workers_are_recommended_if_the_difference_is_noise() -> None:
    twice = {rate: [one_round(rate, 20), one_round(rate, 20)] for rate in (80, 95, 98, 100)}
    candidates = [trial_of(4, *twice[100]), trial_of(2, *twice[98]), trial_of(1, *twice[80])]
    assert choose(
        [0, 1, 2], candidates.__getitem__, [pair(0, 1, real=False), pair(0, 2, real=True)]
    ) == (1, [0])
    assert choose(
        [0, 1, 2], candidates.__getitem__, [pair(0, 1, real=True), pair(0, 2, real=True)]
    ) == (0, [])
    assert choose(
        [0, 1, 2], candidates.__getitem__, [pair(0, 1, real=True), pair(0, 2, real=False)]
    ) == (0, [2]), "a tie, but clearly less"
    candidates[1] = trial_of(2, *twice[95])
    assert choose([0, 1], candidates.__getitem__, []) == (0, [1]), "as fast, for all that is known"
    assert choose([], candidates.__getitem__, []) == (None, [])


def test_paired_rounds_override_a_lucky_round_of_the_search() -> None:
    candidates = [
        trial_of(4, one_round(130, 20), one_round(98, 20), one_round(98, 20)),
        trial_of(2, one_round(100, 20), one_round(100, 20)),
    ]
    slower = PairedComparison(first=0, second=1, ratio=0.98, low=0.97, high=0.99, real=True)
    assert choose([0, 1], candidates.__getitem__, [slower]) == (1, [])
    assert choose(
        [0, 1],
        candidates.__getitem__,
        [PairedComparison(first=1, second=0, ratio=1.02, low=1.01, high=1.03, real=True)],
    ) == (1, [])
