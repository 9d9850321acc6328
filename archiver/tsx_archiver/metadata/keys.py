"""Reads mappings of foreign files by dataclasses of pydantic: a key that is unknown or wrong is a
problem in words, and the rest holds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StrictInt, ValidationError

from tsx_archiver.names import MIN_SIMILARITY

# The terms of YAML in place of Python's.
_WORDS = {
    "tuple_type": "it must be a list",
    "bool_type": "it must be true or false",
    "dict_type": "it must be a mapping of keys to values",
    "invalid-json-value": "it must be a number, a string, true, false, null, a list or a mapping",
}

KEBAB_KEYS = ConfigDict(alias_generator=lambda name: name.replace("_", "-"), populate_by_name=True)
Count = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
Positive = Annotated[StrictInt, Field(ge=1, lt=1 << 31)]


def keys_of(kind: Any) -> dict[str, str]:
    """Return the keys of a file that a dataclass declares, with its fields."""
    return {
        field.alias or name: name
        for name, field in kind.__pydantic_fields__.items()
        if not field.exclude
    }


def read_keys(
    kind: Any,
    data: Any,
    under: str = "",
    *,
    others: Collection[str] = (),
    closed: bool = False,
    **more: Any,
) -> tuple[Any, list[str]]:
    """Make an instance of `kind` of a mapping's keys; None where that is no mapping or lacks a key
    that has no default.

    `others` are known and not read. Of unknown keys, those near a known one are problems, and with
    `closed` all of them.
    """
    if not isinstance(data, dict):
        return None, [f"{under}: {data!r} is invalid: {_WORDS['dict_type']}"]
    keys, dot = keys_of(kind), f"{under}." if under else ""
    problems = []
    for name in data:
        near = None if name in keys or name in others else _near(str(name), [*keys, *others])
        if near:
            problems.append(f"{dot}{name} is not a known key; did you mean {dot}{near}?")
        elif closed and name not in keys:
            problems.append(f"{dot}{name} is not a known key; the known keys are {', '.join(keys)}")
    values = {name: value for name, value in data.items() if name in keys and value is not None}
    while True:
        try:
            return kind(**values, **more), problems
        except ValidationError as error:
            faults = error.errors(include_url=False)
        found: dict[str, tuple[Any, list[str]]] = {}
        for fault in faults:
            value, reasons = found.setdefault(str(fault["loc"][0]), (fault["input"], []))
            if value is fault["input"]:  # a union has a fault for each of its branches
                reasons.append(_requirement(fault))
        problems += [
            f"{dot}{key}: {value!r} is invalid: {' or '.join(reasons)}"
            for key, (value, reasons) in found.items()
            if key in values
        ]
        missing = [key for key in found if key not in values]
        problems += [f"{dot}{key} is missing" for key in missing if data.get(key) is None]
        if missing:
            return None, problems
        values = {key: value for key, value in values.items() if key not in found}


def _requirement(fault: Mapping[str, Any]) -> str:
    message = fault["msg"].removeprefix("Value error, ").rstrip(".")
    return _WORDS.get(fault["type"]) or re.sub(r"^[A-Z]\w+ should", "it must", message)


def _near(name: str, known: Collection[str]) -> str | None:
    """The known key that `name` probably means; most often the case or a separator differs."""
    folded = {_fold(candidate): candidate for candidate in known}
    match = difflib.get_close_matches(_fold(name), folded, n=1, cutoff=MIN_SIMILARITY)
    return folded[match[0]] if match else None


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
