"""Splits requests of the Open Inference Protocol by rows, and joins the answers.

These are pure functions of bytes. Numbers are not parsed: JSON is cut at its commas, and binary
data by its sizes. Each part has the numbers exactly as they were sent.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from tsx_runtime.errors import PayloadTooLarge
from tsx_runtime.wire import MAX_COPIED_BYTES, Body, Buffer, Parts

# Bytes of JSON in a request that is split, or in all its parts. Splitting them takes about 20 ms;
# longer JSON would block the event loop for too long.
MAX_JSON_BYTES = 2 << 20
MAX_ELEMENTS = 1 << 16  # limit of the elements of BYTES, for the same reason
SIZE = "binary_data_size"
# The data of a tensor, if it consists of numbers, booleans and null.
_DATA = re.compile(rb'"data"\s*:\s*\[([-+.\d\[\]\seE,truefalsnNIity]*)\]')
_MARK = "\0"  # replaces data that was cut out of the JSON
_MARKED = json.dumps(_MARK).encode()
_LENGTH = struct.Struct("<I")  # the length before each element of BYTES


class RowsPart(NamedTuple):
    """A part of a request, or the answer to such a part."""

    rows: int  # number of rows
    head: int | None  # bytes of JSON at the start of the body; None: all of it
    body: Body


class _Message(NamedTuple):
    json: dict[str, Any]
    tensors: list[dict[str, Any]]
    # The data of each tensor: the text between its brackets, a view of its bytes, or a list.
    data: list[Any]
    indent: int | None


def split(body: Body, head: int | None, max_rows: int, max_parts: int) -> list[RowsPart] | None:
    """Split a request into parts of `max_rows` rows.

    A tensor's rows are along its first dimension, in which all tensors must agree. See
    docs/guides/batching.md.

    Args:
        body: The body of the request.
        head: The bytes of JSON at the start of the body; None: all of it.
        max_rows: The largest number of rows of a part.
        max_parts: The largest number of parts.

    Returns:
        The parts. None if one part would suffice, or if the request has an error, which the worker
        then reports.

    Raises:
        PayloadTooLarge: There would be more than `max_parts` parts.
    """
    try:
        if not 0 < (len(body) if head is None else head) <= min(len(body), MAX_JSON_BYTES):
            return None
        message = _read(RowsPart(0, head, body), "inputs")
        sizes = {tensor["shape"][0] for tensor in message.tensors}
        rows = sizes.pop()
        # A tensor with one dimension is probably a single row.
        has_flat_tensor = any(
            len(tensor["shape"]) == 1 and tensor["datatype"] != "BYTES"
            for tensor in message.tensors
        )
        if sizes or has_flat_tensor or type(rows) is not int or rows <= max_rows:
            return None
        count = -(-rows // max_rows)
        if count > max_parts:
            text = (
                f"The request has {rows} rows, in {count} parts of {max_rows} (splitRows), and the"
                f" queue holds {max_parts} (jobQueueSize)."
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
            > MAX_JSON_BYTES
        ):
            return None
        cutters = [
            _cutter(tensor, data, rows)
            for tensor, data in zip(message.tensors, message.data, strict=True)
        ]
        ranges = [(start, min(start + max_rows, rows)) for start in range(0, rows, max_rows)]
        return [
            _part(message, end - start, [cutter(start, end) for cutter in cutters])
            for start, end in ranges
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
    """Join the answers to the parts of a request, as if one call had answered all rows.

    Returns:
        The number of bytes of JSON at the start of the body, and the body.

    Raises:
        ValueError: The answers cannot be joined.
    """
    try:
        messages = [_read(answer, "outputs") for answer in answers]
        texts: list[bytes] = []
        raw: list[memoryview] = []
        outputs = []
        if len({len(message.tensors) for message in messages}) > 1:
            raise ValueError("they have different numbers of outputs")
        for number, first_output in enumerate(messages[0].tensors):
            for (rows, *_), message in zip(answers, messages, strict=True):
                _check_output(message.tensors[number], first_output, rows)
            output = {
                **first_output,
                "shape": [sum(answer.rows for answer in answers), *first_output["shape"][1:]],
            }
            data = [message.data[number] for message in messages]
            if all(isinstance(piece, memoryview) for piece in data):
                raw += data
                output["parameters"] = {**first_output["parameters"], SIZE: sum(map(len, data))}
            elif all(isinstance(piece, bytes) for piece in data):
                texts.append(_join_texts(data))
            else:
                output["data"] = [
                    *chain.from_iterable(
                        json.loads(b"[%b]" % piece) if type(piece) is bytes else piece
                        for piece in data
                    )
                ]
            outputs.append(output)
        text = _encode(messages[0].json | {"outputs": outputs}, texts, messages[0].indent)
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

    def cut_out(match: re.Match[bytes]) -> bytes:
        texts.append(match[1])
        return b'"data":' + _MARKED

    head = len(body) if part.head is None else part.head
    content = json.loads(_DATA.sub(cut_out, bytes(body[:head])))
    tensors, remaining, data = content[key], memoryview(body)[head:], list[Any]()
    remaining_texts = iter(texts)
    for tensor in tensors:
        size = (tensor.get("parameters") or {}).get(SIZE)
        if size is not None:
            data.append(remaining[:size])
            remaining = remaining[size:]
            if len(data[-1]) != size:
                raise ValueError("its bytes are missing")
        else:
            data.append(next(remaining_texts, None) if tensor["data"] == _MARK else tensor["data"])
    if remaining or None in data or next(remaining_texts, None) is not None:
        raise ValueError("its data do not belong to its tensors")
    return _Message(content, tensors, data, 2 if bytes(body[:2]) == b"{\n" else None)


def _cutter(tensor: dict[str, Any], data: Any, rows: int) -> Callable[[int, int], Any]:
    """Return a function that cuts out the data of the rows from `start` to `end`."""
    cut: Callable[[int, int], Any] = lambda start, end: data[start:end]  # noqa: E731  # like the others
    count = len(data)
    if isinstance(data, memoryview) and tensor["datatype"] == "BYTES":
        ends = _element_ends(data)
        count, cut = len(ends) - 1, lambda start, end: data[ends[start] : ends[end]]
    elif isinstance(data, bytes):
        numbers = data.split(b",")
        count, cut = len(numbers), lambda start, end: b",".join(numbers[start:end])
    values_per_row, remainder = divmod(count, rows)
    if remainder:
        raise ValueError(f"{count} values are not {rows} rows")
    return lambda start, end: cut(start * values_per_row, end * values_per_row)


def _element_ends(data: memoryview) -> list[int]:
    """Return the ends of the elements of BYTES, preceded by 0."""
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + _LENGTH.size + _LENGTH.unpack_from(data, ends[-1])[0])
        if len(ends) > MAX_ELEMENTS:
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
    text = _encode(message.json | {"inputs": inputs}, texts, None)
    size = len(text) + sum(map(len, raw))
    return RowsPart(
        rows,
        len(text),
        b"".join([text, *raw]) if size <= MAX_COPIED_BYTES else Parts([text, *raw], size),
    )


def _encode(content: dict[str, Any], texts: Sequence[bytes], indent: int | None) -> bytes:
    beginning, *followers = json.dumps(content, indent=indent).encode().split(_MARKED)
    return b"".join(
        [
            beginning,
            *chain.from_iterable(
                (b"[", text, b"]", follower)
                for text, follower in zip(texts, followers, strict=True)
            ),
        ]
    )


def _join_texts(texts: Sequence[bytes]) -> bytes:
    """Join the texts of lists, with the white space of the first one."""
    texts = [text for text in texts if text.strip()] or [b""]
    first_text = texts[0]
    leading_space, trailing_space = (
        first_text[: len(first_text) - len(first_text.lstrip())],
        first_text[len(first_text.rstrip()) :],
    )
    return (
        leading_space
        + (b"," + (leading_space or b" ")).join([text.strip() for text in texts])
        + trailing_space
    )


def _check_output(output: dict[str, Any], expected: dict[str, Any], rows: int) -> None:
    is_alike = (
        all(output[key] == expected[key] for key in ("name", "datatype"))
        and output["shape"][1:] == expected["shape"][1:]
    )
    if not is_alike or output["shape"][0] != rows:
        raise ValueError(
            f"its output {output['name']!r} has the shape {output['shape']} for {rows} rows"
        )
