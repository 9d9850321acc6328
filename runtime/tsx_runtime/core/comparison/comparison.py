"""The comparison of two responses: within a tolerance, exactly, by top labels, or by a plugin.

All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tsx_runtime.core.comparison.difference import Difference, count, excerpt
from tsx_runtime.core.comparison.response_body import NO_JSON, read_answer
from tsx_runtime.core.comparison.top_k import first_difference, is_number
from tsx_runtime.errors import is_failure
from tsx_runtime.plugins import ComparedAnswer, Comparison
from tsx_runtime.settings.traffic_policy import Compare

_HALF_TOLERANCE = (1e-2, 1e-3)
# If a logit of 10 changes by 0.1, a probability of one half changes by 0.025.
_COARSE_TOLERANCE = (1e-1, 1e-2)
# rtol and atol by the precision of a model: a little more than its numbers differ between machines
# or batch sizes.
TOLERANCES = {
    "fp32": (1e-4, 1e-6),
    "fp16": _HALF_TOLERANCE,
    "bf16": _HALF_TOLERANCE,
    "int8": _COARSE_TOLERANCE,
    "int4": _COARSE_TOLERANCE,
    "pruned": _COARSE_TOLERANCE,
}
DEFAULT_K = 1  # number of labels that the kind top-k compares

Path = tuple[str, ...]
IsSame = Callable[[Any, Any], bool]

# Paths of identifiers and times in responses of OpenAI's API. The field `object` tells the kind.
_RESPONSE_PATHS: list[Path] = [("id",), ("created_at",), ("output", "*", "id")]
_COMPLETION_PATHS: list[Path] = [
    ("id",),
    ("created",),
    ("choices", "*", "*", "tool_calls", "*", "id"),
]
_PATHS_BY_OBJECT = {"response": _RESPONSE_PATHS} | dict.fromkeys(
    ("chat.completion", "chat.completion.chunk", "text_completion"), _COMPLETION_PATHS
)


class ComparisonResult(NamedTuple):
    """The first difference, or None, and the largest difference between two numbers."""

    difference: Difference | None
    largest: float = 0.0


def tolerance_of(config: Compare, *precisions: str | None) -> tuple[float, float]:
    """Return rtol and atol: the configured values, or those for the coarsest precision.

    A model of unknown precision counts as fp32.
    """
    rtol, atol = max(
        TOLERANCES.get((precision or "fp32").lower(), TOLERANCES["fp32"])
        for precision in precisions or (None,)
    )
    return (
        rtol if config.rtol is None else config.rtol,
        atol if config.atol is None else config.atol,
    )


def compare(
    config: Compare,
    request: bytes,
    expected: ComparedAnswer,
    actual: ComparedAnswer,
    plugin: Comparison | None = None,
    precisions: Sequence[str | None] = (),
) -> ComparisonResult:
    """Compare the responses to one request.

    Args:
        config: The kind of comparison and its settings.
        request: The body of the request, for a plugin.
        expected: The response of the primary version.
        actual: The other response.
        plugin: The function of the plugin that `config` names.
        precisions: The known precisions of the models that answered.
    """
    if expected.status != actual.status:
        return ComparisonResult(Difference("status", (), str(expected.status), str(actual.status)))
    if is_failure(expected.status):
        return ComparisonResult(None)  # The texts of two errors may differ in request ids or times.
    if plugin is not None:
        return ComparisonResult(_plugin_difference(plugin(request, expected, actual)))
    closeness = Closeness(*tolerance_of(config, *precisions))
    difference = compare_bodies(
        expected, actual, lambda a, b: _compare_values(config, closeness, expected, actual, a, b)
    )
    return ComparisonResult(difference, closeness.largest)


def compare_bodies(
    expected: ComparedAnswer,
    actual: ComparedAnswer,
    compare_values: Callable[[Any, Any], Difference | None],
) -> Difference | None:
    """Compare bodies with `compare_values` if both are JSON, and by their bytes if neither is."""
    if expected.body == actual.body:
        return None
    a, b = read_answer(expected), read_answer(actual)
    if (a is NO_JSON) != (b is NO_JSON):
        return Difference(
            "value", (), *("not JSON" if value is NO_JSON else "JSON" for value in (a, b))
        )
    return _bytes_differ(expected.body, actual.body) if a is NO_JSON else compare_values(a, b)


def _compare_values(
    config: Compare,
    closeness: Closeness,
    expected: ComparedAnswer,
    actual: ComparedAnswer,
    a: Any,
    b: Any,
) -> Difference | None:
    ignored = [tuple(path.split(".")) for path in config.ignore]
    ignored += set(_variable_paths(a)).intersection(_variable_paths(b))
    if config.kind == "top-k":
        return first_difference(
            without_paths(a, ignored),
            without_paths(b, ignored),
            DEFAULT_K if config.k is None else config.k,
        )
    if config.rtol is None and config.atol is None and (_is_half(a) or _is_half(b)):
        closeness.rtol, closeness.atol = max(_HALF_TOLERANCE, (closeness.rtol, closeness.atol))
    numeric_difference = json_difference(a, b, closeness, ignored)
    if config.kind == "numeric":
        return numeric_difference
    exact_difference = json_difference(a, b, same_exactly, ignored)
    return exact_difference or (None if ignored else _bytes_differ(expected.body, actual.body))


def json_difference(
    expected: Any,
    actual: Any,
    is_same: IsSame,
    ignored: Sequence[Path] = (),
    *,
    ordered: bool = False,
) -> Difference | None:
    """Return the first difference of two JSON values at any depth.

    Args:
        expected: A JSON value.
        actual: The other JSON value.
        is_same: Compares values that are neither objects nor lists.
        ignored: Paths that are not compared.
        ordered: Whether the order of keys counts.
    """
    first: Difference | None = None
    pending: list[tuple[Path, Any, Any]] = [((), expected, actual)]
    while pending:
        path, a, b = pending.pop()
        if isinstance(a, dict) and isinstance(b, dict):
            for key in [*a, *(key for key in b if key not in a)]:
                if _is_ignored((*path, key), ignored):
                    continue
                if key not in a or key not in b:
                    sides = ("present" if key in value else "absent" for value in (a, b))
                    first = first or Difference("presence", (*path, key), *sides)
                else:
                    pending.append(((*path, key), a[key], b[key]))
            if ordered and list(a) != list(b):
                first = first or Difference(
                    "key order", path, ", ".join(a), ", ".join(b), "the keys are in another order"
                )
        elif isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                first = first or Difference(
                    "length", path, count(len(a), "item"), count(len(b), "item")
                )
                continue
            for index, (item, b_item) in enumerate(zip(a, b, strict=True)):
                if ignored and _is_ignored((*path, str(index)), ignored):
                    continue
                if isinstance(item, dict | list):
                    pending.append(((*path, str(index)), item, b_item))
                # Lists of numbers are long, so path and excerpts are made only for a difference.
                elif not is_same(item, b_item):
                    first = first or Difference(
                        "value", (*path, str(index)), excerpt(item), excerpt(b_item)
                    )
        elif not is_same(a, b):
            first = first or Difference("value", path, excerpt(a), excerpt(b))
    return first


def same_exactly(a: Any, b: Any) -> bool:
    """Tell whether two values have the same type and value: 1 differs from true and from 1.0."""
    # Here, NaN equals NaN.
    return type(a) is type(b) and (a == b or (a != a and b != b))


class Closeness:
    """Compares values: two numbers may differ by at most `atol + rtol * |expected|`.

    Other values must be the same. `largest` is the largest difference of numbers so far.
    """

    def __init__(self, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol
        self.largest = 0.0

    def __call__(self, a: Any, b: Any) -> bool:
        if not (is_number(a) and is_number(b)):
            return same_exactly(a, b)
        if a == b or (a != a and b != b):
            return True
        try:
            distance, limit = abs(a - b), self.atol + self.rtol * abs(a)
        except OverflowError:  # An integer is too large for a float.
            return False
        if math.isfinite(distance):
            self.largest = max(self.largest, float(distance))
        return math.isfinite(limit) and bool(distance <= limit)


def without_paths(value: Any, ignored: Sequence[Path]) -> Any:
    """Return a JSON value without the ignored paths; only changed parts are copied."""
    for path in ignored:
        value = _without_path(value, path)
    return value


def _without_path(value: Any, path: Path) -> Any:
    part, remaining = path[0], path[1:]
    if isinstance(value, dict):
        matching_keys = {key for key in value if part in ("*", key)}
        return {
            key: _without_path(item, remaining) if key in matching_keys else item
            for key, item in value.items()
            if remaining or key not in matching_keys
        }
    if isinstance(value, list):
        matches = [part in ("*", str(index)) for index in range(len(value))]
        return [
            _without_path(item, remaining) if is_match else item
            for item, is_match in zip(value, matches, strict=True)
            if remaining or not is_match
        ]
    return value


def _plugin_difference(verdict: object) -> Difference | None:
    if verdict is True:
        return None
    if verdict is not False and not isinstance(verdict, str):
        raise TypeError(
            f"it returned a {type(verdict).__name__}; it must return True, False or a string with"
            " the reason"
        )
    return Difference("plugin", detail=str(verdict or "the plugin says that they differ"))


def _bytes_differ(first: bytes, second: bytes) -> Difference:
    """Describe the first difference of two bodies, which is found quickly, block by block."""
    offset, step = 0, 4096
    while step:
        while first[offset : offset + step] == second[offset : offset + step] and offset < len(
            first
        ):
            offset += step
        step //= 16
    return Difference(
        "body",
        (),
        count(len(first), "byte"),
        count(len(second), "byte"),
        f"they differ from byte {offset} on",
    )


def _variable_paths(value: Any) -> list[Path]:
    """Return the paths of values that differ between any two responses.

    They are the version in a response of the Open Inference Protocol, and identifiers and times in
    a response of OpenAI's API or of a reranker.
    """
    if isinstance(value, list):  # the events of a stream
        return (
            [("*", *path) for path in _variable_paths(value[0])]
            if value and isinstance(value[0], dict)
            else []
        )
    if not isinstance(value, dict):
        return []
    if "outputs" in value and "model_version" in value:
        return [("model_version",)]
    kind, meta = value.get("type"), value.get("meta")
    if isinstance(kind, str) and kind.startswith("response.") and "sequence_number" in value:
        return [("item_id",), ("item", "id"), *(("response", *path) for path in _RESPONSE_PATHS)]
    if "results" in value and isinstance(meta, dict) and "api_version" in meta:
        return [("id",)]
    return _PATHS_BY_OBJECT.get(str(value.get("object")), [])


def _is_half(value: Any) -> bool:
    """Tell whether a response of the Open Inference Protocol has tensors of half precision."""
    outputs = value.get("outputs") if isinstance(value, dict) else None
    return isinstance(outputs, list) and any(
        isinstance(output, dict) and output.get("datatype") in ("FP16", "BF16")
        for output in outputs
    )


def _is_ignored(path: Path, ignored: Sequence[Path]) -> bool:
    return any(
        len(path) == len(pattern)
        and all(
            expected_part in ("*", part) for expected_part, part in zip(pattern, path, strict=True)
        )
        for pattern in ignored
    )
