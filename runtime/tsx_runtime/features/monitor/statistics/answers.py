"""Facts about an answer: its class, confidence and entropy, or its number, or its vector."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

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
SUM_TOLERANCE = 0.02  # The probabilities of a full distribution sum to 1 within it.
MAX_SCORES = 100
MAX_LABEL_CHARS = 100  # A longer answer is a text.
MIN_VECTOR = 32  # A shorter list of numbers is taken as named numbers.
MAX_NAMED = 32

Scores = dict[str, float]


def describe_answer(answer: Any) -> tuple[Facts, Scores | None, Vector | None]:
    """Return the facts about an answer by name, its scores by class, and its vector.

    An integer, a boolean and a short text are a class, another number is a number. An object or
    a list of probabilities, and objects of a label and a score, are a classification. A list of at
    least 32 other numbers is a vector. Of another object, numbers and short texts are facts.
    """
    while isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if type(answer) is float:
        return {"number": number_of(answer)}, None, None
    if facts := _class_of(answer):
        return facts, None, None
    scores = _scores_of(answer)
    if scores is None and isinstance(answer, dict):
        for name, value in answer.items():
            if name == "prediction" and type(value) is float:
                facts["number"] = number_of(value)
            elif name in LABEL_KEYS:
                facts |= _class_of(value)
            elif name in SCORE_KEYS:
                facts["confidence"] = number_of(value)
            elif (distribution := _scores_of(value)) is not None:
                scores = distribution
            elif len(facts) < MAX_NAMED:
                facts |= _named({name: value})
    elif scores is None and isinstance(answer, list):
        vector = vector_of(answer)
        if vector is not None and len(vector) >= MIN_VECTOR:
            return {}, None, vector
        facts = {"count": float(len(answer))} if vector is None else _named(answer)
    if scores:
        best = sorted(scores, key=scores.__getitem__, reverse=True)[:MAX_SCORES]
        # The truth of a class is shortened in the same way.
        facts = {"class": category_of(best[0]), "confidence": scores[best[0]], **facts}
        if abs(sum(scores.values()) - 1) <= SUM_TOLERANCE:
            facts["entropy"] = -sum(p * math.log2(p) for p in scores.values() if p > 0)
        scores = {label: scores[label] for label in best}
    return facts, scores, None


def _class_of(answer: Any) -> Facts:
    """Return the class that an answer names, or facts about one that is a longer text."""
    if isinstance(answer, str) and len(answer) > MAX_LABEL_CHARS:
        return text_facts(answer)
    label = category_of(answer)
    return {} if label is None else {"class": label}


def _named(answer: Any) -> Facts:
    """Return the numbers and short texts in an object or a list."""
    return {
        path: number_of(value) if type(value) in (int, float) else category_of(value)
        for path, value in islice(values_of(answer), MAX_NAMED)
        if len(path) <= MAX_LABEL_CHARS
        and (
            isinstance(value, int | float)
            or (isinstance(value, str) and len(value) <= MAX_LABEL_CHARS)
        )
    }


def _scores_of(value: Any) -> Scores | None:
    """Return scores by class, if a value is a classification.

    The probabilities of the best classes, whose sum is below 1, are known by their descending
    order.
    """
    is_list = isinstance(value, list)
    if is_list and value and all(isinstance(item, dict) for item in value):
        return _labelled(value)
    scores = {str(index): p for index, p in enumerate(value)} if is_list else value
    if not isinstance(scores, dict) or len(scores) < 2:
        return None
    numbers = list(scores.values())
    if not all(type(number) in (int, float) and 0 <= number <= 1 for number in numbers):
        return None
    if any(len(label) > MAX_LABEL_CHARS for label in scores):
        return None  # They are texts.
    is_top = not is_list and sum(numbers) < 1 and numbers == sorted(numbers)[::-1] and numbers[2:]
    return scores if is_top or abs(sum(numbers) - 1) <= SUM_TOLERANCE else None


def _labelled(items: list[dict[str, Any]]) -> Scores | None:
    """Return the scores of objects such as `{"label": "cat", "score": 0.9}`, the best by label."""
    scores: Scores = {}
    for item in items:
        name = next((item[key] for key in LABEL_KEYS if key in item), None)
        label = _class_of(name).get("class")
        score = next((number_of(item[key]) for key in SCORE_KEYS if key in item), None)
        if not isinstance(label, str) or score is None:
            return None
        scores[label] = max(score, scores.get(label, score))
    return scores
