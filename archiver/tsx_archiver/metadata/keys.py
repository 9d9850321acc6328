"""The parsing of users' mappings by pydantic dataclasses.

An unknown key or a wrong value is reported as a problem and ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StrictInt, ValidationError

from tsx_archiver.names import MIN_SIMILARITY

# Messages in terms of YAML, by pydantic's type of error.
_MESSAGES = {
    "tuple_type": "it must be a list",
    "bool_type": "it must be true or false",
    "dict_type": "it must be a mapping of keys to values",
    "invalid-json-value": "it must be a number, a string, true, false, null, a list or a mapping",
}

KEBAB_KEYS = ConfigDict(alias_generator=lambda name: name.replace("_", "-"), populate_by_name=True)
Count = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
Positive = Annotated[StrictInt, Field(ge=1, lt=1 << 31)]


def keys_of(kind: Any) -> dict[str, str]:
    """Return the field for each key of a file that a dataclass or a model declares."""
    fields = getattr(kind, "model_fields", None) or kind.__pydantic_fields__
    return {field.alias or name: name for name, field in fields.items() if not field.exclude}


def read_keys(
    kind: Any,
    data: Any,
    section: str = "",
    *,
    ignored: Collection[str] = (),
    closed: bool = False,
    **fields: Any,
) -> tuple[Any, list[str]]:
    """Parse a mapping.

    Args:
        kind: The dataclass or model.
        data: The mapping.
        section: The name of the mapping in the file, for problems.
        ignored: Known keys that this dataclass does not read.
        closed: Whether every unknown key is a problem, not only one similar to a known key.
        **fields: Further fields of the dataclass.

    Returns:
        An instance and the problems. The instance is None if `data` is not a mapping, or lacks a
        key without a default.
    """
    if not isinstance(data, dict):
        return None, [f"{section}: {data!r} is invalid: {_MESSAGES['dict_type']}"]
    keys, prefix = keys_of(kind), f"{section}." if section else ""
    problems = []
    for name in data:
        is_known = name in keys or name in ignored
        similar = None if is_known else _similar(str(name), [*keys, *ignored])
        if similar:
            problems.append(f"{prefix}{name} is not a known key; did you mean {prefix}{similar}?")
        elif closed and name not in keys:
            known = ", ".join(keys)
            problems.append(f"{prefix}{name} is not a known key; the known keys are {known}")
    values = {name: value for name, value in data.items() if name in keys and value is not None}
    while True:
        try:
            return kind(**values, **fields), problems
        except ValidationError as error:
            faults = error.errors(include_url=False)
        by_key: dict[str, tuple[Any, list[str]]] = {}
        for fault in faults:
            value, reasons = by_key.setdefault(str(fault["loc"][0]), (fault["input"], []))
            if value is fault["input"]:  # pydantic reports a fault of a union once per branch.
                reasons.append(_requirement(fault))
        problems += [
            f"{prefix}{key}: {value!r} is invalid: {' or '.join(reasons)}"
            for key, (value, reasons) in by_key.items()
            if key in values
        ]
        missing = [key for key in by_key if key not in values]
        problems += [f"{prefix}{key} is missing" for key in missing if data.get(key) is None]
        if missing:
            return None, problems
        values = {key: value for key, value in values.items() if key not in by_key}


def _requirement(fault: Mapping[str, Any]) -> str:
    message = fault["msg"].removeprefix("Value error, ").rstrip(".")
    return _MESSAGES.get(fault["type"]) or re.sub(r"^[A-Z]\w+ should", "it must", message)


def _similar(name: str, known: Collection[str]) -> str | None:
    """Return the known key that `name` probably means.

    Keys are compared without case and separators, which users often confuse.
    """
    keys_by_fold = {_fold(candidate): candidate for candidate in known}
    match = difflib.get_close_matches(_fold(name), keys_by_fold, n=1, cutoff=MIN_SIMILARITY)
    return keys_by_fold[match[0]] if match else None


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
