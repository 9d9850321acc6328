"""The comparison of classifications by their top k labels, anywhere in two responses.

These values are rankings of labels: an object of numbers (`{"cat": 0.9, "dog": 0.1}`), a list of
numbers by index, a list of texts with the best first, and an object with one text and one number,
or a list of such objects (`[{"label": "cat", "score": 0.9}]`). An integer under one of `LABEL_KEYS`
is a label too (`{"class": 2, "score": 0.9}`). A tensor of the Open Inference Protocol is ranked
along its last axis. Other values must be the same in both responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_runtime.core.comparison.difference import Difference, excerpt

LABEL_KEYS = ("class", "class_id", "label", "category", "prediction")  # keys of integer labels

Ranking = Mapping[Any, float]  # score by label


def first_difference(expected: Any, actual: Any, k: int) -> Difference | None:
    """Return the first difference of two JSON values, or None."""
    pending: list[tuple[tuple[str, ...], Any, Any]] = [((), expected, actual)]
    while pending:
        path, a, b = pending.pop()
        ranking, b_ranking = ranking_of(a), ranking_of(b)
        if ranking is not None and b_ranking is not None:
            if not agree(ranking, b_ranking, k):
                return Difference(
                    "labels", path, _best_labels_text(ranking, k), _best_labels_text(b_ranking, k)
                )
            continue
        a, b = _rows(a), _rows(b)
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            pending.extend(((*path, key), a[key], b[key]) for key in reversed(a))
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            pending.extend(
                ((*path, str(index)), a[index], b[index]) for index in reversed(range(len(a)))
            )
        elif isinstance(a, dict | list) or isinstance(b, dict | list) or not _is_same(a, b):
            return Difference(
                "value", path, excerpt(a), excerpt(b), "neither equal nor both ranked labels"
            )
    return None


def ranking_of(value: Any) -> Ranking | None:
    """Return the ranking in a JSON value, or None if it is no ranking."""
    if isinstance(value, dict) and (pair := _label_and_score(value)) is not None:
        return dict([pair])
    if isinstance(value, dict) and value and all(map(is_number, value.values())):
        return value
    if not isinstance(value, list) or not value:
        return None
    if len(value) > 1 and all(map(is_number, value)):
        return dict(enumerate(value))
    if all(isinstance(item, str) for item in value):
        # A repeated label gets its best rank.
        return {label: -rank for rank, label in reversed([*enumerate(value)])}
    if all(isinstance(item, dict) for item in value):
        pairs = [_label_and_score(item) for item in value]
        if all(pair is not None for pair in pairs):
            return dict(pair for pair in pairs if pair is not None)
    return None


def agree(first: Ranking, second: Ranking, k: int) -> bool:
    """Tell whether both rankings can have the same k best labels.

    If several labels are equally good, any of them may be among the best k.
    """
    if min(k, len(first)) != min(k, len(second)):
        return False
    k = min(k, len(first))
    certain, possible = _label_sets(first, k)
    b_certain, b_possible = _label_sets(second, k)
    all_certain, shared = certain | b_certain, possible & b_possible
    return all_certain <= shared and len(all_certain) <= k <= len(shared)


def _label_sets(ranking: Ranking, k: int) -> tuple[set[Any], set[Any]]:
    """Return the labels that are certainly among the best k, and those that may be."""
    last_value = sorted((_sort_key(value) for value in ranking.values()), reverse=True)[k - 1]
    return (
        {label for label, value in ranking.items() if _sort_key(value) > last_value},
        {label for label, value in ranking.items() if _sort_key(value) >= last_value},
    )


def _best_labels_text(ranking: Ranking, k: int) -> str:
    labels = sorted(ranking, key=lambda label: _sort_key(ranking[label]), reverse=True)[:k]
    text = ", ".join(str(label)[:40] for label in labels[:10])
    return f"{text}, ..." if len(labels) > 10 else text


def _sort_key(value: float) -> float:
    """Return the sort key of a score; NaN is the worst."""
    if value != value:
        return -math.inf
    return value


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def is_label(key: str, value: object) -> bool:
    """Tell whether a member of an object names a class, by a text or a number."""
    return isinstance(value, str) or (type(value) is int and key in LABEL_KEYS)


def _is_same(a: object, b: object) -> bool:
    return a == b or (a != a and b != b)  # Here, NaN equals NaN.


def _label_and_score(item: Mapping[str, Any]) -> tuple[str, float] | None:
    texts = [str(value) for key, value in item.items() if is_label(key, value)]
    numbers = [
        value for key, value in item.items() if is_number(value) and not is_label(key, value)
    ]
    return (texts[0], numbers[0]) if len(item) == 2 and texts and numbers else None


def _rows(value: Any) -> Any:
    """Return a tensor with its data as a list of rows, and any other value unchanged."""
    if (
        not isinstance(value, dict)
        or not isinstance(shape := value.get("shape"), list)
        or not isinstance(data := value.get("data"), list)
    ):
        return value
    if (
        not all(type(size) is int and size > 0 for size in shape)
        or math.prod(shape) != len(data)
        or not all(map(is_number, data))
    ):
        return value
    return {"shape": {"of": str(shape)}, "data": _slices(data, shape[-1] if shape else 1)}


def _slices(data: Sequence[float], size: int) -> list[Sequence[float]]:
    return [data[start : start + size] for start in range(0, len(data), size)]
