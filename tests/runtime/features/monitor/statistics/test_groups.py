"""The figures of groups, and the differences between them."""

from __future__ import annotations

import math

import numpy
import pytest
from scipy import stats

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.significance import wilson_interval
from tsx_runtime.features.monitor.report import AttributeGroups
from tsx_runtime.features.monitor.statistics.groups import GroupCount, groups_of

CONFIG = MonitorConfig(groups=("sex",), positive="yes")


def count_group(
    group: str, answers: dict[tuple[str | None, str | None], int], confidence: float = 0.8
) -> list[GroupCount]:
    """Return the counts of a group by pairs of prediction and truth."""
    return [
        GroupCount("sex", group, prediction, truth, number, confidence * number)
        for (prediction, truth), number in answers.items()
    ]


def report(counts: list[GroupCount], config: MonitorConfig = CONFIG) -> AttributeGroups:
    (attribute,) = groups_of(counts, {}, config)
    return attribute


WOMEN = {("yes", "yes"): 30, ("no", "yes"): 20, ("no", "no"): 40, ("yes", "no"): 10}
MEN = {("yes", "yes"): 90, ("no", "yes"): 10, ("no", "no"): 70, ("yes", "no"): 30}


def test_the_figures_of_a_fairness_review_are_computed() -> None:
    attribute = report(count_group("f", WOMEN) + count_group("m", MEN))
    men, women = attribute.groups
    assert (men.group, men.count, women.group, women.count) == ("m", 200, "f", 100)
    assert women.selection_rate is not None
    assert women.error is not None
    assert women.false_positives is not None
    assert women.false_negatives is not None
    assert women.selection_rate.value == 0.4
    assert women.error.value == 0.3
    assert women.false_positives.value == 0.2
    assert women.false_negatives.value == 0.4
    assert women.confidence == 0.8
    assert [
        (entry.name, entry.difference.value, entry.groups) for entry in attribute.differences
    ] == [
        ("demographic_parity", pytest.approx(0.2), ("m", "f")),
        ("equal_opportunity", pytest.approx(0.3), ("m", "f")),
        ("equalized_odds", pytest.approx(0.3), ("m", "f")),
        ("error", pytest.approx(0.1), ("f", "m")),
    ]


def test_a_difference_of_two_groups_has_newcombes_interval() -> None:
    # Newcombe 1998, table II, method 10: 56/70 against 48/80.
    attribute = report(
        count_group("a", {("yes", None): 56, ("no", None): 14})
        + count_group("b", {("yes", None): 48, ("no", None): 32})
    )
    (parity,) = attribute.differences
    assert (parity.difference.low, parity.difference.high) == (
        pytest.approx(0.0524, abs=5e-5),
        pytest.approx(0.3339, abs=5e-5),
    )


def test_chance_differences_of_many_groups_are_rarely_significant() -> None:
    source = numpy.random.default_rng(1)
    significant = 0
    for _ in range(200):
        counts = []
        for group, hits in enumerate(source.binomial(300, 0.3, size=15)):
            counts += count_group(str(group), {("yes", None): int(hits), ("no", None): 300 - hits})
        (parity,) = report(counts).differences
        significant += (parity.difference.low or 0) > 0
    assert significant <= 18  # 5 % of 200, and the chance of this test


def test_small_groups_are_hidden_and_not_compared() -> None:
    small = count_group("x", {("yes", "yes"): 19})
    attribute = report(count_group("f", WOMEN) + count_group("m", MEN) + small)
    assert [group.group for group in attribute.groups] == ["m", "f"]
    assert attribute.hidden == 1
    assert all(set(entry.groups) == {"m", "f"} for entry in attribute.differences)


def test_a_hidden_group_cannot_be_computed_from_the_totals() -> None:
    reports = set()
    for hits in range(5):
        shown = count_group("f", {("yes", "yes"): 997 - hits, ("no", "yes"): 1003 + hits})
        hidden = count_group("x", {("yes", "yes"): hits, ("no", "yes"): 5 - hits})
        attribute = report(shown + hidden)
        assert attribute.groups[0].count == 2000
        reports.add(attribute.model_dump_json())
    assert len(reports) == 1  # The totals are the same, and so are the figures.
    (exact,) = report(count_group("f", {("yes", "yes"): 997, ("no", "yes"): 1004})).groups
    assert exact.count == 2001


def test_a_figure_of_few_answers_is_not_shown() -> None:
    attribute = report(count_group("f", {("yes", None): 100, ("yes", "yes"): 19}))
    (group,) = attribute.groups
    assert group.error is None
    assert group.false_negatives is None
    assert group.selection_rate is not None
    assert group.selection_rate.count == 119


def test_without_a_favourable_class_only_two_classes_have_rates() -> None:
    config = MonitorConfig(groups=("sex",))
    two = report(count_group("f", WOMEN) + count_group("m", MEN), config)
    assert two.positive == "yes"  # the second one in alphabetical order
    three = report(count_group("f", WOMEN | {("maybe", "no"): 5}) + count_group("m", MEN), config)
    assert three.positive is None
    assert three.groups[0].selection_rate is None
    assert [entry.name for entry in three.differences] == ["error"]


def test_errors_of_numbers_are_compared() -> None:
    source = numpy.random.default_rng(2)
    samples = {"f": source.exponential(2, 200), "m": source.exponential(1, 300)}
    errors = {
        ("sex", group): MetricCounts(len(values), values.sum(), (values**2).sum())
        for group, values in samples.items()
    }
    errors["sex", "x"] = MetricCounts(3, 3.0, 3.0)
    (attribute,) = groups_of([], errors, CONFIG)
    assert [group.group for group in attribute.groups] == ["m", "f"]
    assert attribute.hidden == 1
    (difference,) = attribute.differences
    assert (difference.name, difference.groups) == ("error", ("f", "m"))
    welch = stats.ttest_ind(samples["f"], samples["m"], equal_var=False).confidence_interval()
    assert (difference.difference.low, difference.difference.high) == (
        pytest.approx(welch.low, abs=0.01),
        pytest.approx(welch.high, abs=0.01),
    )


def test_a_share_has_wilsons_interval() -> None:
    (group,) = report(count_group("f", {("yes", None): 40, ("no", None): 60})).groups
    assert group.selection_rate is not None
    assert (group.selection_rate.low, group.selection_rate.high) == wilson_interval(40, 100)
    assert math.isclose(group.selection_rate.low or 0, 0.3094, abs_tol=1e-4)
