"""Facts about an answer: its class, confidence and entropy, or its number, or its vector."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from tsx_runtime.features.monitor.statistics.facts import (
    Facts,
    Vector,
    category_of,
    number_of,
    text_facts,
    vector_of,
)
from tsx_runtime.features.monitor.statistics.fields import values_of

LABEL_KEYS = ("label", "class", "prediction", "predicted_class", "class_id", "category")
SCORE_KEYS = ("score", "confidence", "probability")
SUM_TOLERANCE = 0.02  # of the probabilities of a full distribution
MAX_SCORES = 100
MAX_LABEL_CHARS = 100  # A longer answer is a text.
MIN_VECTOR = 32  # A shorter list of numbers is taken as named numbers.
MAX_NAMED = 32


class AnswerFacts(NamedTuple):
    """What is known about the answer to one row; names of columns are without `answer.`."""

    columns: Facts
    prediction: str | float | None = None
    confidence: float | None = None
    scores: dict[str, float] | None = None
    vector: Vector | None = None


def describe_answer(answer: Any) -> AnswerFacts:
    """Return the facts about an answer.

    An integer, a boolean and a short text are a class, another number is a number. An object or
    a list of probabilities, and objects of a label and a score, are a classification. A list of at
    least 32 other numbers is a vector. Of another object, numbers and short texts are columns.
    """
    while isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if type(answer) is float:
        number = number_of(answer)
        return AnswerFacts({"number": number}, number)
    if isinstance(answer, str) and len(answer) > MAX_LABEL_CHARS:
        return AnswerFacts(text_facts(answer))
    if (label := category_of(answer)) is not None:
        return AnswerFacts({"class": label}, label)
    if (scores := _scores_of(answer)) is not None:
        return _classified(scores, {})
    if isinstance(answer, dict):
        return _describe_object(answer)
    if (vector := vector_of(answer)) is not None:
        if len(vector) >= MIN_VECTOR:
            return AnswerFacts({}, vector=vector)
        return AnswerFacts(_named(answer))
    return AnswerFacts({"count": float(len(answer))} if isinstance(answer, list) else {})


def _describe_object(answer: dict[str, Any]) -> AnswerFacts:
    names = [_first_key(answer, LABEL_KEYS), _first_key(answer, SCORE_KEYS)]
    label, confidence = answer.get(names[0]), number_of(answer.get(names[1]))
    scores = None
    for name, value in answer.items():
        if scores is None and (scores := _scores_of(value)) is not None:
            names.append(name)
    columns = _named({name: value for name, value in answer.items() if name not in names})
    if scores is not None:
        return _classified(scores, columns, category_of(label), confidence)
    if type(label) is float and confidence is None:  # such as a price
        return AnswerFacts({**columns, "number": number_of(label)}, number_of(label))
    if label is not None:
        columns["class"] = category_of(label)
    if confidence is not None:
        columns["confidence"] = confidence
    return AnswerFacts(columns, category_of(label), confidence)


def _first_key(item: Mapping[str, Any], keys: Iterable[str]) -> str:
    return next((key for key in keys if key in item), "")


def _classified(
    scores: dict[str, float],
    columns: Facts,
    label: str | None = None,
    confidence: float | None = None,
) -> AnswerFacts:
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:MAX_SCORES]
    label = label or best[0]
    confidence = scores[best[0]] if confidence is None else confidence
    columns |= {"class": label, "confidence": confidence}
    if abs(sum(scores.values()) - 1) <= SUM_TOLERANCE:
        columns["entropy"] = -sum(p * math.log2(p) for p in scores.values() if p > 0)
    return AnswerFacts(columns, label, confidence, {name: scores[name] for name in best})


def _named(answer: Any) -> Facts:
    """Return the numbers and short texts in an object or a list."""
    return {
        path: number_of(value) if type(value) in (int, float) else category_of(value)
        for path, value in islice(values_of(answer), MAX_NAMED)
        if isinstance(value, int | float)
        or (isinstance(value, str) and len(value) <= MAX_LABEL_CHARS)
    }


def _scores_of(value: Any) -> dict[str, float] | None:
    """Return scores by label, if a value is a classification.

    The probabilities of the best classes, whose sum is below 1, are known by their descending
    order.
    """
    is_object = isinstance(value, dict)
    if isinstance(value, list):
        if value and all(isinstance(item, dict) for item in value):
            return _labelled(value)
        value = {str(index): number for index, number in enumerate(value)}
    if not isinstance(value, dict) or len(value) < 2:
        return None
    numbers = list(value.values())
    if not all(type(number) in (int, float) and 0 <= number <= 1 for number in numbers):
        return None
    total = sum(numbers)
    is_top = is_object and len(numbers) > 2 and total < 1 and numbers == sorted(numbers)[::-1]
    return value if is_top or abs(total - 1) <= SUM_TOLERANCE else None


def _labelled(items: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return the scores of objects such as `{"label": "cat", "score": 0.9}`, the best by label."""
    scores: dict[str, float] = {}
    for item in items:
        label = category_of(item.get(_first_key(item, LABEL_KEYS)))
        score = number_of(item.get(_first_key(item, SCORE_KEYS)))
        if label is None or score is None:
            return None
        scores[label] = max(score, scores.get(label, score))
    return scores
