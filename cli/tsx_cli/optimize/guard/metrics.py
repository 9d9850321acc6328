"""The metrics of the guard. A metric scores each row, and all rows together."""

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
from tsx_runtime.core.comparison.comparison import Closeness, json_difference, same_exactly

Times = Sequence[int]  # how many times each row counts
Score = Callable[[Times], float]
# The loss of a token without logits, as if all words of a large vocabulary were equally likely.
GUESS_LOSS = math.log(100_000)


@dataclass(frozen=True)
class GuardMetric:
    """A metric.

    `row` scores an answer by the truth, or raises ValueError. If it raises, or if the request
    fails, `missing` scores the row.
    """

    # The fraction of right rows, the mean of the rows' scores, or one score for all rows.
    kind: Literal["share", "mean", "corpus"]
    truth: Callable[[Any], Any]  # converts the reference's answer to the truth
    row: Callable[[Any, Any], Any]
    of_label: Callable[[Any], Any] = lambda label: label
    missing: Callable[[Any], Any] = lambda _: 0.0
    best: Callable[[Any], Any] | None = lambda _: 1.0  # the best possible score of a row
    score: Callable[[Sequence[Any]], Score] = lambda rows: lambda _: fmean(rows)
    # Whether the loss is in percentage points of a score up to 1, or relative to the reference.
    points: bool = True
    less: bool = False  # Less is better.
    # Whether an unlike row (see verdict.py) may be lost entirely; None: only if no row differs.
    full_loss: bool | None = True


def metric_of(limit: Limit, custom: Custom | None) -> GuardMetric:
    if limit.tolerance is not None:
        tolerance = limit.tolerance
        comparison = (
            Closeness(tolerance.rtol or 0.0, tolerance.atol or 0.0)
            if tolerance.kind == "numeric"
            else same_exactly
        )
        return GuardMetric(
            "share",
            _identity,
            lambda answer, truth: json_difference(truth, answer, comparison) is None,
        )
    if limit.metric in _METRICS:
        return _METRICS[limit.metric]
    assert custom is not None, "a limit of a custom metric comes with it"
    score = partial(_custom_score, limit.metric, custom)
    return GuardMetric(
        "corpus",
        _identity,
        lambda *pair: pair,
        missing=_identity,
        best=None,
        score=score,
        points=False,
        full_loss=None,
    )


def default_limits(values: Sequence[Any]) -> tuple[Limit, ...]:
    """Return limits that suit the kind of the reference's answers.

    A cosine is meaningless for single numbers and for token ids.
    """
    if any(values) and all(map(_is_boxes, values)):
        return parse_limits("map>=-0.5%")
    if all(map(answers.is_probabilities, values)):
        return parse_limits("top1>=-0.5%")
    vectors = [
        answers.numbers(value)[0] for value in values if isinstance(value, dict | list | float)
    ]
    if (
        len(vectors) == len(values)
        and all(vectors)
        and any(number % 1 for row in vectors for number in row)
    ):
        return (
            parse_limits("cosine>=0.999")
            if all(len(row) > 1 for row in vectors)
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


def _is_among_best(count: int, answer: Any, labels: frozenset[str]) -> bool:
    return answers.rank_of(answer, labels) <= count


def _cosine(answer: Any, truth: tuple[Sequence[float], Any]) -> float:
    (vector, structure), (true_vector, true_structure) = answers.numbers(answer), truth
    if structure != true_structure or len(vector) != len(true_vector):
        raise ValueError("it is of another shape")
    if vector == true_vector:
        return 1.0
    sizes = math.hypot(*vector) * math.hypot(*true_vector)
    if not 0 < sizes < math.inf:
        raise ValueError("it has no direction")
    return min(1.0, math.fsum(map(float.__mul__, vector, true_vector)) / sizes)


def _likelihood(answer: Any, ids: Sequence[Any]) -> tuple[float, int]:
    """Return the negative log-likelihood of the tokens, and the number of tokens."""
    rows = answers.logits(answer)
    if len(rows) != len(ids) or not all(
        type(token) is int and 0 <= token < len(rows[0]) for token in ids
    ):
        raise ValueError("there is not one token of the vocabulary for each row of logits")
    loss = 0.0
    for row, token in zip(rows, ids, strict=True):
        largest = max(row)
        loss += (
            largest + math.log(math.fsum(math.exp(number - largest) for number in row)) - row[token]
        )
    if not math.isfinite(loss):
        raise ValueError("there are logits that are not numbers")
    return loss, len(ids)


def _perplexity(rows: Sequence[tuple[float, int]]) -> Score:
    def score(times: Times) -> float:
        loss, tokens = (
            math.fsum(count * row[part] for count, row in zip(times, rows, strict=True))
            for part in (0, 1)
        )
        return math.exp(min(loss / max(1.0, tokens), 700.0))

    return score


def _custom_score(name: str, function: Custom, rows: Sequence[tuple[Any, Any]]) -> Score:
    def score(times: Times) -> float:
        repeated_rows = [row for count, row in zip(times, rows, strict=True) for _ in range(count)]
        try:
            value = float(
                function(
                    [answer for answer, _ in repeated_rows], [label for _, label in repeated_rows]
                )
            )
        except Exception as error:  # The user's function may raise anything.
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


def _top_metric(count: int) -> GuardMetric:
    return GuardMetric(
        "share",
        answers.best_labels,
        partial(_is_among_best, count),
        of_label=lambda label: frozenset([str(label)]),
    )


_METRICS = {
    "top1": _top_metric(1),
    "top5": _top_metric(5),
    "exact": GuardMetric(
        "share",
        _identity,
        lambda answer, truth: json_difference(truth, answer, same_exactly) is None,
    ),
    "cosine": GuardMetric(
        "mean", answers.numbers, _cosine, of_label=answers.numbers, full_loss=False
    ),
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
        missing=lambda ids: (GUESS_LOSS * len(ids), len(ids)),
        best=lambda ids: (0.0, len(ids)),
        score=_perplexity,
        points=False,
        less=True,
        full_loss=False,
    ),
}
