"""The body of a response as a JSON value for a comparison, with decoded binary tensors."""

from __future__ import annotations

import json
import re
import struct
from typing import Any, Final

from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.wire import TENSORS_HEAD

_INTEGER_FORMATS = {
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
# Formats of `struct` by datatype of the Open Inference Protocol.
STRUCT_FORMATS = _INTEGER_FORMATS | {"FP16": "e", "FP32": "f", "FP64": "d"}

# Line ends of server-sent events; `splitlines` would also split at U+2028, which may be in JSON.
_LINE_END = re.compile("\r\n|\n|\r")


NO_JSON: Final = object()


def read_answer(answer: ComparedAnswer) -> Any:
    """Return the JSON value of a response (a list for server-sent events), or NO_JSON."""
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
            return [load_interruptibly(line) for line in lines if line != "[DONE]"]
        value = load_interruptibly(answer.body[:length].decode())
        return value if head is None else _with_tensors(value, answer.body[length:])
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, struct.error):
        return NO_JSON


def load_interruptibly(text: str) -> Any:
    """Parse JSON in a thread so that the event loop can run meanwhile.

    The C parser alone would hold the GIL. It calls these Python functions for each number, which
    let other threads run.
    """
    return json.loads(text, parse_float=_float, parse_int=_int)


def _with_tensors(value: Any, raw: bytes) -> Any:
    """Return a response in which binary tensors are decoded into lists of numbers."""
    start = 0
    for output in value["outputs"]:
        size = output.get("parameters", {}).pop("binary_data_size", None)
        if size is None:
            continue
        if not 0 <= size <= len(raw) - start:
            raise ValueError("tensors are missing")
        data, format = raw[start : start + size], STRUCT_FORMATS.get(output["datatype"])
        start += size
        output["data"] = (
            list(data)
            if format is None
            else list(struct.unpack(f"<{size // struct.calcsize('<' + format)}{format}", data))
        )
    if start != len(raw):
        raise ValueError("there is data after the tensors")
    return value


def _float(text: str) -> float:
    return float(text)


def _int(text: str) -> int:
    return int(text)
