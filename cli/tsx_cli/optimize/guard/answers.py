"""What metrics read in an answer: its JSON value, ranked labels, numbers or logits."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_runtime.core.shadowing.response_body import NO_JSON, read_answer
from tsx_runtime.core.shadowing.top_k import is_label, is_number, ranking_of
from tsx_runtime.plugins import ComparedAnswer


def decode(answer: ComparedAnswer) -> Any:
    """The JSON value, else the bytes.

    An answer of the Open Inference Protocol becomes its only output, or a dict of several, each as
    rows of its last axis.
    """
    value = read_answer(answer)
    if value is NO_JSON:
        return answer.body
    outputs = value.get("outputs") if isinstance(value, dict) else None
    if (
        not isinstance(outputs, list)
        or not outputs
        or not all(isinstance(each, dict) and _is_tensor(each) for each in outputs)
    ):
        return value
    tensors = {str(each.get("name")): _rows(each["data"], each["shape"]) for each in outputs}
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


def ranking(value: Any) -> Mapping[str, float]:
    """Label or position -> score.

    Lists and objects with nothing else in them may stand around it. Raises ValueError.
    """
    found = ranking_of(value)
    while found is None and isinstance(value, list | dict) and len(value) == 1:
        value = _only(value)
        found = ranking_of(value)
    if found is None:
        raise ValueError("it does not rank labels")
    return {str(label): score for label, score in found.items()}


def best_labels(value: Any) -> frozenset[str]:
    """The label with the highest score, or all that share it. Raises ValueError."""
    scores = ranking(value)
    best = max((score for score in scores.values() if score == score), default=None)
    return frozenset(label for label, score in scores.items() if score == best)


def rank_of(value: Any, labels: frozenset[str]) -> float:
    """The rank of the best of these labels, from 1, behind all others with the same score.

    Raises ValueError.
    """
    scores = ranking(value)
    own = max(
        (scores[label] for label in labels if label in scores and scores[label] == scores[label]),
        default=None,
    )
    return (
        math.inf
        if own is None
        else 1 + sum(not score < own for label, score in scores.items() if label not in labels)
    )


def numbers(value: Any) -> tuple[array[float], list[Any]]:
    """All numbers at any depth, and everything else, which must be equal: keys, lengths, labels,
    texts.
    """
    found, rest, todo = array("d"), list[Any](), [value]
    while todo:
        item = todo.pop()
        if is_number(item):
            found.append(item)
        elif isinstance(item, dict):
            rest.append(sorted(item))
            todo += [
                str(item[key]) if is_label(key, item[key]) else item[key] for key in sorted(item)
            ]
        elif isinstance(item, list):
            rest.append(len(item))
            todo += item
        else:
            rest.append(item)
    return found, rest


def logits(value: Any) -> Sequence[Sequence[float]]:
    """(tokens, vocabulary). Raises ValueError."""
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
    """Whether it ranks labels with scores from 0 to 1; a list of numbers does if they add up to 1.

    One label is a ranking only beside its score, as in {"label": "cat", "score": 0.9} or
    {"class": 2, "score": 0.9}: in {"value": 0.37} it names a number.
    """
    try:
        scores = ranking(value)
    except ValueError:
        return False
    found, rest = numbers(value)
    named = any(isinstance(each, str) for each in rest)
    if not found or (len(scores) == 1 and not named):
        return False
    positions = not named and list(scores) == [str(number) for number in range(len(scores))]
    return all(0 <= score <= 1 for score in scores.values()) and (
        not positions or abs(sum(scores.values()) - 1) < 0.01
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
