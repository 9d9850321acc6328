"""Whether two versions answered alike: exactly, within a tolerance, by their best labels, or as a plugin judges. Pure functions.

Each returns None where the answers agree, else a sentence that says where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tsx_runtime.core.shadowing.response_body import NO_JSON, read_answer
from tsx_runtime.core.shadowing.top_k import first_difference
from tsx_runtime.errors import is_failure
from tsx_runtime.plugins import ComparedAnswer, Comparison
from tsx_runtime.settings.traffic_policy import Compare

RTOL, ATOL = 1e-4, 1e-6  # where nothing else is said: what numbers of float32 differ by between two machines, and some more
BEST = 1  # label, of the kind top-k
SHOWN = 60  # characters of a value that a sentence quotes

Path = tuple[str, ...]
Same = Callable[[Any, Any], bool]


def compare(how: Compare, request: bytes, first: ComparedAnswer, second: ComparedAnswer, plugin: Comparison | None = None) -> str | None:
    """`first` is what the client got, `plugin` the function for the kind of that name."""
    if first.status != second.status:
        return f"status {first.status}, and {second.status} of the shadow"
    if is_failure(first.status):
        return None  # both failed, each in its own words
    if plugin is not None:
        return _judged(plugin(request, first, second))
    if first.body == second.body:
        return None
    one, other = read_answer(first), read_answer(second)
    if one is NO_JSON or other is NO_JSON:
        return _kinds_differ(one, other) or _bytes_differ(first.body, second.body)
    ignored = [tuple(path.split(".")) for path in how.ignore]
    if _names_its_version(one) and _names_its_version(other):
        ignored.append(("model_version",))
    if how.kind == "exact" and not ignored:
        return differing(one, other, same_exactly) or _bytes_differ(first.body, second.body)
    if how.kind == "top-k":
        return first_difference(without(one, ignored), without(other, ignored), BEST if how.k is None else how.k)
    if how.kind == "numeric":
        return differing(one, other, within(RTOL if how.rtol is None else how.rtol, ATOL if how.atol is None else how.atol), ignored)
    return differing(one, other, same_exactly, ignored)


def differing(first: Any, second: Any, same: Same, ignored: Sequence[Path] = ()) -> str | None:
    """Of two JSON values, where they differ; `same` says it of what is neither an object nor a list. However deep they are."""
    todo: list[tuple[Path, Any, Any]] = [((), first, second)]
    while todo:
        path, one, other = todo.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            for key in [*one, *(key for key in other if key not in one)]:
                if _is_ignored((*path, key), ignored):
                    continue
                if key not in one or key not in other:
                    return f"{_place((*path, key))}: only the {'shadow' if key in other else 'client'}'s answer has it"
                todo.append(((*path, key), one[key], other[key]))
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return f"{_place(path)}: {len(one)} items, and {len(other)} of the shadow"
            for index, (item, its) in enumerate(zip(one, other, strict=True)):
                settled = not isinstance(item, dict | list) and same(item, its)  # as most numbers are, which costs no path
                if not settled and not _is_ignored((*path, str(index)), ignored):
                    todo.append(((*path, str(index)), item, its))
        elif not same(one, other):
            return f"{_place(path)}: {_shown(one)}, and {_shown(other)} of the shadow"
    return None


def same_exactly(one: Any, other: Any) -> bool:
    """Of the same type as well: neither is 1 the same as true, nor as 1.0."""
    return type(one) is type(other) and (one == other or (one != one and other != other))  # NaN is not itself


def within(rtol: float, atol: float) -> Same:
    """Numbers that are not further apart than `atol + rtol * |the client's|`; anything else must be the same."""

    def same(one: Any, other: Any) -> bool:
        if not (_is_number(one) and _is_number(other)):
            return same_exactly(one, other)
        if one == other or (one != one and other != other):
            return True
        try:
            off, most = abs(one - other), atol + rtol * abs(one)
            return math.isfinite(most) and bool(off <= most)
        except OverflowError:  # a whole number beyond all floats
            return False

    return same


def without(value: Any, ignored: Sequence[Path]) -> Any:
    """A copy of a JSON value as far as something of it is left out, else itself."""
    for path in ignored:
        value = _cut(value, path)
    return value


def _cut(value: Any, path: Path) -> Any:
    word, rest = path[0], path[1:]
    if isinstance(value, dict):
        fits = {key for key in value if word in ("*", key)}
        return {key: _cut(item, rest) if key in fits else item for key, item in value.items() if rest or key not in fits}
    if isinstance(value, list):
        picked = [word in ("*", str(index)) for index in range(len(value))]
        return [_cut(item, rest) if fits else item for item, fits in zip(value, picked, strict=True) if rest or not fits]
    return value


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _judged(verdict: object) -> str | None:
    """What a plugin said."""
    if isinstance(verdict, bool):
        return None if verdict else "the plugin says that they differ"
    if not isinstance(verdict, str):
        raise TypeError(f"it returned a {type(verdict).__name__}, neither True nor False nor a text that says why not")
    return verdict or "the plugin says that they differ"


def _kinds_differ(one: Any, other: Any) -> str | None:
    if (one is NO_JSON) == (other is NO_JSON):
        return None
    return f"the {'shadow' if one is NO_JSON else 'client'}'s answer is JSON, and the other is not"


def _bytes_differ(first: bytes, second: bytes) -> str:
    """Where the first difference is, found in steps of a size that costs nothing."""
    place, step = 0, 4096
    while step:
        while first[place : place + step] == second[place : place + step] and place < len(first):
            place += step
        step //= 16
    lengths = f"{len(first)} bytes, and {len(second)} of the shadow; " if len(first) != len(second) else ""
    return f"{lengths}the bodies differ from byte {place} on"


def _names_its_version(value: Any) -> bool:
    """An answer of the Open Inference Protocol, which has the version that gave it: there, two never agree."""
    return isinstance(value, dict) and "outputs" in value and "model_version" in value


def _is_ignored(path: Path, ignored: Sequence[Path]) -> bool:
    return any(
        len(path) == len(pattern) and all(word in ("*", part) for word, part in zip(pattern, path, strict=True)) for pattern in ignored
    )


def _place(path: Path) -> str:
    return ".".join(path) or "the whole"


def _shown(value: Any) -> str:
    text = f"{'an object' if isinstance(value, dict) else 'a list' if isinstance(value, list) else repr(value)}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
