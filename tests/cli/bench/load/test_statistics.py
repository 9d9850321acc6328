"""Statistics of measured rounds: warm-up, intervals, percentiles and differences."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsx_cli.bench.load.results import Figure, Latency, Round
from tsx_cli.bench.load.statistics import (
    difference_of,
    interval,
    is_precise,
    latency,
    machine_noise,
    percentile,
    percentile_figure,
    real_difference,
    t_quantile,
    variation,
    warm_up_end,
)

# The examples are fixed, since rare random ones are too noisy to find the end of the warm-up.
DETERMINISTIC = settings(derandomize=True)


def noisy_counts(levels: list[float], seed: int, spread: float = 0.05) -> list[int]:
    random_source = random.Random(seed)
    return [max(0, round(level * (1 + random_source.gauss(0, spread)))) for level in levels]


def one_round(latencies: list[float], throughput: float = 100.0) -> Round:
    counts: dict[float, int] = {}
    for value in latencies:
        end = float(f"{value:.2g}")
        counts[end] = counts.get(end, 0) + 1
    mean = sum(latencies) / len(latencies)
    latency_figures = Latency(
        mean_ms=mean, p99_ms=sorted(latencies)[int(0.99 * len(latencies))], max_ms=max(latencies)
    )
    count = len(latencies)
    return Round(
        seconds=1,
        sent=count,
        ok=count,
        throughput=throughput,
        latency=latency_figures,
        histogram=sorted(counts.items()),
    )


def round_at(throughput: float) -> Round:
    return Round(seconds=1, sent=1, ok=1, throughput=throughput, latency=Latency())


@DETERMINISTIC
@given(
    st.integers(0, 2**32),
    st.integers(5, 120),
    st.sampled_from([0.0, 0.3, 0.7, 1.4]),
    st.sampled_from([30, 100, 5000]),
)
def test_the_warm_up_ends_at_a_step_of_the_rate(
    seed: int, steps: int, fraction: float, level: int
) -> None:
    slots = noisy_counts([level * fraction] * steps + [float(level)] * (300 - steps), seed)
    assert steps - 3 <= warm_up_end(slots) <= steps + 12


@DETERMINISTIC
@given(st.integers(0, 2**32), st.integers(20, 120))
def test_most_of_a_ramp_is_warm_up(seed: int, length: int) -> None:
    slots = noisy_counts(
        [100 * (position + 1) / length for position in range(length)] + [100.0] * (300 - length),
        seed,
    )
    assert 0.7 * length <= warm_up_end(slots) <= length + 15


@DETERMINISTIC
@given(st.integers(0, 2**32), st.sampled_from([0.02, 0.1, 0.3]), st.integers(20, 600))
def test_a_constant_rate_has_almost_no_warm_up(seed: int, spread: float, length: int) -> None:
    slots = noisy_counts([200.0] * length, seed, spread)
    end = warm_up_end(slots)
    assert end <= length // 2
    steady = slots[end:]
    assert sum(steady) / len(steady) == pytest.approx(200, rel=6 * spread / math.sqrt(len(steady)))


@DETERMINISTIC
@given(st.integers(0, 2**32), st.integers(60, 140), st.integers(5, 20))
def test_a_stall_in_the_middle_is_not_warm_up(seed: int, start: int, length: int) -> None:
    assert (
        warm_up_end(
            noisy_counts(
                [100.0] * start + [0.0] * length + [100.0] * (300 - start - length), seed, 0.02
            )
        )
        <= 15
    )


def test_a_compilation_at_the_start_is_warm_up() -> None:
    assert 12 <= warm_up_end(noisy_counts([100.0] * 2 + [0.0] * 10 + [100.0] * 188, 1)) <= 20


@pytest.mark.parametrize("slots", [[], [5], [0] * 100, [1, 0, 0, 2], [0.0] * 95 + [50.0] * 5])
def test_too_few_responses_give_no_warm_up(slots: list[float]) -> None:
    assert warm_up_end(slots) == 0


@pytest.mark.parametrize("rate", [0.3, 1, 4])
def test_slots_with_few_responses_are_merged(rate: float) -> None:
    random_source = random.Random(3)
    slots = [sum(random_source.random() < rate / 8 for _ in range(8)) for _ in range(600)]
    assert warm_up_end([0] * 100 + slots) >= 60
    assert warm_up_end(slots) <= 120


@pytest.mark.parametrize(
    ("degrees_of_freedom", "confidence", "value"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (3, 0.9, 2.3534),
        (9, 0.99, 3.2498),
        (30, 0.95, 2.0423),
        (500, 0.95, 1.96),
    ],
)
def test_students_t_matches_the_published_table(
    degrees_of_freedom: int, confidence: float, value: float
) -> None:
    assert t_quantile(degrees_of_freedom, confidence) == pytest.approx(value, rel=1e-4)


def test_an_interval_covers_the_true_value_at_its_confidence() -> None:
    random_source = random.Random(1)
    covered_count = 0
    for _ in range(1000):
        figure = interval([random_source.gauss(100, 10) for _ in range(4)])
        covered_count += figure.low <= 100 <= figure.high
    assert 920 <= covered_count <= 980


def test_one_round_has_no_interval_and_is_not_precise() -> None:
    figure = interval([5.0])
    assert (figure.value, figure.low, figure.high) == (5, 5, 5)
    assert not is_precise([round_at(5.0)], 0.5)
    assert not is_precise([round_at(5.0)] * 2, 0.5)
    assert is_precise([round_at(5.0)] * 3, 0.05)


@pytest.mark.slow
def test_the_interval_of_a_percentile_covers_the_true_value() -> None:
    """Latencies are exponential; rounds differ by a few percent, as on a real machine."""
    random_source = random.Random(7)
    covered_count = 0
    for _ in range(60):
        rounds = []
        for _ in range(4):
            mean = 10 * random_source.gauss(1, 0.03)
            rounds.append(one_round([random_source.expovariate(1 / mean) for _ in range(800)]))
        figure = percentile_figure(rounds)
        covered_count += (
            figure.low <= 10 * math.log(100) * 1.02 and figure.high >= 10 * math.log(100) * 0.98
        )
    assert covered_count >= 50


def test_the_percentile_of_one_round_has_no_interval() -> None:
    """Responses of one round depend on each other, since they pass through one queue.

    An interval for independent values contained the true value of an M/D/1 queue in a fifth of
    the rounds.
    """
    figure = percentile_figure([one_round([float(value) for value in range(1, 201)])])
    assert figure.low == figure.value == figure.high > 190


def test_figures_without_histograms_are_averaged_over_rounds() -> None:
    rounds = [
        Round(seconds=1, sent=1, ok=1, throughput=5, latency=Latency(p99_ms=value, mean_ms=1))
        for value in (10.0, 12.0)
    ]
    assert percentile_figure(rounds, "p99_ms").value == 11
    assert percentile_figure(rounds, "mean_ms").value == 1
    assert latency(rounds[:1]) == rounds[0].latency


@given(st.lists(st.lists(st.floats(1, 500), min_size=1, max_size=50), min_size=1, max_size=4))
def test_combined_percentiles_are_in_ascending_order(rounds: list[list[float]]) -> None:
    combined = latency([one_round(latencies) for latencies in rounds])
    assert (
        combined.p50_ms
        <= combined.p90_ms
        <= combined.p95_ms
        <= combined.p99_ms
        <= combined.p999_ms
        <= combined.max_ms
    )
    all_latencies = [value for latencies in rounds for value in latencies]
    assert combined.mean_ms == pytest.approx(sum(all_latencies) / len(all_latencies))


@given(st.lists(st.integers(1, 9), min_size=1), st.floats(0, 1))
def test_a_percentile_covers_its_fraction_of_the_values(values: list[int], fraction: float) -> None:
    value = percentile(
        [(float(number), values.count(number)) for number in sorted(set(values))], fraction
    )
    assert sum(number <= value for number in values) >= fraction * len(values) - 1e-6
    assert value in values


def test_paired_rounds_show_a_difference_despite_drift() -> None:
    drift = [100.0, 140.0, 90.0, 120.0, 70.0]
    first, second = (
        drift,
        [value * gain for value, gain in zip(drift, [1.04, 1.06, 1.05, 1.05, 1.045], strict=True)],
    )
    difference = real_difference(first, second)
    assert difference.real
    assert difference.low < 1.05 < difference.high
    assert difference.ratio == pytest.approx(1.049, abs=0.001)
    assert not difference_of(interval(first), interval(second)).real


def test_equal_configurations_rarely_differ() -> None:
    random_source = random.Random(5)
    false_count = sum(
        real_difference(
            [random_source.gauss(100, 3) for _ in range(4)],
            [random_source.gauss(100, 3) for _ in range(4)],
        ).real
        for _ in range(500)
    )
    assert false_count < 45


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=1, max_size=8))
def test_swapping_both_sides_inverts_the_difference(pairs: list[tuple[float, float]]) -> None:
    first, second = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    forward, backward = real_difference(first, second), real_difference(second, first)
    assert forward.ratio * backward.ratio == pytest.approx(1)
    assert forward.real == backward.real
    assert forward.low <= forward.ratio <= forward.high


@pytest.mark.parametrize(
    ("first", "second"),
    [([1.0], [2.0]), ([0.0, 0.0], [5.0, 5.0]), ([5.0, 5.0], [0.0, 0.0]), ([0.0], [0.0])],
)
def test_one_pair_proves_no_difference(first: list[float], second: list[float]) -> None:
    assert not real_difference(first, second).real


def test_different_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 1"):
        real_difference([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("first", "second", "real"),
    [
        ((100, 98, 102), (110, 108, 112), True),
        ((100, 90, 110), (110, 100, 120), False),
        ((100, 100, 100), (150, 150, 150), False),
    ],
)
def test_separate_figures_differ_if_their_intervals_do_not_overlap(
    first: tuple[float, float, float], second: tuple[float, float, float], real: bool
) -> None:
    first_figure, second_figure = (
        Figure(value=value, low=low, high=high) for value, low, high in (first, second)
    )
    assert difference_of(first_figure, second_figure).real == real


@pytest.mark.slow
def test_the_noise_of_a_machine_is_a_fraction() -> None:
    assert machine_noise() >= 0
    assert variation([10.0, 10.0]) == 0
    assert variation([5.0]) == 0
    assert variation([9.0, 11.0]) == pytest.approx(0.1414, abs=1e-3)
