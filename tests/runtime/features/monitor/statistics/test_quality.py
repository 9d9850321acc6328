"""The quality of answers from counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import precision_recall_fscore_support

from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.features.monitor.statistics.quality import (
    DAY_S,
    HOUR_S,
    ErrorSum,
    OutcomeCount,
    estimate,
    quality_of,
)

NOON = 20_000 * DAY_S + 12 * HOUR_S


def count_outcome(
    prediction: str, truth: str, answers: int = 1, *, period: float = NOON, confidence: float = -1
) -> OutcomeCount:
    decile = -1 if confidence < 0 else min(9, int(10 * confidence))
    return OutcomeCount(period, prediction, truth, decile, answers, max(0, confidence) * answers)


def test_without_a_known_truth_there_is_no_quality() -> None:
    assert quality_of([], []) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1))
def test_accuracy_precision_and_recall_are_those_of_scikit_learn(
    pairs: list[tuple[str, str]],
) -> None:
    quality = quality_of([count_outcome(*pair) for pair in pairs], [])
    assert quality is not None
    assert quality.accuracy is not None
    assert quality.accuracy.value == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    predictions, truths = zip(*pairs, strict=True)
    labels = sorted({*predictions, *truths})
    expected = precision_recall_fscore_support(
        truths, predictions, labels=labels, zero_division=float("nan")
    )
    precision, recall = (
        [next(getattr(c, name) for c in quality.classes if c.label == label) for label in labels]
        for name in ("precision", "recall")
    )
    for estimates, values in ((precision, expected[0]), (recall, expected[1])):
        assert [
            float("nan") if estimate.value is None else estimate.value for estimate in estimates
        ] == pytest.approx(list(values), nan_ok=True)
        assert all(
            estimate.low <= estimate.value <= estimate.high
            for estimate in estimates
            if estimate.count
        )


def test_only_the_100_most_frequent_classes_are_shown() -> None:
    outcomes = [count_outcome(str(label), str(label), 1000 - label) for label in range(130)]
    quality = quality_of(outcomes, [])
    assert quality is not None
    assert [entry.label for entry in quality.classes] == [str(label) for label in range(100)]
    assert quality.hidden_classes == 30


def test_the_calibration_error_is_the_weighted_distance_of_confidence_and_accuracy() -> None:
    quality = quality_of(
        [
            count_outcome("a", "a", 80, confidence=0.95),
            count_outcome("a", "b", 20, confidence=0.95),
            count_outcome("a", "a", 50, confidence=0.55),
            count_outcome("a", "b", 50, confidence=0.55),
            count_outcome("a", "b", 1000),  # It has no confidence.
        ],
        [],
    )
    assert quality is not None
    assert [(entry.confidence, entry.accuracy.value) for entry in quality.calibration] == [
        (pytest.approx(0.55), 0.5),
        (pytest.approx(0.95), 0.8),
    ]
    assert quality.calibration_error == pytest.approx((0.15 + 0.05) / 2)


def test_errors_of_numbers_have_the_interval_of_students_t() -> None:
    source = random.Random(3)
    errors = [source.expovariate(1) for _ in range(40)]
    sums = [ErrorSum(NOON, 1, error, error**2) for error in errors]
    quality = quality_of([], sums)
    assert quality is not None
    assert quality.accuracy is None
    assert quality.mean_error is not None
    expected = stats.ttest_1samp(errors, 0).confidence_interval(0.95)
    assert (quality.mean_error.low, quality.mean_error.high) == pytest.approx(tuple(expected))
    assert quality.root_mean_square_error == pytest.approx(
        (sum(error**2 for error in errors) / 40) ** 0.5
    )


def test_a_single_error_has_no_interval() -> None:
    single = estimate(MetricCounts(1, 2.0, 4.0))
    assert (single.value, single.low, single.high) == (2.0, None, None)
    assert estimate(MetricCounts()).value is None


@pytest.mark.parametrize(("days", "length"), [(7, HOUR_S), (8, DAY_S)])
def test_a_history_of_more_than_a_week_is_by_day(days: int, length: float) -> None:
    periods = [NOON, NOON + HOUR_S, NOON + days * DAY_S]
    outcomes = [count_outcome("a", "a", 3, period=period) for period in periods]
    quality = quality_of([*outcomes, count_outcome("a", "b", 1, period=NOON)], [])
    assert quality is not None
    ends = sorted({(period // length + 1) * length for period in periods})
    assert [point.at for point in quality.history] == ends
    assert quality.history[0].value == (6 / 7 if length == DAY_S else 3 / 4)
    errors = quality_of([], [ErrorSum(period, 2, 3.0, 5.0) for period in periods])
    assert errors is not None
    assert [(point.at, point.value) for point in errors.history] == [(end, 1.5) for end in ends]
