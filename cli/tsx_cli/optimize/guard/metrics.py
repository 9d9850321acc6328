"""The metrics of the guard: how a row is scored, and how the rows together are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

from tsx_cli.common.failure import CliError
from tsx_cli.optimize.guard import answers, detection
from tsx_cli.optimize.guard.limits import Custom, Limit, parse_limits
from tsx_runtime.core.shadowing.comparison import Closeness, json_difference, same_exactly

Times = Sequence[int]  # how many times each row counts
Score = Callable[[Times], float]
GUESS = math.log(
    100_000
)  # loss of a token without logits: all words of a large vocabulary are equally likely


@dataclass(frozen=True)
class GuardMetric:
    """`row` scores an answer by the truth, or raises ValueError; then, and if the request fails,
    `missing` scores the row.
    """

    kind: Literal[
        "share", "mean", "corpus"
    ]  # rows that are right; the mean of the rows' scores; one score of all rows
    truth: Callable[[Any], Any]  # of the reference's answer
    row: Callable[[Any, Any], Any]
    of_label: Callable[[Any], Any] = lambda label: label
    missing: Callable[[Any], Any] = lambda _: 0.0
    best: Callable[[Any], Any] | None = lambda _: 1.0  # the highest score of a row
    score: Callable[[Sequence[Any]], Score] = lambda rows: lambda _: fmean(rows)
    # a score up to 1, whose loss is given in percentage points, else as a share of the reference's
    points: bool = True
    less: bool = False  # less is better
    whole: bool | None = (
        # a row unlike those seen may be lost entirely (verdict.py); None: only if those seen do not
        # differ
        True
    )


def metric_of(limit: Limit, custom: Custom | None) -> GuardMetric:
    if limit.tolerance is not None:
        how = limit.tolerance
        near = (
            Closeness(how.rtol or 0.0, how.atol or 0.0) if how.kind == "numeric" else same_exactly
        )
        return GuardMetric(
            "share", _identity, lambda answer, truth: json_difference(truth, answer, near) is None
        )
    if limit.metric in _METRICS:
        return _METRICS[limit.metric]
    assert custom is not None, "a limit of a custom metric comes with it"
    score = partial(_custom, limit.metric, custom)
    return GuardMetric(
        "corpus",
        _identity,
        lambda *pair: pair,
        missing=_identity,
        best=None,
        score=score,
        points=False,
        whole=None,
    )


def default_limits(values: Sequence[Any]) -> tuple[Limit, ...]:
    """By the kind of the reference's answers.

    A cosine means nothing for a single number or for token ids.
    """
    if any(values) and all(map(_is_boxes, values)):
        return parse_limits("map>=-0.5%")
    if all(map(answers.is_probabilities, values)):
        return parse_limits("top1>=-0.5%")
    found = [
        answers.numbers(value)[0] for value in values if isinstance(value, dict | list | float)
    ]
    if (
        len(found) == len(values)
        and all(found)
        and any(number % 1 for row in found for number in row)
    ):
        return (
            parse_limits("cosine>=0.999")
            if all(len(row) > 1 for row in found)
            else parse_limits(tolerance="rtol=1e-2,atol=1e-3")
        )
    return parse_limits("exact>=-0.5%")


def _is_boxes(value: Any) -> bool:
    try:
        return detection.boxes_of(value) is not None and all("score" in item for item in value)
    except ValueError:
        return False


def _identity(value: Any) -> Any:
    return value


def _in_best(count: int, answer: Any, labels: frozenset[str]) -> bool:
    return answers.rank_of(answer, labels) <= count


def _cosine(answer: Any, truth: tuple[Sequence[float], Any]) -> float:
    (one, rest), (other, its) = answers.numbers(answer), truth
    if rest != its or len(one) != len(other):
        raise ValueError("it is of another shape")
    if one == other:
        return 1.0
    sizes = math.hypot(*one) * math.hypot(*other)
    if not 0 < sizes < math.inf:
        raise ValueError("it has no direction")
    return min(1.0, math.fsum(map(float.__mul__, one, other)) / sizes)


def _likelihood(answer: Any, ids: Sequence[Any]) -> tuple[float, int]:
    """Negative log-likelihood of the tokens, and their number."""
    rows = answers.logits(answer)
    if len(rows) != len(ids) or not all(
        type(token) is int and 0 <= token < len(rows[0]) for token in ids
    ):
        raise ValueError("there is not one token of the vocabulary for each row of logits")
    lost = 0.0
    for row, token in zip(rows, ids, strict=True):
        largest = max(row)
        lost += (
            largest + math.log(math.fsum(math.exp(number - largest) for number in row)) - row[token]
        )
    if not math.isfinite(lost):
        raise ValueError("there are logits that are not numbers")
    return lost, len(ids)


def _perplexity(rows: Sequence[tuple[float, int]]) -> Score:
    def score(times: Times) -> float:
        lost, tokens = (
            math.fsum(count * row[part] for count, row in zip(times, rows, strict=True))
            for part in (0, 1)
        )
        return math.exp(min(lost / max(1.0, tokens), 700.0))

    return score


def _custom(name: str, function: Custom, rows: Sequence[tuple[Any, Any]]) -> Score:
    def score(times: Times) -> float:
        drawn = [row for count, row in zip(times, rows, strict=True) for _ in range(count)]
        try:
            value = float(function([answer for answer, _ in drawn], [label for _, label in drawn]))
        except Exception as error:  # whatever the user's function raises
            raise CliError(
                f"--metric: {name}(answers, labels) raised {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(value):
            raise CliError(
                f"--metric: {name}(answers, labels) returned {value}; it must return a finite"
                " number; more is better"
            )
        return value

    return score


def _best_tokens(value: Any) -> list[int]:
    return [max(range(len(row)), key=row.__getitem__) for row in answers.logits(value)]


def _ranked(count: int) -> GuardMetric:
    return GuardMetric(
        "share",
        answers.best_labels,
        partial(_in_best, count),
        of_label=lambda label: frozenset([str(label)]),
    )


_METRICS = {
    "top1": _ranked(1),
    "top5": _ranked(5),
    "exact": GuardMetric(
        "share",
        _identity,
        lambda answer, truth: json_difference(truth, answer, same_exactly) is None,
    ),
    "cosine": GuardMetric("mean", answers.numbers, _cosine, of_label=answers.numbers, whole=False),
    "map": GuardMetric(
        "corpus",
        detection.boxes_of,
        lambda answer, truth: detection.match(detection.boxes_of(answer), truth),
        of_label=detection.boxes_of,
        missing=lambda truth: detection.match({}, truth),
        best=detection.perfect,
        score=detection.average_precision,
    ),
    "perplexity": GuardMetric(
        "corpus",
        _best_tokens,
        _likelihood,
        missing=lambda ids: (GUESS * len(ids), len(ids)),
        best=lambda ids: (0.0, len(ids)),
        score=_perplexity,
        points=False,
        less=True,
        whole=False,
    ),
}
