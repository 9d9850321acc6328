"""Examples of requests for tensors: zeros of the right shape, as a body and as a command that
prints it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

SHORT = 200  # characters of a body that is quoted as it is
MOST_NUMBERS = 1 << 22
OIP_TYPES = {
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
}


class ExampleInput(NamedTuple):
    name: str
    datatype: str | None  # as torch and numpy call it
    shape: tuple[int, ...]  # of a row


def example_body(inputs: Sequence[ExampleInput], envelope: str = "") -> Any:
    """One row of zeros; several inputs by their names.

    In the form that the envelope around the handler takes.
    """
    if envelope == "kservev2":
        return {
            "inputs": [
                {
                    "name": name or "input",
                    "shape": [1, *shape],
                    "datatype": OIP_TYPES.get(kind or "", "FP32"),
                    "data": [0] * prod(shape),
                }
                for name, kind, shape in inputs
            ]
        }
    row = (
        _zeros(inputs[0].shape)
        if len(inputs) == 1
        else {each.name: _zeros(each.shape) for each in inputs}
    )
    return {"instances": [row]} if envelope in ("json", "kserve") or len(inputs) > 1 else row


def read_example(described: Any) -> list[ExampleInput]:
    """What a handler's description says of its inputs; empty where it does not.

    It may say anything.
    """
    try:
        found = [
            ExampleInput(str(each["name"]), each["datatype"], tuple(each["example"]))
            for each in described["inputs"]
        ]
        sizes = [size for each in found for size in each.shape]
        usable = (
            all(type(size) is int and size > 0 for size in sizes)
            and sum(prod(each.shape) for each in found) <= MOST_NUMBERS
        )
    except (KeyError, TypeError):
        return []
    return found if usable else []


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:])] * shape[0] if shape else 0


def printing_command(value: Any) -> str | None:
    """A shell's command that prints a body; None where the JSON itself is short."""
    text = json.dumps(value)
    if len(text) <= SHORT:
        return None
    expression = _expression(value)
    code = (
        f"print({expression})"
        if isinstance(value, list)
        else f"import json; print(json.dumps({expression}))"
    )
    return f"python3 -c {shlex.quote(code)}"  # the names of inputs are the model's own


def _expression(value: Any) -> str:
    """Of Python."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{json.dumps(name)}: {_expression(entry)}" for name, entry in value.items()
            )
            + "}"
        )
    if not isinstance(value, list):
        return json.dumps(value)
    if len(value) > 1 and value.count(value[0]) == len(value):
        return f"[{_expression(value[0])}]*{len(value)}"
    return f"[{', '.join(map(_expression, value))}]"
