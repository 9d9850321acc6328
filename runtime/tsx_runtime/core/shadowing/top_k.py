"""Compares classifiers' answers by their top k labels, wherever in the answer they are.

What ranks labels: an object of numbers (`{"cat": 0.9, "dog": 0.1}`), a list of numbers (its labels
are the places), a list of texts (the best first), and objects with one text and one number each, or
a list of them (`[{"label": "cat", "score": 0.9}]`). A whole number under one of `LABELS` is a label
too (`{"class": 2, "score": 0.9}`). A tensor of the Open Inference Protocol ranks by its last axis.
What ranks nothing must be the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_runtime.core.shadowing.difference import Difference, excerpt

LABELS = ("class", "class_id", "label", "category", "prediction")  # of whole numbers

Ranking = Mapping[Any, float]  # label -> how good


def first_difference(expected: Any, actual: Any, k: int) -> Difference | None:
    """Of two JSON values; None where they agree."""
    todo: list[tuple[tuple[str, ...], Any, Any]] = [((), expected, actual)]
    while todo:
        path, one, other = todo.pop()
        ranking, its = ranking_of(one), ranking_of(other)
        if ranking is not None and its is not None:
            if not agree(ranking, its, k):
                return Difference("labels", path, _best(ranking, k), _best(its, k))
            continue
        one, other = _rows(one), _rows(other)
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            todo.extend(((*path, key), one[key], other[key]) for key in reversed(one))
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            todo.extend(
                ((*path, str(index)), one[index], other[index])
                for index in reversed(range(len(one)))
            )
        elif (
            isinstance(one, dict | list) or isinstance(other, dict | list) or not _same(one, other)
        ):
            return Difference(
                "value", path, excerpt(one), excerpt(other), "neither equal nor both ranked labels"
            )
    return None


def ranking_of(value: Any) -> Ranking | None:
    if isinstance(value, dict) and (pair := _pair(value)) is not None:
        return dict([pair])
    if isinstance(value, dict) and value and all(map(is_number, value.values())):
        return value
    if not isinstance(value, list) or not value:
        return None
    if len(value) > 1 and all(map(is_number, value)):
        return dict(enumerate(value))
    if all(isinstance(item, str) for item in value):
        return {
            label: -place for place, label in reversed([*enumerate(value)])
        }  # of a label that comes twice, the better place
    if all(isinstance(item, dict) for item in value):
        pairs = [_pair(item) for item in value]
        if all(pair is not None for pair in pairs):
            return dict(pair for pair in pairs if pair is not None)
    return None


def agree(first: Ranking, second: Ranking, k: int) -> bool:
    """Whether there are k labels that are the best of both.

    Where some are equally good, any of them may be among the k.
    """
    if min(k, len(first)) != min(k, len(second)):
        return False
    k = min(k, len(first))
    must, may = _bounds(first, k)
    its_must, its_may = _bounds(second, k)
    either, both = must | its_must, may & its_may
    return either <= both and len(either) <= k <= len(both)


def _bounds(ranking: Ranking, k: int) -> tuple[set[Any], set[Any]]:
    """The labels that are among the best k whatever the choice of those equally good, and those
    that may be.
    """
    last = sorted((_order(value) for value in ranking.values()), reverse=True)[k - 1]
    return (
        {label for label, value in ranking.items() if _order(value) > last},
        {label for label, value in ranking.items() if _order(value) >= last},
    )


def _best(ranking: Ranking, k: int) -> str:
    labels = sorted(ranking, key=lambda label: _order(ranking[label]), reverse=True)[:k]
    shown = ", ".join(str(label)[:40] for label in labels[:10])
    return f"{shown}, ..." if len(labels) > 10 else shown


def _order(value: float) -> float:
    """What is not a number is the worst; a whole number beyond all floats still has its place."""
    if value != value:
        return -math.inf
    return value


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def is_label(key: str, value: object) -> bool:
    """Whether a member of an object names a class, by a text or by its number."""
    return isinstance(value, str) or (type(value) is int and key in LABELS)


def _same(one: object, other: object) -> bool:
    return one == other or (one != one and other != other)  # NaN is not itself


def _pair(item: Mapping[str, Any]) -> tuple[str, float] | None:
    texts = [str(value) for key, value in item.items() if is_label(key, value)]
    numbers = [
        value for key, value in item.items() if is_number(value) and not is_label(key, value)
    ]
    return (texts[0], numbers[0]) if len(item) == 2 and texts and numbers else None


def _rows(value: Any) -> Any:
    """A tensor as the list of its last axes; anything else as it is."""
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
    return {"shape": {"of": str(shape)}, "data": _cut(data, shape[-1] if shape else 1)}


def _cut(data: Sequence[float], size: int) -> list[Sequence[float]]:
    return [data[start : start + size] for start in range(0, len(data), size)]
