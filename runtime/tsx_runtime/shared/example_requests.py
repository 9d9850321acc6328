"""Example requests for tensors: a body of zeros, and a command that prints it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

MAX_QUOTED_CHARS = 200  # A longer body is printed by a command instead of being quoted.
MAX_EXAMPLE_NUMBERS = 1 << 22
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
    """An input of a model, from the description by its handler."""

    name: str
    datatype: str | None  # torch's name, such as float32
    shape: tuple[int, ...]  # the shape of one row


def example_body(inputs: Sequence[ExampleInput], envelope: str = "") -> Any:
    """Return one row of zeros in the form that the handler's envelope takes.

    Several inputs become an object with their names as keys.
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
        else {field.name: _zeros(field.shape) for field in inputs}
    )
    return {"instances": [row]} if envelope in ("json", "kserve") or len(inputs) > 1 else row


def read_example(description: Any) -> list[ExampleInput]:
    """Read the inputs from a handler's description, whose form is not guaranteed.

    Returns:
        An empty list if the description has no valid inputs.
    """
    try:
        inputs = [
            ExampleInput(str(field["name"]), field["datatype"], tuple(field["example"]))
            for field in description["inputs"]
        ]
        sizes = [size for field in inputs for size in field.shape]
        is_usable = (
            all(type(size) is int and size > 0 for size in sizes)
            and sum(prod(field.shape) for field in inputs) <= MAX_EXAMPLE_NUMBERS
        )
    except (KeyError, TypeError):
        return []
    return inputs if is_usable else []


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:])] * shape[0] if shape else 0


def printing_command(value: Any) -> str | None:
    """Return a shell command that prints a body, or None if its JSON is short."""
    text = json.dumps(value)
    if len(text) <= MAX_QUOTED_CHARS:
        return None
    expression = _expression(value)
    code = (
        f"print({expression})"
        if isinstance(value, list)
        else f"import json; print(json.dumps({expression}))"
    )
    # The names of inputs come from the model, so they may contain shell syntax.
    return f"python3 -c {shlex.quote(code)}"


def _expression(value: Any) -> str:
    """Write a JSON value as a short Python expression."""
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
