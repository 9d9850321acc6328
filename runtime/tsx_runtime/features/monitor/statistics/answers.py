"""Facts about an answer: its class, confidence and entropy, or its number, or its vector."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

from tsx_runtime.features.monitor.statistics.facts import (
    MAX_CATEGORY_CHARS,
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
MAX_NAMED = 32  # A list of as many numbers is a vector, a shorter one is named numbers.


def describe_answer(answer: Any) -> tuple[Facts, Vector | None]:
    """Return the facts about an answer by name, and its vector.

    An integer, a boolean and a short text are a class, another number is a number. An object or
    a list of probabilities, and objects of a label and a score, are a classification. A list of at
    least 32 other numbers is a vector. Of another object, numbers and short texts are facts.
    """
    while isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float):
        return {"number": number_of(answer)}, None
    if isinstance(answer, str) and len(answer) > MAX_CATEGORY_CHARS:
        return text_facts(answer), None
    if (label := category_of(answer)) is not None:
        return {"class": label}, None
    facts: Facts = {}
    others: Any = {}
    scores = _scores_of(answer)
    if scores is None and isinstance(answer, dict):
        for name, value in answer.items():
            if name in LABEL_KEYS:
                facts |= describe_answer(value)[0]
            elif name in SCORE_KEYS:
                facts["confidence"] = number_of(value)
            elif (distribution := _scores_of(value)) is not None:
                scores = distribution
            else:
                others[name] = value
    elif scores is None and isinstance(answer, list):
        vector = vector_of(answer)
        if vector is not None and len(vector) >= MAX_NAMED:
            return {}, vector
        others = {"count": len(answer)} if vector is None else answer
    for path, value in islice(values_of(others), MAX_NAMED):
        if type(value) in (int, float):
            facts[path] = number_of(value)
        elif isinstance(value, str) and len(value) <= MAX_CATEGORY_CHARS:
            facts[path] = value
    if scores:
        best = max(scores, key=scores.__getitem__)
        facts = {"class": best, "confidence": float(scores[best]), **facts}
        if abs(sum(scores.values()) - 1) <= SUM_TOLERANCE:
            facts["entropy"] = -sum(p * math.log2(p) for p in scores.values() if p > 0)
    return facts, None


def _scores_of(value: Any) -> dict[str, float] | None:
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
    is_top = not is_list and sum(numbers) < 1 and numbers == sorted(numbers)[::-1] and numbers[2:]
    return scores if is_top or abs(sum(numbers) - 1) <= SUM_TOLERANCE else None


def _labelled(items: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return the scores of objects such as `{"label": "cat", "score": 0.9}`, the best by label."""
    scores: Any = {}
    for facts, _ in map(describe_answer, items):
        label, score = facts.get("class"), facts.get("confidence")
        if label is None or score is None:
            return None
        scores[label] = max(score, scores.get(label, score))
    return scores  # type: ignore[no-any-return]
