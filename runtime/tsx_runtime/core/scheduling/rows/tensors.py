"""Splits a request of the Open Inference Protocol by rows, and joins the answers of its parts: pure
functions of their bytes.

Numbers are not parsed: those in JSON are cut at their commas and those behind it at their sizes, so
each part has them as they were sent.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from tsx_runtime.errors import PayloadTooLarge
from tsx_runtime.wire import COPIED, Body, Buffer, Parts

LONGEST = (
    2 << 20
    # bytes of JSON that are split, or repeated for parts, in about 20 ms: longer ones would hold up
    # the event loop
)
MOST_TEXTS = 1 << 16  # elements of BYTES that are split, for the same reason
SIZE = "binary_data_size"
_DATA = re.compile(
    rb'"data"\s*:\s*\[([-+.\d\[\]\seE,truefalsnNIity]*)\]'
)  # numbers, booleans and null
_MARK = "\0"  # stands in the JSON for what was cut out of it
_MARKED = json.dumps(_MARK).encode()
_LENGTH = struct.Struct("<I")  # before each element of BYTES


class RowsPart(NamedTuple):
    """Of a request, or the answer to it."""

    rows: int  # of the request
    head: int | None  # bytes of JSON that the body begins with; None: all of it
    body: Body


class _Message(NamedTuple):
    json: dict[str, Any]
    tensors: list[dict[str, Any]]
    data: list[Any]  # of each: the text between its brackets, a view of its bytes, or a list
    indent: int | None


def split(body: Body, head: int | None, most: int, room: int) -> list[RowsPart] | None:
    """In parts of `most` rows.

    None for what has no more rows, or is left for the worker to report: see
    docs/guides/batching.md.

    A tensor's rows are along its first dimension, in which all must agree. `head`: as in RowsPart.
    Raises PayloadTooLarge for more than `room` parts.
    """
    try:
        if not 0 < (len(body) if head is None else head) <= min(len(body), LONGEST):
            return None
        message = _read(RowsPart(0, head, body), "inputs")
        sizes = {tensor["shape"][0] for tensor in message.tensors}
        rows = sizes.pop()
        flat = any(
            len(tensor["shape"]) == 1 and tensor["datatype"] != "BYTES"
            for tensor in message.tensors
        )  # more likely one row
        if sizes or flat or type(rows) is not int or rows <= most:
            return None
        count = -(-rows // most)
        if count > room:
            text = (
                f"The request has {rows} rows, in {count} parts of {most} (splitRows), and the"
                f" queue holds {room} (jobQueueSize)."
            )
            raise PayloadTooLarge(f"{text} Send fewer rows, or raise one of the two.")
        if (
            count
            * len(
                json.dumps(
                    message.json
                    | {"inputs": [tensor | {"data": None} for tensor in message.tensors]}
                )
            )
            > LONGEST
        ):
            return None
        cuts = [
            _cutter(tensor, data, rows)
            for tensor, data in zip(message.tensors, message.data, strict=True)
        ]
        spans = [(start, min(start + most, rows)) for start in range(0, rows, most)]
        return [
            _part(message, end - start, [cut(start, end) for cut in cuts]) for start, end in spans
        ]
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        struct.error,
    ):
        return None


def join(answers: Sequence[RowsPart]) -> tuple[int, bytes]:
    """The bytes of JSON that the body begins with, and the body, as if one call had answered all
    rows. Raises ValueError.
    """
    try:
        messages = [_read(answer, "outputs") for answer in answers]
        texts: list[bytes] = []
        raw: list[memoryview] = []
        outputs = []
        if len({len(message.tensors) for message in messages}) > 1:
            raise ValueError("they have different numbers of outputs")
        for number, first in enumerate(messages[0].tensors):
            for (rows, *_), message in zip(answers, messages, strict=True):
                _check(message.tensors[number], first, rows)
            output = {
                **first,
                "shape": [sum(answer.rows for answer in answers), *first["shape"][1:]],
            }
            data = [message.data[number] for message in messages]
            if all(isinstance(each, memoryview) for each in data):
                raw += data
                output["parameters"] = {**first["parameters"], SIZE: sum(map(len, data))}
            elif all(isinstance(each, bytes) for each in data):
                texts.append(_joined(data))
            else:
                output["data"] = [
                    *chain.from_iterable(
                        json.loads(b"[%b]" % each) if type(each) is bytes else each for each in data
                    )
                ]
            outputs.append(output)
        text = _written(messages[0].json | {"outputs": outputs}, texts, messages[0].indent)
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ValueError(
            f"one is not an answer of the Open Inference Protocol, {type(error).__name__}: {error}"
        ) from error
    return len(text), b"".join([text, *raw])


def _read(part: RowsPart, key: str) -> _Message:
    body, texts = (
        b"".join(part.body.pieces) if isinstance(part.body, Parts) else part.body,
        list[bytes](),
    )

    def cut_out(found: re.Match[bytes]) -> bytes:
        texts.append(found[1])
        return b'"data":' + _MARKED

    head = len(body) if part.head is None else part.head
    content = json.loads(_DATA.sub(cut_out, bytes(body[:head])))
    tensors, rest, data = content[key], memoryview(body)[head:], list[Any]()
    left = iter(texts)
    for tensor in tensors:
        size = (tensor.get("parameters") or {}).get(SIZE)
        if size is not None:
            data.append(rest[:size])
            rest = rest[size:]
            if len(data[-1]) != size:
                raise ValueError("its bytes are missing")
        else:
            data.append(next(left, None) if tensor["data"] == _MARK else tensor["data"])
    if rest or None in data or next(left, None) is not None:
        raise ValueError("its data do not belong to its tensors")
    return _Message(content, tensors, data, 2 if bytes(body[:2]) == b"{\n" else None)


def _cutter(tensor: dict[str, Any], data: Any, rows: int) -> Callable[[int, int], Any]:
    """Gives the data of the rows from one up to another."""
    take: Callable[[int, int], Any] = lambda start, end: data[start:end]  # noqa: E731  # as the others
    count = len(data)
    if isinstance(data, memoryview) and tensor["datatype"] == "BYTES":
        ends = _ends(data)
        count, take = len(ends) - 1, lambda start, end: data[ends[start] : ends[end]]
    elif isinstance(data, bytes):
        numbers = data.split(b",")
        count, take = len(numbers), lambda start, end: b",".join(numbers[start:end])
    step, odd = divmod(count, rows)
    if odd:
        raise ValueError(f"{count} values are not {rows} rows")
    return lambda start, end: take(start * step, end * step)


def _ends(data: memoryview) -> list[int]:
    """Where the elements of BYTES end, the first entry being their beginning."""
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + _LENGTH.size + _LENGTH.unpack_from(data, ends[-1])[0])
        if len(ends) > MOST_TEXTS:
            raise ValueError("it has too many elements")
    if ends[-1] != len(data):
        raise ValueError("the lengths of its elements do not add up")
    return ends


def _part(message: _Message, rows: int, pieces: Iterable[Any]) -> RowsPart:
    texts, raw, inputs = list[bytes](), list[Buffer](), []
    for tensor, piece in zip(message.tensors, pieces, strict=True):
        part = {**tensor, "shape": [rows, *tensor["shape"][1:]]}
        if isinstance(piece, memoryview):
            raw.append(piece)
            part["parameters"] = {**tensor["parameters"], SIZE: len(piece)}
        elif isinstance(piece, bytes):
            if piece.count(b"[") != piece.count(b"]"):
                raise ValueError("its lists are not its rows")
            texts.append(piece)
        else:
            part["data"] = piece
        inputs.append(part)
    text = _written(message.json | {"inputs": inputs}, texts, None)
    size = len(text) + sum(map(len, raw))
    return RowsPart(
        rows, len(text), b"".join([text, *raw]) if size <= COPIED else Parts([text, *raw], size)
    )


def _written(content: dict[str, Any], texts: Sequence[bytes], indent: int | None) -> bytes:
    first, *others = json.dumps(content, indent=indent).encode().split(_MARKED)
    return b"".join(
        [
            first,
            *chain.from_iterable(
                (b"[", text, b"]", other) for text, other in zip(texts, others, strict=True)
            ),
        ]
    )


def _joined(texts: Sequence[bytes]) -> bytes:
    """With the white space that the first has."""
    texts = [text for text in texts if text.strip()] or [b""]
    first = texts[0]
    before, behind = first[: len(first) - len(first.lstrip())], first[len(first.rstrip()) :]
    return before + (b"," + (before or b" ")).join([text.strip() for text in texts]) + behind


def _check(output: dict[str, Any], first: dict[str, Any], rows: int) -> None:
    alike = (
        all(output[key] == first[key] for key in ("name", "datatype"))
        and output["shape"][1:] == first["shape"][1:]
    )
    if not alike or output["shape"][0] != rows:
        raise ValueError(
            f"its output {output['name']!r} has the shape {output['shape']} for {rows} rows"
        )
