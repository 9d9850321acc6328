"""The figures of groups of people or requests, and the differences between groups.

The interval of a difference combines the intervals of both figures by their squares (Newcombe:
Interval estimation for the difference between independent proportions, 1998, method 10; Zou and
Donner: Construction of confidence limits about effect measures, 2008, for means). The largest of
many differences is large by chance; its interval is widened by Bonferroni's method for all pairs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import NormalDist
from typing import Any, NamedTuple

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
from tsx_runtime.features.monitor.statistics.quality import estimate, estimate_share

MAX_GROUPS = 100  # groups of an attribute that are shown, the largest first


class GroupCount(NamedTuple):
    """The number of answers to requests of a group with the same class and truth."""

    attribute: str
    group: str
    prediction: str | None  # None if the answer is a number
    truth: str | None  # None if it is not known yet, or a number
    answers: int
    confidence: float  # sum of the confidences


Members = Mapping[tuple[str, str], list[GroupCount]]  # keys: attribute and group


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
    members: Members = defaultdict(list, {key: [] for key in errors})
    labels = set[str]()
    for count in counts:
        members[count.attribute, count.group].append(count)
        labels.update(label for label in (count.prediction, count.truth) if label is not None)
    positive = config.positive or (max(labels) if len(labels) == 2 else None)
    return [
        _attribute(attribute, {key: members[key] for key in keys}, errors, positive, config)
        for attribute, keys in groupby(sorted(members), itemgetter(0))
    ]


def _attribute(
    attribute: str,
    members: Members,
    errors: Mapping[tuple[str, str], MetricCounts],
    positive: str | None,
    config: MonitorConfig,
) -> AttributeGroups:
    sizes = Counter(
        {
            key: sum(count.answers for count in counts) or errors[key].count
            for key, counts in members.items()
        }
    )
    shown = {key: size for key, size in sizes.most_common(MAX_GROUPS) if size >= config.min_group}
    hidden = len(sizes) - len(shown)
    unit, digits = (config.min_group, 2) if hidden else (1, 15)

    def share(cases: Sequence[GroupCount], is_hit: Callable[[GroupCount], bool]) -> Estimate | None:
        count = sum(case.answers for case in cases)
        if count < config.min_group:
            return None
        rate = round(sum(case.answers for case in cases if is_hit(case)) / count, digits)
        count -= count % unit
        return estimate_share(round(rate * count), count)

    figures = []
    for key, size in shown.items():
        classified = [count for count in members[key] if count.prediction is not None]
        known = [count for count in classified if count.truth is not None]
        rated = [] if positive is None else classified
        negatives = [count for count in rated if count.truth not in (None, positive)]
        error = share(known, _is_wrong)
        group_errors = errors.get(key, MetricCounts())
        if group_errors.count >= config.min_group:
            error = error or estimate(group_errors)
            error.count -= error.count % unit
        confidence = sum(count.confidence for count in members[key]) / size
        figures.append(
            GroupFigures(
                group=key[1],
                count=size - size % unit,
                selection_rate=share(rated, lambda count: count.prediction == positive),
                error=error,
                false_positives=share(negatives, lambda count: count.prediction == positive),
                false_negatives=share(
                    [count for count in known if count.truth == positive], _is_wrong
                ),
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


def _is_wrong(count: GroupCount) -> bool:
    return count.prediction != count.truth


def _differences(groups: Sequence[GroupFigures]) -> list[GroupDifference]:
    """Return the largest differences between groups.

    Demographic parity compares selection rates (Dwork et al.: Fairness Through Awareness, 2012).
    Equal opportunity compares true positive rates. Equalized odds compares true and false positive
    rates, and is the larger difference (Hardt et al.: Equality of Opportunity in Supervised
    Learning, 2016).
    """
    odds: list[Any] = [
        _largest_difference(groups, "equalized_odds", figure, tests=2)
        for figure in ("false_negatives", "false_positives")
    ]
    differences = [
        _largest_difference(groups, "demographic_parity", "selection_rate"),
        _largest_difference(groups, "equal_opportunity", "false_negatives"),
        max(odds, key=lambda entry: entry.difference.value) if all(odds) else None,
        _largest_difference(groups, "error", "error"),
    ]
    return [difference for difference in differences if difference is not None]


def _largest_difference(
    groups: Sequence[GroupFigures], name: DifferenceName, figure: str, tests: int = 1
) -> GroupDifference | None:
    """Return the largest difference; None if fewer than two groups have the figure.

    True positive rates differ like false negative ones, between the groups in the other order.
    """
    estimates: list[Any] = [
        (estimate.value, group.group, estimate)
        for group in groups
        if (estimate := getattr(group, figure)) and estimate.count > 1
    ]
    if len(estimates) < 2:
        return None
    (_, small_group, small), (_, large_group, large) = min(estimates), max(estimates)
    width = NormalDist().inv_cdf(1 - 0.025 / tests / math.comb(len(estimates), 2)) / Z_95
    value = large.value - small.value
    difference = Estimate(
        value=value,
        low=value - width * math.hypot(large.value - large.low, small.high - small.value),
        high=value + width * math.hypot(large.high - large.value, small.value - small.low),
        count=large.count + small.count,
    )
    names = (large_group, small_group)
    if figure == "false_negatives":
        names = names[::-1]
    return GroupDifference(name=name, difference=difference, groups=names)
