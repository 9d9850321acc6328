"""The values that metrics read from an answer: JSON, ranked labels, numbers or logits."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_runtime.core.comparison.response_body import NO_JSON, read_answer
from tsx_runtime.core.comparison.top_k import is_label, is_number, ranking_of
from tsx_runtime.plugins import ComparedAnswer


def decode(answer: ComparedAnswer) -> Any:
    """Return the JSON value of an answer, or else its bytes.

    An answer of the Open Inference Protocol becomes its only output, or a dict if there are
    several. Each output is divided into rows along its last axis.
    """
    value = read_answer(answer)
    if value is NO_JSON:
        return answer.body
    outputs = value.get("outputs") if isinstance(value, dict) else None
    if (
        not isinstance(outputs, list)
        or not outputs
        or not all(isinstance(output, dict) and _is_tensor(output) for output in outputs)
    ):
        return value
    tensors = {
        str(output.get("name")): _rows(output["data"], output["shape"]) for output in outputs
    }
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


def ranking(value: Any) -> Mapping[str, float]:
    """Return the scores by label or position.

    The ranking may be nested in lists and objects with a single entry.

    Raises:
        ValueError: The value does not rank labels.
    """
    scores = ranking_of(value)
    while scores is None and isinstance(value, list | dict) and len(value) == 1:
        value = _only(value)
        scores = ranking_of(value)
    if scores is None:
        raise ValueError("it does not rank labels")
    return {str(label): score for label, score in scores.items()}


def best_labels(value: Any) -> frozenset[str]:
    """Return the label with the highest score, or all labels that share this score.

    Raises:
        ValueError: The value does not rank labels.
    """
    scores = ranking(value)
    best = max((score for score in scores.values() if score == score), default=None)
    return frozenset(label for label, score in scores.items() if score == best)


def rank_of(value: Any, labels: frozenset[str]) -> float:
    """Return the best rank of these labels, from 1; other labels with equal scores come first.

    Raises:
        ValueError: The value does not rank labels.
    """
    scores = ranking(value)
    best = max(
        (scores[label] for label in labels if label in scores and scores[label] == scores[label]),
        default=None,
    )
    return (
        math.inf
        if best is None
        else 1 + sum(not score < best for label, score in scores.items() if label not in labels)
    )


def numbers(value: Any) -> tuple[array[float], list[Any]]:
    """Return all numbers at any depth, and the structure around them.

    The structure consists of keys, lengths, labels and texts; it must be equal in two answers.
    """
    values, structure, pending = array("d"), list[Any](), [value]
    while pending:
        item = pending.pop()
        if is_number(item):
            values.append(item)
        elif isinstance(item, dict):
            structure.append(sorted(item))
            pending += [
                str(item[key]) if is_label(key, item[key]) else item[key] for key in sorted(item)
            ]
        elif isinstance(item, list):
            structure.append(len(item))
            pending += item
        else:
            structure.append(item)
    return values, structure


def logits(value: Any) -> Sequence[Sequence[float]]:
    """Return logits of the shape (tokens, vocabulary).

    Raises:
        ValueError: The value does not contain such an array.
    """
    while (
        isinstance(value, list | dict) and len(value) == 1 and not _is_vector(inner := _only(value))
    ):
        value = inner
    if (
        not isinstance(value, list)
        or not value
        or not all(map(_is_vector, value))
        or len({len(row) for row in value}) > 1
    ):
        raise ValueError("it is not an array of logits (tokens, vocabulary)")
    return value


def is_probabilities(value: Any) -> bool:
    """Tell whether the value ranks labels with scores from 0 to 1.

    A list of numbers must add up to 1. A single label must be given together with its score, as in
    {"label": "cat", "score": 0.9} or {"class": 2, "score": 0.9}. In {"value": 0.37}, the key is
    only the name of a number.
    """
    try:
        scores = ranking(value)
    except ValueError:
        return False
    values, structure = numbers(value)
    has_text = any(isinstance(part, str) for part in structure)
    if not values or (len(scores) == 1 and not has_text):
        return False
    is_positional = not has_text and list(scores) == [str(number) for number in range(len(scores))]
    return all(0 <= score <= 1 for score in scores.values()) and (
        not is_positional or abs(sum(scores.values()) - 1) < 0.01
    )


def _only(value: Any) -> Any:
    return next(iter(value.values() if isinstance(value, dict) else value))


def _is_vector(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def _is_tensor(output: Mapping[str, Any]) -> bool:
    shape, data = output.get("shape"), output.get("data")
    return (
        isinstance(shape, list)
        and all(type(size) is int and size > 0 for size in shape)
        and isinstance(data, list)
    )


def _rows(data: list[Any], shape: list[int]) -> list[Any]:
    if len(shape) < 2 or len(data) != math.prod(shape):
        return data
    return [data[start : start + shape[-1]] for start in range(0, len(data), shape[-1])]
