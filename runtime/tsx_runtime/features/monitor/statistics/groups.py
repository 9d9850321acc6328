"""The figures of groups of people or requests, and the differences between groups.

The interval of a difference combines the intervals of both figures by their squares (Newcombe:
Interval estimation for the difference between independent proportions, 1998, method 10; Zou and
Donner: Construction of confidence limits about effect measures, 2008, for means). The largest of
many differences is large by chance; its interval is widened by Bonferroni's method for all pairs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.significance import Z_95
from tsx_runtime.features.monitor.report import (
    AttributeGroups,
    DifferenceName,
    Estimate,
    GroupDifference,
    GroupFigures,
)
from tsx_runtime.features.monitor.statistics.quality import estimate_mean, estimate_share

MAX_GROUPS = 100  # groups of an attribute that are shown, the largest first


class GroupCount(NamedTuple):
    """The number of answers to requests of a group with the same class and truth."""

    attribute: str
    group: str
    prediction: str | None  # None if the answer is a number
    truth: str | None  # None if it is not known yet, or a number
    answers: int
    confidence: float  # sum of the confidences


def groups_of(
    counts: Iterable[GroupCount],
    errors: Mapping[tuple[str, str], MetricCounts],
    config: MonitorConfig,
) -> list[AttributeGroups]:
    """Return the figures of all groups with at least `min_group` answers, the largest first.

    A figure of fewer than `min_group` answers is not shown either. If a group of an attribute is
    hidden, the shares of the others are rounded to percents and their counts down to multiples of
    `min_group`, since the hidden group could be computed from them and the version's totals.

    Args:
        counts: The counts of all attributes.
        errors: The absolute errors of numbers by attribute and group.
        config: It gives the favourable class. Without one, a model with two classes has the second
            one in alphabetical order, and a model with more classes has none.
    """
    members = defaultdict[str, dict[str, list[GroupCount]]](lambda: defaultdict(list))
    labels = set[str]()
    for count in counts:
        members[count.attribute][count.group].append(count)
        labels.update(label for label in (count.prediction, count.truth) if label is not None)
    for attribute, group in errors:
        members[attribute].setdefault(group, [])
    positive = config.positive or (max(labels) if len(labels) == 2 else None)
    return [
        _attribute(attribute, groups, errors, positive, config.min_group)
        for attribute, groups in sorted(members.items())
    ]


def _attribute(
    attribute: str,
    members: Mapping[str, Sequence[GroupCount]],
    errors: Mapping[tuple[str, str], MetricCounts],
    positive: str | None,
    min_group: int,
) -> AttributeGroups:
    sizes = {
        group: sum(count.answers for count in counts) or errors[attribute, group].count
        for group, counts in members.items()
    }
    largest = sorted(sizes, key=lambda group: (-sizes[group], group))[:MAX_GROUPS]
    shown = [group for group in largest if sizes[group] >= min_group]
    hidden = len(sizes) - len(shown)
    unit = min_group if hidden else 1
    figures = []
    for group in shown:
        share = partial(_share, _count_cells(members[group], positive), min_group, hidden > 0)
        error = share("wrong", "known")
        group_errors = errors.get((attribute, group), MetricCounts())
        if error is None and group_errors.count >= min_group:
            error = estimate_mean(group_errors)
            error.count = error.count // unit * unit
        confidence = sum(count.confidence for count in members[group]) / sizes[group]
        figures.append(
            GroupFigures(
                group=group,
                count=sizes[group] // unit * unit,
                selection_rate=share("selected", "classified") if positive else None,
                error=error,
                false_positives=share("false positives", "negatives") if positive else None,
                false_negatives=share("false negatives", "positives") if positive else None,
                confidence=round(confidence, 2) if confidence else None,
            )
        )
    return AttributeGroups(
        attribute=attribute,
        positive=positive,
        groups=figures,
        hidden=hidden,
        differences=_differences(figures),
    )


def _count_cells(counts: Iterable[GroupCount], positive: str | None) -> Counter[str]:
    """Count a group's answers that are classes by the cases of the figures."""
    cells = Counter[str]()
    for count in counts:
        if count.prediction is None:
            continue
        is_selected, is_positive = count.prediction == positive, count.truth == positive
        cells["classified"] += count.answers
        cells["selected"] += count.answers * is_selected
        if count.truth is not None:
            cells["known"] += count.answers
            cells["wrong"] += count.answers * (count.prediction != count.truth)
            cells["positives" if is_positive else "negatives"] += count.answers
            if is_selected != is_positive:
                cells["false negatives" if is_positive else "false positives"] += count.answers
    return cells


def _share(
    cells: Mapping[str, int], min_group: int, is_rounded: bool, hits: str, cases: str
) -> Estimate | None:
    """Return the share of hits among cases, or None if it has too few cases to be shown."""
    if cells[cases] < min_group:
        return None
    if not is_rounded:
        return estimate_share(cells[hits], cells[cases])
    count = cells[cases] // min_group * min_group
    return estimate_share(round(round(cells[hits] / cells[cases], 2) * count), count)


def _differences(groups: Sequence[GroupFigures]) -> list[GroupDifference]:
    """Return the largest differences between groups.

    Demographic parity compares selection rates (Dwork et al.: Fairness Through Awareness, 2012).
    Equal opportunity compares true positive rates. Equalized odds compares true and false positive
    rates, and is the larger difference (Hardt et al.: Equality of Opportunity in Supervised
    Learning, 2016).
    """
    parity = _largest_difference(
        "demographic_parity", {group.group: group.selection_rate for group in groups}
    )
    error = _largest_difference("error", {group.group: group.error for group in groups})
    false_negatives = {group.group: group.false_negatives for group in groups}
    false_positives = {group.group: group.false_positives for group in groups}
    opportunity = _largest_difference("equal_opportunity", false_negatives, is_reversed=True)
    odds = [
        _largest_difference("equalized_odds", false_negatives, is_reversed=True, tests=2),
        _largest_difference("equalized_odds", false_positives, tests=2),
    ]
    largest_odds = max(odds, key=lambda odd: odd[0].difference.value or 0.0) if all(odds) else []
    return [*parity, *opportunity, *largest_odds, *error]


def _largest_difference(
    name: DifferenceName,
    figures: Mapping[str, Estimate | None],
    *,
    is_reversed: bool = False,
    tests: int = 1,
) -> list[GroupDifference]:
    """Return the largest difference; none if fewer than two groups have the figure.

    With `is_reversed`, the figures are those of the opposite event, such as false negatives for
    true positives. The difference is the same between the groups in the other order.
    """
    known = sorted(
        (estimate.value or 0.0, group, estimate.low or 0.0, estimate.high or 0.0, estimate.count)
        for group, estimate in figures.items()
        if estimate is not None and estimate.count > 1
    )
    if len(known) < 2:
        return []
    small, small_group, small_low, small_high, small_count = known[0]
    large, large_group, large_low, large_high, large_count = known[-1]
    width = NormalDist().inv_cdf(1 - 0.025 / tests / math.comb(len(known), 2)) / Z_95
    value = large - small
    difference = Estimate(
        value=value,
        low=value - width * math.hypot(large - large_low, small_high - small),
        high=value + width * math.hypot(large_high - large, small - small_low),
        count=large_count + small_count,
    )
    groups = (small_group, large_group) if is_reversed else (large_group, small_group)
    return [GroupDifference(name=name, difference=difference, groups=groups)]
