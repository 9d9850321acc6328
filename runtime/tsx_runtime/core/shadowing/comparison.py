"""Compares two answers: within a tolerance, exactly, by their top labels, or by a plugin.

Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tsx_runtime.core.shadowing.difference import Difference, count, excerpt
from tsx_runtime.core.shadowing.response_body import NO_JSON, read_answer
from tsx_runtime.core.shadowing.top_k import first_difference, is_number
from tsx_runtime.errors import is_failure
from tsx_runtime.plugins import ComparedAnswer, Comparison
from tsx_runtime.settings.traffic_policy import Compare

_HALF = (1e-2, 1e-3)
_COARSE = (
    1e-1,
    1e-2,
)  # a change of 0.1 in a logit of 10 changes a probability of one half by 0.025
# By the precision of a model, rtol and atol: what its numbers differ by between two machines or
# batch sizes, and some more.
TOLERANCES = {
    "fp32": (1e-4, 1e-6),
    "fp16": _HALF,
    "bf16": _HALF,
    "int8": _COARSE,
    "int4": _COARSE,
    "pruned": _COARSE,
}
TOP = 1  # label, of the kind top-k

Path = tuple[str, ...]
Same = Callable[[Any, Any], bool]

# Identifiers and times in answers of OpenAI's API, by their field `object`.
_OF_RESPONSE: list[Path] = [("id",), ("created_at",), ("output", "*", "id")]
_OF_TEXT: list[Path] = [("id",), ("created",), ("choices", "*", "*", "tool_calls", "*", "id")]
_OF_OBJECTS = {"response": _OF_RESPONSE} | dict.fromkeys(
    ("chat.completion", "chat.completion.chunk", "text_completion"), _OF_TEXT
)


class ComparisonResult(NamedTuple):
    """`difference` is None where the answers agree; `largest` is the most that two of their numbers
    differ by.
    """

    difference: Difference | None
    largest: float = 0.0


def tolerance_of(how: Compare, *precisions: str | None) -> tuple[float, float]:
    """rtol and atol: the given ones, else those of the coarsest precision; a model whose precision
    is unknown computes in fp32.
    """
    rtol, atol = max(
        TOLERANCES.get((precision or "fp32").lower(), TOLERANCES["fp32"])
        for precision in precisions or (None,)
    )
    return rtol if how.rtol is None else how.rtol, atol if how.atol is None else how.atol


def compare(
    how: Compare,
    request: bytes,
    expected: ComparedAnswer,
    actual: ComparedAnswer,
    plugin: Comparison | None = None,
    precisions: Sequence[str | None] = (),
) -> ComparisonResult:
    """`plugin` is the function for the kind of that name; `precisions` are those of the models that
    answered, as far as they are known.
    """
    if expected.status != actual.status:
        return ComparisonResult(Difference("status", (), str(expected.status), str(actual.status)))
    if is_failure(expected.status):
        return ComparisonResult(None)  # the text of an error may name a request or a time
    if plugin is not None:
        return ComparisonResult(_verdict(plugin(request, expected, actual)))
    near = Closeness(*tolerance_of(how, *precisions))
    found = compare_bodies(
        expected,
        actual,
        lambda one, other: _compare_values(how, near, expected, actual, one, other),
    )
    return ComparisonResult(found, near.largest)


def compare_bodies(
    expected: ComparedAnswer,
    actual: ComparedAnswer,
    compare_values: Callable[[Any, Any], Difference | None],
) -> Difference | None:
    """By `compare_values` where both are JSON, else to the byte."""
    if expected.body == actual.body:
        return None
    one, other = read_answer(expected), read_answer(actual)
    if (one is NO_JSON) != (other is NO_JSON):
        return Difference(
            "value", (), *("not JSON" if value is NO_JSON else "JSON" for value in (one, other))
        )
    return (
        _bytes_differ(expected.body, actual.body) if one is NO_JSON else compare_values(one, other)
    )


def _compare_values(
    how: Compare,
    near: Closeness,
    expected: ComparedAnswer,
    actual: ComparedAnswer,
    one: Any,
    other: Any,
) -> Difference | None:
    ignored = [tuple(path.split(".")) for path in how.ignore]
    ignored += set(_never_equal(one)).intersection(_never_equal(other))
    if how.kind == "top-k":
        return first_difference(
            without(one, ignored), without(other, ignored), TOP if how.k is None else how.k
        )
    if how.rtol is None and how.atol is None and (_is_half(one) or _is_half(other)):
        near.rtol, near.atol = max(_HALF, (near.rtol, near.atol))
    close = differing(one, other, near, ignored)
    if how.kind == "numeric":
        return close
    exact = differing(one, other, same_exactly, ignored)
    return exact or (None if ignored else _bytes_differ(expected.body, actual.body))


def differing(
    expected: Any, actual: Any, same: Same, ignored: Sequence[Path] = (), *, ordered: bool = False
) -> Difference | None:
    """The first difference of two JSON values, however deep; `same` is called for all that is
    neither an object nor a list.

    With `ordered`, the order of keys counts.
    """
    first: Difference | None = None
    todo: list[tuple[Path, Any, Any]] = [((), expected, actual)]
    while todo:
        path, one, other = todo.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            for key in [*one, *(key for key in other if key not in one)]:
                if _is_ignored((*path, key), ignored):
                    continue
                if key not in one or key not in other:
                    sides = ("present" if key in each else "absent" for each in (one, other))
                    first = first or Difference("presence", (*path, key), *sides)
                else:
                    todo.append(((*path, key), one[key], other[key]))
            if ordered and list(one) != list(other):
                first = first or Difference(
                    "key order",
                    path,
                    ", ".join(one),
                    ", ".join(other),
                    "the keys are in another order",
                )
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                first = first or Difference(
                    "length", path, count(len(one), "item"), count(len(other), "item")
                )
                continue
            for index, (item, its) in enumerate(zip(one, other, strict=True)):
                if ignored and _is_ignored((*path, str(index)), ignored):
                    continue
                if isinstance(item, dict | list):
                    todo.append(((*path, str(index)), item, its))
                elif not same(
                    item, its
                ):  # only the first costs a path and words: lists of numbers are long
                    first = first or Difference(
                        "value", (*path, str(index)), excerpt(item), excerpt(its)
                    )
        elif not same(one, other):
            first = first or Difference("value", path, excerpt(one), excerpt(other))
    return first


def same_exactly(one: Any, other: Any) -> bool:
    """Of the same type as well: 1 differs from true and from 1.0."""
    return type(one) is type(other) and (
        one == other or (one != one and other != other)
    )  # NaN is not itself


class Closeness:
    """Whether two numbers are not further apart than `atol + rtol * |expected|`; anything else must
    be the same.

    `largest` is the most that two numbers were apart so far.
    """

    def __init__(self, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol
        self.largest = 0.0

    def __call__(self, one: Any, other: Any) -> bool:
        if not (is_number(one) and is_number(other)):
            return same_exactly(one, other)
        if one == other or (one != one and other != other):
            return True
        try:
            off, most = abs(one - other), self.atol + self.rtol * abs(one)
        except OverflowError:  # a whole number beyond all floats
            return False
        if math.isfinite(off):
            self.largest = max(self.largest, float(off))
        return math.isfinite(most) and bool(off <= most)


def without(value: Any, ignored: Sequence[Path]) -> Any:
    """A copy of a JSON value as far as something of it is left out, else itself."""
    for path in ignored:
        value = _cut(value, path)
    return value


def _cut(value: Any, path: Path) -> Any:
    word, rest = path[0], path[1:]
    if isinstance(value, dict):
        fits = {key for key in value if word in ("*", key)}
        return {
            key: _cut(item, rest) if key in fits else item
            for key, item in value.items()
            if rest or key not in fits
        }
    if isinstance(value, list):
        picked = [word in ("*", str(index)) for index in range(len(value))]
        return [
            _cut(item, rest) if fits else item
            for item, fits in zip(value, picked, strict=True)
            if rest or not fits
        ]
    return value


def _verdict(verdict: object) -> Difference | None:
    if verdict is True:
        return None
    if verdict is not False and not isinstance(verdict, str):
        raise TypeError(
            f"it returned a {type(verdict).__name__}; it must return True, False or a string with"
            " the reason"
        )
    return Difference("plugin", detail=str(verdict or "the plugin says that they differ"))


def _bytes_differ(first: bytes, second: bytes) -> Difference:
    """Found in steps of a size that costs nothing."""
    place, step = 0, 4096
    while step:
        while first[place : place + step] == second[place : place + step] and place < len(first):
            place += step
        step //= 16
    return Difference(
        "body",
        (),
        count(len(first), "byte"),
        count(len(second), "byte"),
        f"they differ from byte {place} on",
    )


def _never_equal(value: Any) -> list[Path]:
    """The version in an answer of the Open Inference Protocol; identifiers and times in one of
    OpenAI's API or of a reranking.
    """
    if isinstance(value, list):  # the events of a stream
        return (
            [("*", *path) for path in _never_equal(value[0])]
            if value and isinstance(value[0], dict)
            else []
        )
    if not isinstance(value, dict):
        return []
    if "outputs" in value and "model_version" in value:
        return [("model_version",)]
    kind, meta = value.get("type"), value.get("meta")
    if isinstance(kind, str) and kind.startswith("response.") and "sequence_number" in value:
        return [("item_id",), ("item", "id"), *(("response", *path) for path in _OF_RESPONSE)]
    if "results" in value and isinstance(meta, dict) and "api_version" in meta:
        return [("id",)]
    return _OF_OBJECTS.get(str(value.get("object")), [])


def _is_half(value: Any) -> bool:
    """An answer of the Open Inference Protocol with tensors of half precision."""
    outputs = value.get("outputs") if isinstance(value, dict) else None
    return isinstance(outputs, list) and any(
        isinstance(each, dict) and each.get("datatype") in ("FP16", "BF16") for each in outputs
    )


def _is_ignored(path: Path, ignored: Sequence[Path]) -> bool:
    return any(
        len(path) == len(pattern)
        and all(word in ("*", part) for word, part in zip(pattern, path, strict=True))
        for pattern in ignored
    )
