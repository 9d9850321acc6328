"""Converts the body of an answer to a JSON value for comparison, also one with binary tensors."""

from __future__ import annotations

import json
import re
import struct
from typing import Any, Final

from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.wire import TENSORS_HEAD

_LETTERS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
}
LETTERS = _LETTERS | {
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}  # of `struct`, for the datatypes of the Open Inference Protocol

_LINE_END = re.compile(
    "\r\n|\n|\r"
)  # of server-sent events: `splitlines` would also split at U+2028, which JSON may hold


NO_JSON: Final = object()


def read_answer(answer: ComparedAnswer) -> Any:
    """NO_JSON where it is none. Of server-sent events, the list of their JSON."""
    head = answer.headers.get(TENSORS_HEAD.decode())
    length = (
        int(head) if head is not None and head.isascii() and head.isdecimal() else len(answer.body)
    )
    try:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            lines = [
                line.partition(":")[2].strip()
                for line in _LINE_END.split(answer.body.decode())
                if line.startswith("data:")
            ]
            return [load_in_turns(line) for line in lines if line != "[DONE]"]
        value = load_in_turns(answer.body[:length].decode())
        return value if head is None else _with_tensors(value, answer.body[length:])
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, struct.error):
        return NO_JSON


def load_in_turns(text: str) -> Any:
    """For threads: between the numbers of a large document the event loop has its turn, which the
    parser alone would not give it.
    """
    return json.loads(text, parse_float=_float, parse_int=_int)


def _with_tensors(value: Any, raw: bytes) -> Any:
    """The outputs whose data follow as bytes, in their order, as if they were written out."""
    start = 0
    for output in value["outputs"]:
        size = output.get("parameters", {}).pop("binary_data_size", None)
        if size is None:
            continue
        if not 0 <= size <= len(raw) - start:
            raise ValueError("tensors are missing")
        data, letter = raw[start : start + size], LETTERS.get(output["datatype"])
        start += size
        output["data"] = (
            list(data)
            if letter is None
            else list(struct.unpack(f"<{size // struct.calcsize('<' + letter)}{letter}", data))
        )
    if start != len(raw):
        raise ValueError("there is data after the tensors")
    return value


def _float(text: str) -> float:
    return float(text)


def _int(text: str) -> int:
    return int(text)
