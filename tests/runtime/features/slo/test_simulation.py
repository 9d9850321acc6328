"""A latency target, compared with the best of all fixed settings."""

from __future__ import annotations

import os
from collections import defaultdict

import numpy as np
import pytest

from tests.runtime.features.slo.simulation import Case, Outcome, simulate_fixed, simulate_target

KINDS = ("constant", "linear", "affine", "concave", "bimodal", "drifting", "heavy-tailed")
LOADS = (0.5, 1.0, 1.5, 2.0)
QUANTILE = 0.99
CURVES = int(os.environ.get("TSX_SLO_CURVES", "28"))
# Whether to test all fixed settings, longer runs, and each load separately.
THOROUGH = CURVES >= 280
# Batch sizes as fractions of the largest batch within the latency bound.
SIZE_FRACTIONS = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0) if THOROUGH else (0.25, 0.5, 0.75, 1.0)
# Queue lengths as fractions of the batch slots of all workers.
QUEUES = (0.5, 0.75, 1, 1.5, 2.5) if THOROUGH else (0.5, 1, 2.5)
# Delays as fractions of the latency bound.
DELAYS = (0.0, 0.1, 0.25) if THOROUGH else (0.0,)
# The fraction of a run in which the curve is learned.
WARMUP_FRACTION = 0.25


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
    """Draw the arrivals of some hundred batches, enough to observe the tail."""
    max_arrivals, batches = (40000, 500) if THOROUGH else (8000, 200)
    return case.arrivals(
        min(max_arrivals, max(6000, batches * case.workers * min(case.largest, 200)))
    )


def find_best_setting(case: Case, arrivals: list[float], warmup_s: float) -> Outcome:
    """Return the fixed setting with the most goodput, if possible one that keeps the target."""
    sizes = sorted({max(1, round(case.largest * fraction)) for fraction in SIZE_FRACTIONS})
    outcomes = [
        simulate_fixed(case, arrivals, size, queue, delay * case.bound, warmup_s)
        for size in sizes
        for queue in sorted({max(1, round(size * fraction * case.workers)) for fraction in QUEUES})
        for delay in DELAYS
    ]
    return max(
        [outcome for outcome in outcomes if outcome.attainment >= QUANTILE] or outcomes,
        key=lambda outcome: outcome.goodput,
    )


def test_the_target_is_kept_with_the_goodput_of_the_best_fixed_setting() -> None:
    ratios: dict[tuple[str, float], list[float]] = defaultdict(list)
    attainments: dict[tuple[str, float], list[float]] = defaultdict(list)
    for case in draw_cases(CURVES):
        arrivals = draw_arrivals(case)
        warmup_s = arrivals[-1] * WARMUP_FRACTION
        outcome, best_outcome = (
            simulate_target(case, arrivals, QUANTILE, warmup_s),
            find_best_setting(case, arrivals, warmup_s),
        )
        key = case.kind, case.load if THOROUGH else 0.0
        ratios[key].append(outcome.goodput / best_outcome.goodput)
        attainments[key].append(outcome.attainment)
    for key in sorted(ratios):
        goodput, attainment = ratios[key], attainments[key]
        assert np.mean(attainment) >= QUANTILE - (0.002 if THOROUGH else 0.005), key
        assert np.median(goodput) >= (0.95 if THOROUGH else 0.94), key


@pytest.mark.parametrize(
    "cost_distribution", ["lognormal", "few large ones", "none", "says nothing"]
)
def test_informative_costs_reduce_late_requests(cost_distribution) -> None:
    gains, late_fractions = [], []
    for case in [
        case
        for case in draw_cases(4 * len(KINDS))
        if case.kind in ("linear", "affine") and case.load > 1
    ]:
        chance = np.random.default_rng(case.seed)
        arrivals = case.arrivals(4000)
        random_costs = (
            chance.lognormal(0, 1, 4000)
            if cost_distribution in ("lognormal", "says nothing")
            else np.where(chance.random(4000) < 0.1, 20.0, 1.0)
        )
        costs = (
            [1.0] * 4000
            if cost_distribution == "none"
            else (random_costs / random_costs.mean()).tolist()
        )
        warmup_s, costs_matter = arrivals[-1] * WARMUP_FRACTION, cost_distribution != "says nothing"
        plain_outcome, informed_outcome = (
            simulate_target(case, arrivals, QUANTILE, warmup_s, costs, costs_known, costs_matter)
            for costs_known in (False, True)
        )
        if cost_distribution in ("none", "says nothing"):
            assert informed_outcome == plain_outcome
        else:
            gains.append(informed_outcome.goodput / plain_outcome.goodput)
            late_fractions.append((1 - plain_outcome.attainment, 1 - informed_outcome.attainment))
            assert gains[-1] > 1
            assert late_fractions[-1][1] <= max(late_fractions[-1][0], 1 - QUANTILE)
    if gains:
        assert np.mean(gains) > 1.2
        plain_late, informed_late = np.mean(late_fractions, axis=0)
        assert informed_late < plain_late
