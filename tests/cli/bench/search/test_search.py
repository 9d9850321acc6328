"""The search on simulated machines whose best configuration is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_archiver import ModelConfig
from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.configuration import Configuration, parse_numbers
from tsx_cli.bench.load.results import (
    OUT_OF_TIME,
    Accuracy,
    Curve,
    CurvePoint,
    Figure,
    Latency,
    OfferedLoad,
    Point,
    Round,
    Trial,
    parse_slo,
)
from tsx_cli.bench.search.ladder import Rung, next_level
from tsx_cli.bench.search.options import BenchOptions
from tsx_cli.bench.search.options import configurations as configurations_of
from tsx_cli.bench.search.points import best_point
from tsx_cli.bench.search.predict import predict, undisturbed
from tsx_cli.bench.search.search import (
    State,
    baseline,
    exclusion_reason,
    faster_unmeasured,
    forecast,
    next_trial,
    ranking,
    unmeasured_configurations,
)
from tsx_cli.common.failure import UsageError

pytestmark = pytest.mark.slow


SIZES = (1, 2, 4, 8, 16, 32)
# A machine returns requests per second and a p99 in milliseconds.
Machine = Callable[[Configuration, OfferedLoad], tuple[float, float]]


def curve(
    first: float,
    row: float,
    *,
    cpu: float = 1.0,
    quadratic: float = 0.0,
    failed_after: int | None = None,
    **variant: object,
) -> Curve:
    """Make a curve with t(n) = first + row * n + upwards * n * n."""
    sizes = [size for size in SIZES if failed_after is None or size <= failed_after]
    times = [first + row * size + quadratic * size * size for size in sizes]
    points = [
        CurvePoint(
            batch_size=size, median_ms=time, low_ms=time, high_ms=time, samples=9, cpu_ms=cpu * time
        )
        for size, time in zip(sizes, times, strict=True)
    ]
    return Curve(
        points=points, spread=0.02, failed=None if failed_after is None else "out of memory"
    ).model_copy(update=variant)


def space(
    workers: Sequence[int] = (1, 2, 4, 8, 16), sizes: Sequence[int] = SIZES, **variant: object
) -> list[Configuration]:
    return [
        replace(Configuration(workers=count, batch_size=size), **variant)
        for count, size in itertools.product(workers, sizes)
    ]  # type: ignore[arg-type]


def measured(slo: Slo | None, offered: OfferedLoad, rate: float, p99: float) -> Point:
    latency = Latency(
        mean_ms=0.8 * p99,
        p50_ms=0.8 * p99,
        p90_ms=0.9 * p99,
        p95_ms=0.95 * p99,
        p99_ms=p99,
        p999_ms=p99,
        max_ms=p99,
    )
    holds = slo is None or not slo.broken(latency.model_dump(), 0)
    figure = Figure(value=rate, low=rate, high=rate)
    return Point(
        offered=offered,
        throughput=figure,
        latency=latency,
        p99_ms=Figure(value=p99, low=p99, high=p99),
        holds=holds,
    )


def run(
    state: State,
    machine: Machine,
    fails: Callable[[Configuration], bool] = lambda _: False,
    limit: int = 2000,
) -> State:
    """Measure on a machine until the search proposes nothing more."""
    for _ in range(limit):
        candidate = next_trial(state)
        if candidate is None:
            return state
        trials = list(state.trials)
        position = next(
            (
                at
                for at, trial in enumerate(trials)
                if trial.as_configuration() == candidate.configuration
            ),
            len(trials),
        )
        if position == len(trials):
            trials.append(Trial(configuration=candidate.configuration.as_json()))
        if fails(candidate.configuration):
            trials[position].state, trials[position].reason = "failed", "out of memory"
        else:
            point = measured(
                state.slo, candidate.offered, *machine(candidate.configuration, candidate.offered)
            )
            open_points = [
                earlier
                for earlier in trials[position].points
                if earlier.offered == candidate.offered
            ]
            assert not open_points or (state.exhaustive and not open_points[0].rounds), (
                "it asks for the same again"
            )
            for measurement in open_points:
                measurement.rounds = 2 * [
                    Round(
                        seconds=1,
                        sent=1,
                        ok=1,
                        throughput=point.throughput.value,
                        latency=point.latency,
                    )
                ]
            trials[position].points += [] if open_points else [point]
        state = replace(
            state,
            trials=trials,
            seconds_left=None if state.seconds_left is None else state.seconds_left - 1,
        )
    raise AssertionError(f"no end after {limit} points")


def modelled(
    true_curve: Curve,
    cores: int,
    errors: Callable[[Configuration], float] = lambda _: 1.0,
    factor: float = 1.0,
) -> Machine:
    """Make a machine that follows a curve with an error for each configuration.

    The time of a single request is the same in all configurations.
    """

    def machine(configuration: Configuration, offered: OfferedLoad) -> tuple[float, float]:
        prediction = predict(true_curve, configuration, offered, 0.5, cores)
        error = factor * (errors(configuration) if offered.connections > 1 else 1.0)
        alone = (
            predict(true_curve, configuration, OfferedLoad(connections=1), 0.5, cores).p99_ms
            / factor
        )
        return prediction.throughput * error, max(alone, prediction.p99_ms / error)

    return machine


def optimum(state: State, machine: Machine, resolution: int = 20) -> float:
    best = 0.0
    for configuration in state.configurations:
        most = 2 * (configuration.workers + 1) * configuration.batch_size + 2
        for connections in sorted(
            {*range(1, min(most, resolution)), *range(resolution, most, max(1, most // resolution))}
        ):
            point = measured(
                state.slo,
                OfferedLoad(connections=connections),
                *machine(configuration, OfferedLoad(connections=connections)),
            )
            best = max(best, point.throughput.value if point.holds else 0.0)
    return best


def winning_configuration(state: State) -> tuple[float, Configuration | None]:
    order = ranking(state.trials, state.excluded)
    if not order:
        return 0.0, None
    trial = state.trials[order[0]]
    return max(
        point.throughput.value for point in trial.points if point.holds
    ), trial.as_configuration()


def points(state: State) -> int:
    return sum(len(trial.points) for trial in state.trials)


LAWS = [(5, 3, 2, 1), (20, 0.2, 4, 2), (1, 12, 8, 1), (8, 2, 16, 4), (0.5, 0.05, 2, 1)]


@pytest.mark.parametrize("slo", [None, "p99<20ms", "p99<100ms", "p50<60ms,p99<400ms"])
@pytest.mark.parametrize(("first", "row", "cores", "cpu"), LAWS)
def test_the_best_configuration_is_found_with_few_measurements(
    slo: str | None, first: float, row: float, cores: int, cpu: float
) -> None:
    true_curve = curve(first, row, cpu=cpu)
    state = State(space(), [true_curve], slo=parse_slo(slo) if slo else None, cores=cores)
    machine = modelled(true_curve, cores)
    result = run(state, machine)
    assert winning_configuration(result)[0] >= 0.95 * optimum(state, machine)
    assert len(result.trials) <= 17
    assert points(result) <= 45


def test_the_best_configuration_is_found_despite_wrong_predictions() -> None:
    """Configurations differ from the curve by up to a seventh, and all of them by one factor."""
    regained = []
    for seed in range(12):
        chance = random.Random(seed)
        configurations = space((1, 2, 4), (1, 4, 16))
        errors = {configuration: chance.uniform(0.87, 1.15) for configuration in configurations}
        true_curve = curve(
            chance.uniform(0.3, 60),
            chance.uniform(0.02, 30),
            quadratic=chance.choice([0, chance.uniform(0, 0.3)]),
        )
        slo, cores = (
            chance.choice([None, parse_slo("p99<50ms"), parse_slo("p99<300ms")]),
            chance.choice([1, 2, 8]),
        )
        state = State(configurations, [true_curve], slo=slo, cores=cores)
        machine = modelled(true_curve, cores, errors.__getitem__, factor=chance.uniform(0.7, 1))
        best = optimum(state, machine, 20)
        regained.append(winning_configuration(run(state, machine))[0] / best if best else 1.0)
    assert min(regained) >= 0.85
    assert sum(regained) / len(regained) >= 0.98


@pytest.mark.parametrize(
    ("machine", "edge"),
    [
        (modelled(curve(1, 10), 1), Configuration(workers=1, batch_size=1)),
        (modelled(curve(30, 0.1, cpu=0.01), 16), Configuration(workers=16, batch_size=32)),
        (modelled(curve(0.1, 10, cpu=0.01), 16), Configuration(workers=16, batch_size=1)),
        (modelled(curve(50, 0.1), 1), Configuration(workers=1, batch_size=32)),
    ],
)
def test_the_limits_of_the_ranges_are_reached(machine: Machine, edge: Configuration) -> None:
    # The curve misleads on purpose.
    state = State(space(), [curve(20, 2, cpu=0.2)], cores=8)
    assert (
        winning_configuration(run(state, machine))[0]
        >= 0.95 * machine(edge, OfferedLoad(connections=1000))[0]
    )


def test_the_baseline_is_measured_first_even_outside_the_ranges() -> None:
    configurations = space((4, 8), (8, 16), precision="bf16", threads=2)
    candidate = next_trial(State(configurations, [], cores=8))
    assert candidate is not None
    assert (
        candidate.configuration
        == Configuration(precision="bf16", threads=2)
        == baseline(configurations)
    )
    assert candidate.offered.connections == 1


def test_a_configuration_with_a_worse_curve_is_not_measured() -> None:
    half, full = space(precision="bf16"), space()
    curves = [curve(20, 2), curve(100, 20, precision="bf16")]

    def machine(configuration: Configuration, offered: OfferedLoad) -> tuple[float, float]:
        return modelled(curves[configuration.precision == "bf16"], 4)(configuration, offered)

    state = run(State([*full, *half], curves, slo=parse_slo("p99<200ms"), cores=4), machine)
    assert {trial.as_configuration().precision for trial in state.trials} == {"as is"}
    skipped = unmeasured_configurations(state)
    assert {configuration for configuration, _, _ in skipped} == {*full, *half} - {
        trial.as_configuration() for trial in state.trials
    }
    assert all("at most" in reason and predicted is not None for _, predicted, reason in skipped)


def test_a_failure_rules_out_larger_configurations() -> None:
    true_curve = curve(20, 0.5, cpu=0.1)
    state = State(space(), [true_curve], cores=8)
    machine = modelled(true_curve, 8)

    def fails(configuration: Configuration) -> bool:
        return configuration.workers * configuration.batch_size > 40

    result = run(state, machine, fails)
    possible = replace(
        state,
        configurations=[
            configuration for configuration in state.configurations if not fails(configuration)
        ],
    )
    assert winning_configuration(result)[0] >= 0.95 * optimum(possible, machine)
    states = [trial.state for trial in result.trials]
    last = max(at for at, state in enumerate(states) if state == "measured")
    assert 1 <= states[:last].count("failed") <= 4 < states.count("failed")
    assert "failed, which asks for less: out of memory" in str(
        exclusion_reason(result, Configuration(workers=16, batch_size=32))
    )


def test_a_baseline_without_responses_does_not_end_the_search() -> None:
    state = State(space(), [curve(20, 2)], slo=parse_slo("p99<200ms"), cores=4)
    dead = Trial(
        configuration=Configuration().as_json(), points=[measured(state.slo, OfferedLoad(), 0, 0)]
    )
    assert next_trial(replace(state, trials=[dead])) is not None
    slow = dead.model_copy(update={"points": [measured(state.slo, OfferedLoad(), 0.001, 20)]})
    assert next_trial(replace(state, trials=[slow])) is not None


def test_the_search_ends_if_the_baseline_fails() -> None:
    state = run(State(space(), [curve(5, 1)], cores=2), modelled(curve(5, 1), 2), lambda _: True)
    assert len(state.trials) == 1
    assert ranking(state.trials) == []


def test_a_batch_size_that_failed_on_one_worker_is_not_served() -> None:
    state = State(space(), [curve(20, 0.1, failed_after=8)], cores=8)
    result = run(state, modelled(curve(20, 0.1), 8))
    assert max(trial.as_configuration().batch_size for trial in result.trials) == 8
    assert any("out of memory" in reason for _, _, reason in unmeasured_configurations(result))


def test_each_number_of_threads_is_predicted_from_its_own_curve() -> None:
    """One worker gets two threads on two cores, and two workers get one each.

    One thread is ten times as fast here.
    """
    curves = [curve(10, 10, cpu=2.0), curve(1, 1, threads=1)]
    configurations = configurations_of(BenchOptions(), ModelConfig(), 2, 0)
    assert {(configuration.workers, configuration.threads) for configuration in configurations} == {
        (1, None),
        (1, 1),
        (2, None),
    }
    state = State(configurations, curves, slo=parse_slo("p99<100ms"), cores=2)
    two = forecast(state, Configuration(workers=2))
    assert (
        two.expected
        == forecast(state, Configuration(workers=2, threads=1)).expected
        > 1.5 * forecast(state, Configuration(threads=1)).expected
    )

    def machine(configuration: Configuration, offered: OfferedLoad) -> tuple[float, float]:
        threads = configuration.threads_per_worker(2)
        prediction = predict(
            curves[threads == 1], replace(configuration, threads=threads), offered, 0.5, 2
        )
        return prediction.throughput, prediction.p99_ms

    result = run(state, machine)
    assert winning_configuration(result)[0] >= 0.95 * optimum(state, machine)
    assert points(result) <= 15


def test_a_curve_with_one_disturbed_size_does_not_mislead_the_search() -> None:
    """The figures were measured with two threads, while another process took a core at times."""
    times = {1: 63.5, 2: 5.95, 4: 8.8, 8: 17.2, 16: 32.9, 32: 83.0}
    disturbed = curve(1, 1)
    for point in disturbed.points:
        point.median_ms = times[point.batch_size]
    assert [point.median_ms for point in undisturbed(disturbed).points] == [
        5.95,
        5.95,
        8.8,
        17.2,
        32.9,
        83.0,
    ]
    state = State(
        configurations_of(BenchOptions(), ModelConfig(), 2, 0),
        [disturbed, curve(1, 2, threads=1)],
        cores=2,
    )
    first = Trial(
        configuration=Configuration().as_json(), points=[measured(None, OfferedLoad(), 346, 8)]
    )
    state = replace(state, trials=[first])
    assert (
        forecast(state, Configuration(batch_size=2)).expected
        < forecast(state, Configuration(workers=2, batch_size=32)).expected
    )


def test_few_threads_are_not_ruled_out_by_slow_curves_of_many() -> None:
    """A pool of busy threads can take cores that the server needs."""
    state = State(
        configurations_of(BenchOptions(batch_sizes="1"), ModelConfig(), 2, 0),
        [curve(5, 1)],
        slo=parse_slo("p99<10ms"),
        cores=2,
    )
    slow = Trial(
        configuration=Configuration().as_json(), points=[measured(state.slo, OfferedLoad(), 11, 88)]
    )
    state = replace(state, trials=[slow])
    assert "one request at a time breaks a bound" in str(
        exclusion_reason(state, Configuration(batch_size=8))
    )
    assert (
        exclusion_reason(state, Configuration(threads=1))
        is exclusion_reason(state, Configuration(workers=2))
        is None
    )
    assert "one request" in str(
        exclusion_reason(replace(state, threads=1), Configuration(workers=2))
    ), "the archive gives all the same"


def test_an_excluded_variant_is_never_measured_or_chosen() -> None:
    curves = [curve(20, 2), curve(10, 1, precision="fp16")]
    excluded = {Configuration(precision="fp16").variant: "its answers differ"}
    state = State([*space(), *space(precision="fp16")], curves, cores=4, excluded=excluded)

    def machine(configuration: Configuration, offered: OfferedLoad) -> tuple[float, float]:
        return modelled(curves[configuration.precision == "fp16"], 4)(configuration, offered)

    result = run(state, machine)
    assert {trial.as_configuration().precision for trial in result.trials} == {"as is"}
    assert any(reason == "its answers differ" for _, _, reason in unmeasured_configurations(result))


def test_a_trial_with_different_responses_wins_only_if_allowed() -> None:
    first = Trial(
        configuration=Configuration().as_json(), points=[measured(None, OfferedLoad(), 10, 5)]
    )
    second = Trial(
        configuration=Configuration(batch_size=8).as_json(),
        points=[measured(None, OfferedLoad(), 90, 5)],
    )
    second.accuracy = Accuracy(same=False, compared=10, different=3)
    assert ranking([first, second], {}) == [0]
    assert ranking([first, second]) == [1, 0]


def test_an_exhaustive_search_measures_everything() -> None:
    state = State(
        space((1, 2), (1, 4)), [curve(20, 2)], slo=parse_slo("p99<100ms"), cores=2, exhaustive=True
    )
    result = run(state, modelled(curve(20, 2), 2))
    assert {trial.as_configuration() for trial in result.trials} == set(state.configurations)


def test_without_a_curve_the_search_measures_all_and_ends() -> None:
    state = State(space((1, 2, 4), (1, 4, 8)), slo=parse_slo("p99<100ms"), cores=2)
    machine = modelled(curve(20, 2), 2)
    result = run(state, machine)
    assert winning_configuration(result)[0] >= 0.95 * optimum(state, machine)
    assert len(result.trials) == 9


def test_the_search_ends_early_if_no_limit_holds() -> None:
    result = run(
        State(space(), [curve(50, 5)], slo=parse_slo("p99<10ms"), cores=4),
        modelled(curve(50, 5), 4),
    )
    assert ranking(result.trials) == []
    assert points(result) <= 10


def test_nothing_is_measured_after_the_time_limit() -> None:
    state = State(
        space(),
        [curve(5, 3)],
        slo=parse_slo("p99<50ms"),
        cores=2,
        seconds_left=4.5,
        seconds_per_point=1,
    )
    result = run(state, modelled(curve(5, 3), 2))
    assert points(result) == 4
    assert any(reason == OUT_OF_TIME for _, _, reason in unmeasured_configurations(result))


def test_unmeasured_configurations_that_may_be_faster_are_counted() -> None:
    state = State(space(), [curve(5, 3)], slo=parse_slo("p99<50ms"), cores=2, seconds_per_point=1)
    machine = modelled(curve(5, 3), 2)
    # Only the baseline is measured.
    assert faster_unmeasured(run(replace(state, seconds_left=1.5), machine)) > 1
    assert faster_unmeasured(run(state, machine)) == 0
    unknown = State(space((1, 2), (1, 4)), cores=2, seconds_per_point=1)
    # Without predictions, all other configurations count as possibly faster.
    assert faster_unmeasured(run(replace(unknown, seconds_left=1.5), machine)) == 3
    assert faster_unmeasured(run(unknown, machine)) == 0


def test_only_the_given_loads_are_measured() -> None:
    result = run(
        State(space((1, 2), (1, 8)), [curve(5, 3)], cores=2, loads=(8, 16)),
        modelled(curve(5, 3), 2),
    )
    assert all(
        {point.offered.connections for point in trial.points} == {8, 16} for trial in result.trials
    )


def test_the_search_resumes_after_an_interruption() -> None:
    state = State(space(), [curve(5, 3)], slo=parse_slo("p99<50ms"), cores=2)
    machine = modelled(curve(5, 3), 2)
    halfway = replace(
        run(replace(state, seconds_left=5.5, seconds_per_point=1), machine), seconds_left=None
    )
    assert [trial.model_dump() for trial in run(halfway, machine).trials] == [
        trial.model_dump() for trial in run(state, machine).trials
    ]


def test_random_arrivals_of_an_earlier_run_are_not_part_of_its_ladder() -> None:
    state = State(
        space((1,), (8,)),
        [curve(5, 3)],
        slo=parse_slo("p99<500ms"),
        cores=2,
        seconds_left=2.5,
        seconds_per_point=1,
    )
    machine = modelled(curve(5, 3), 2)
    started_search = replace(run(state, machine), seconds_left=None)
    following = next_trial(started_search)
    assert following is not None
    trials = [
        trial.model_copy(update={"points": list(trial.points)}) for trial in started_search.trials
    ]
    trials[-1].points.append(
        measured(state.slo, OfferedLoad(mode="open", rate=3.0, arrivals="poisson"), 3, 700)
    )
    assert next_trial(replace(started_search, trials=trials)) == following


def test_predicted_configurations_of_an_earlier_run_may_be_measured() -> None:
    state = State(space((1, 2), (1, 8)), [curve(5, 3)], cores=2)
    unmeasured = [
        Trial(configuration=configuration.as_json(), state="predicted", reason=OUT_OF_TIME)
        for configuration in state.configurations
    ]
    assert next_trial(replace(state, trials=unmeasured)) == next_trial(state) is not None
    assert unmeasured_configurations(
        replace(state, trials=unmeasured)
    ) == unmeasured_configurations(state)


def test_an_open_loop_is_searched_by_rate() -> None:
    true_curve = curve(4, 2)

    def machine(configuration: Configuration, offered: OfferedLoad) -> tuple[float, float]:
        assert offered.rate is not None
        assert offered.arrivals == "poisson"
        prediction = predict(true_curve, configuration, offered, 0.5, 2)
        return min(offered.rate, prediction.throughput), min(prediction.p99_ms, 1e4) * 1.2

    state = State(
        space((1, 2), (1, 8)), [true_curve], slo=parse_slo("p99<60ms"), mode="open", cores=2
    )
    result = run(state, machine)
    rates = [float(rate) for rate in range(20, 600, 20)]
    best = max(
        rate
        for configuration in state.configurations
        for rate in rates
        if machine(configuration, OfferedLoad(mode="open", rate=rate, arrivals="poisson"))[1] < 60
    )
    assert winning_configuration(result)[0] >= 0.88 * best


def test_the_best_point_has_the_highest_throughput_within_the_limits() -> None:
    slo = parse_slo("p99<50ms")
    loads = [
        measured(slo, OfferedLoad(connections=connections), connections * 10, p99)
        for connections, p99 in [(1, 10), (4, 40), (8, 60)]
    ]
    assert best_point(loads) == 1
    assert best_point(loads[2:]) is None
    assert best_point([]) is None


@given(
    st.floats(1, 1000),
    st.floats(0.5, 200),
    st.integers(1, 2000),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 3.0]),
)
def test_a_ladder_ends_near_the_highest_load_within_the_limits(
    capacity: float, limit: float, start: int, integral: bool, power: float
) -> None:
    """Latency grows with the load by several laws; throughput grows up to the capacity."""

    def measure(level: float) -> Rung:
        latency_ratio = (level / limit) ** max(power, 0.5)
        return Rung(level, min(level, capacity), latency_ratio <= 1, latency_ratio)

    rungs: list[Rung] = []
    while (level := next_level(rungs, start=start, is_whole=integral, max_level=4096)) is not None:
        assert level not in [rung.level for rung in rungs]
        assert not integral or (level == int(level) and 1 <= level <= 4096)
        rungs.append(measure(level))
        assert len(rungs) <= 25
    most = min(capacity, limit, 4096)
    best = max((rung.throughput for rung in rungs if rung.holds), default=0.0)
    assert best >= (most / 1.2 - 1 if integral else most / 1.2)


def test_a_ladder_that_cannot_win_is_abandoned() -> None:
    assert (
        next_level(
            [Rung(8, 100, holds=False, latency_ratio=1.3)],
            start=8,
            is_whole=True,
            max_level=1000,
            throughput_to_beat=200,
        )
        is None
    )
    assert (
        next_level(
            [Rung(8, 300, holds=False, latency_ratio=1.3)],
            start=8,
            is_whole=True,
            max_level=1000,
            throughput_to_beat=200,
        )
        == 5
    )


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1..32", (1, 2, 4, 8, 16, 32)),
        ("4", (4,)),
        ("3..12", (3, 4, 8, 12)),
        ("1, 2,4", (1, 2, 4)),
        ("8,1..3", (1, 2, 3, 8)),
    ],
)
def test_ranges_expand_to_powers_of_two_and_their_ends(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text, "--workers") == numbers


@pytest.mark.parametrize(
    "text", ["", "0", "0..4", "4..1", "1..", "a", "1...4", "-1", "1.5", "5000", "1,,2"]
)
def test_invalid_ranges_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--workers"):
        parse_numbers(text, "--workers")
