"""A latency target, compared with the best of all fixed settings."""

from __future__ import annotations

import os
from collections import defaultdict

import numpy as np
import pytest

from tests.runtime.core.slo.simulation import Case, Outcome, simulate_fixed, simulate_target

KINDS = ("constant", "linear", "affine", "concave", "bimodal", "drifting", "heavy-tailed")
LOADS = (0.5, 1.0, 1.5, 2.0)
QUANTILE = 0.99
CURVES = int(os.environ.get("TSX_SLO_CURVES", "28"))
THOROUGH = CURVES >= 280  # all fixed settings, longer runs, and each load by itself
# Batch sizes as shares of the largest batch that keeps the bound.
SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0) if THOROUGH else (0.25, 0.5, 0.75, 1.0)
# Queue lengths as shares of the places of all workers.
QUEUES = (0.5, 0.75, 1, 1.5, 2.5) if THOROUGH else (0.5, 1, 2.5)
# Delays as shares of the bound.
DELAYS = (0.0, 0.1, 0.25) if THOROUGH else (0.0,)
# The share of a run in which the curve is learned.
WARM = 0.25


def draw_cases(count: int) -> list[Case]:
    chance = np.random.default_rng(22)
    result = []
    for number in range(count):
        first = float(chance.choice([0.005, 0.01, 0.02]))
        kind = KINDS[number % len(KINDS)]
        further = first * float(chance.uniform(0.02, 0.5))
        further = {
            "constant": 0.0,
            "linear": first,
            "concave": float(chance.uniform(0.3, 0.9)),
        }.get(kind, further)
        bound = first * float(chance.uniform(4, 12))
        limit = 16 if kind == "constant" else 1024
        result.append(
            Case(
                kind,
                first,
                further,
                limit,
                bound,
                int(chance.choice([1, 2, 4])),
                LOADS[number // len(KINDS) % 4],
                number,
            )
        )
    return result


def draw_arrivals(case: Case) -> list[float]:
    """Draw the arrivals of some hundred batches, in which the tail is seen."""
    most, batches = (40000, 500) if THOROUGH else (8000, 200)
    return case.arrivals(min(most, max(6000, batches * case.workers * min(case.largest, 200))))


def find_best_setting(case: Case, arrivals: list[float], warm: float) -> Outcome:
    """Return the fixed setting with the most goodput, if possible one that keeps the target."""
    sizes = sorted({max(1, round(case.largest * share)) for share in SHARES})
    outcomes = [
        simulate_fixed(case, arrivals, size, queue, delay * case.bound, warm)
        for size in sizes
        for queue in sorted({max(1, round(size * share * case.workers)) for share in QUEUES})
        for delay in DELAYS
    ]
    return max(
        [outcome for outcome in outcomes if outcome.attainment >= QUANTILE] or outcomes,
        key=lambda outcome: outcome.goodput,
    )


def test_accepted_requests_keep_the_target_and_goodput_is_that_of_the_best_fixed_setting() -> None:
    ratios: dict[tuple[str, float], list[float]] = defaultdict(list)
    attainments: dict[tuple[str, float], list[float]] = defaultdict(list)
    for case in draw_cases(CURVES):
        arrivals = draw_arrivals(case)
        warm = arrivals[-1] * WARM
        outcome, best = (
            simulate_target(case, arrivals, QUANTILE, warm),
            find_best_setting(case, arrivals, warm),
        )
        key = case.kind, case.load if THOROUGH else 0.0
        ratios[key].append(outcome.goodput / best.goodput)
        attainments[key].append(outcome.attainment)
    for key in sorted(ratios):
        goodput, share = ratios[key], attainments[key]
        assert np.mean(share) >= QUANTILE - (0.002 if THOROUGH else 0.005), key
        assert np.median(goodput) >= (0.95 if THOROUGH else 0.94), key


@pytest.mark.parametrize("spread", ["lognormal", "few large ones", "none", "says nothing"])
def test_costs_that_explain_the_times_make_fewer_requests_late(
    spread,
) -> None:
    gains, misses = [], []
    for case in [
        case
        for case in draw_cases(4 * len(KINDS))
        if case.kind in ("linear", "affine") and case.load > 1
    ]:
        chance = np.random.default_rng(case.seed)
        arrivals = case.arrivals(4000)
        drawn = (
            chance.lognormal(0, 1, 4000)
            if spread in ("lognormal", "says nothing")
            else np.where(chance.random(4000) < 0.1, 20.0, 1.0)
        )
        costs = [1.0] * 4000 if spread == "none" else (drawn / drawn.mean()).tolist()
        warm, matters = arrivals[-1] * WARM, spread != "says nothing"
        plain, informed = (
            simulate_target(case, arrivals, QUANTILE, warm, costs, known, matters)
            for known in (False, True)
        )
        if spread in ("none", "says nothing"):
            assert informed == plain
        else:
            gains.append(informed.goodput / plain.goodput)
            misses.append((1 - plain.attainment, 1 - informed.attainment))
            assert gains[-1] > 1
            assert misses[-1][1] <= max(misses[-1][0], 1 - QUANTILE)
    if gains:
        assert np.mean(gains) > 1.2
        before, after = np.mean(misses, axis=0)
        assert after < before
