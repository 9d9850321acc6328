"""Upper limits of losses with 95 % confidence."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.optimize.guard.intervals import (
    mean_bound,
    net_bound,
    resampled_bound,
    rows_for,
    share_bound,
)

COUNTS = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2000)).map(
    lambda counts: (counts[0], counts[1], sum(counts) + 1)
)


def test_the_limit_of_a_fraction_matches_published_values() -> None:
    assert share_bound(0, 598) <= 0.005 < share_bound(0, 597)
    assert rows_for(0.005) == 598
    assert rows_for(0.1) == 29
    # The value is from Clopper and Pearson's table.
    assert share_bound(1, 10) == pytest.approx(0.3942, abs=5e-5)
    assert share_bound(10, 100) == pytest.approx(0.1637, abs=5e-5)
    assert share_bound(10, 10) == 1.0


@pytest.mark.parametrize(
    ("rows", "gains", "published"),
    [(50, 1, 0.032), (30, 1, 0.052), (80, 1, 0.021), (30, 2, 0.022), (80, 2, 0.009)],
)
def test_the_limit_of_a_net_fraction_matches_tangos_table(
    rows: int, gains: int, published: float
) -> None:
    assert net_bound(0, gains, rows) == pytest.approx(published, abs=5e-4)


def test_the_limit_of_a_net_fraction_matches_the_r_package_propcis() -> None:
    assert net_bound(28, 25, 618) == pytest.approx(0.0247, abs=5e-5)
    assert net_bound(25, 28, 618) == pytest.approx(0.0148, abs=5e-5)


@given(COUNTS)
def test_the_limit_is_never_below_the_loss(counts: tuple[int, int, int]) -> None:
    losses, gains, rows = counts
    assert (losses - gains) / rows <= net_bound(losses, gains, rows) <= 1
    assert losses / rows < share_bound(losses, rows) <= 1


@given(COUNTS)
def test_agreeing_rows_never_raise_the_limit(counts: tuple[int, int, int]) -> None:
    losses, gains, rows = counts
    gains = min(gains, losses)
    assert net_bound(losses, gains, rows + 1) <= net_bound(losses, gains, rows) + 1e-9


@given(COUNTS)
def test_a_lost_row_raises_the_limit_and_a_gained_one_does_not(
    counts: tuple[int, int, int],
) -> None:
    losses, gains, rows = counts
    assert net_bound(losses + 1, gains, rows + 1) >= net_bound(losses, gains, rows + 1)
    assert net_bound(losses, gains + 1, rows + 1) <= net_bound(losses, gains, rows + 1) + 1e-9


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30))
def test_the_limit_of_a_mean_is_not_below_the_mean(losses: list[float]) -> None:
    assert mean_bound(losses) >= fmean(losses) - 1e-12


def share_of_samples(is_covered: Callable[[random.Random], bool], samples: int) -> float:
    chance = random.Random(20)
    return sum(is_covered(chance) for _ in range(samples)) / samples


@pytest.mark.parametrize(
    ("lost", "gained", "rows"),
    [(0.005, 0.0, 600), (0.02, 0.0, 100), (0.02, 0.01, 300), (0.06, 0.06, 100), (0.1, 0.02, 40)],
)
def test_the_limit_for_rows_holds_in_95_of_100_samples(
    lost: float, gained: float, rows: int
) -> None:
    def is_covered(chance: random.Random) -> bool:
        draws = [chance.random() for _ in range(rows)]
        losses = sum(draw < lost for draw in draws)
        gains = sum(lost <= draw < lost + gained for draw in draws)
        return net_bound(losses, gains, rows) >= lost - gained

    assert share_of_samples(is_covered, 600) >= 0.93


@pytest.mark.parametrize("rows", [29, 100])
def test_the_limit_of_a_skewed_mean_holds_in_nearly_95_of_100_samples(rows: int) -> None:
    def is_covered(chance: random.Random) -> bool:
        # The loss 1 - cosine has this distribution for noise in one direction.
        return mean_bound([chance.gauss(0, 1) ** 2 for _ in range(rows)]) >= 1

    assert share_of_samples(is_covered, 300) >= 0.91


def test_a_bootstrapped_limit_of_a_mean_is_near_the_exact_one() -> None:
    chance = random.Random(1)
    rows = [chance.gauss(1, 1) for _ in range(200)]

    def mean(times: Sequence[int]) -> float:
        return sum(map(operator.mul, times, rows)) / len(rows)

    value, bound = resampled_bound(mean, len(rows), seed=3)
    assert value == pytest.approx(fmean(rows))
    assert bound - value == pytest.approx(mean_bound(rows) - value, rel=0.15)
    assert resampled_bound(lambda times: 0.25, 10, seed=3) == (0.25, 0.25)


def test_a_bootstrap_is_deterministic_and_respects_the_time_limit() -> None:
    calls = []

    def loss(times: object) -> float:
        calls.append(times)
        return len(calls) % 7

    now = iter(range(0, 10_000, 3))
    resampled_bound(loss, 10, seed=0, clock=lambda: next(now))
    assert 40 <= len(calls) <= 50

    def sharpest(times: list[int]) -> float:
        return math.sqrt(times[0])

    assert resampled_bound(sharpest, 10, seed=5) == resampled_bound(sharpest, 10, seed=5)  # type: ignore[arg-type]
