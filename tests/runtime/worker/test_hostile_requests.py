"""Hostile requests: each is refused by a message, and its neighbours in the batch are answered."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.served_model import a_served_model, answers_of
from tsx_runtime.wire import TENSORS_HEAD, request_meta
from tsx_runtime.worker.codecs.envelopes import ENVELOPES
from tsx_runtime.worker.execution.batch import answer_batch, send_nowhere

NESTED = b'{"a":' * 700 + b"1" + b"}" * 700


def tensor(raw: bytes = b"\0" * 8, **differs: Any) -> tuple[bytes, bytes]:
    """Return the length of the JSON, and the body."""
    entry = {
        "name": "x",
        "datatype": "FP32",
        "shape": [2],
        "parameters": {"binary_data_size": len(raw)},
    } | differs
    head = json.dumps({"inputs": [entry]}).encode()
    return b"%d" % len(head), head + raw


def with_length(text: bytes) -> tuple[bytes, bytes]:
    return b"%d" % len(text), text


HOSTILE = {
    "a size below zero": tensor(parameters={"binary_data_size": -8}),
    "a size beyond the body": tensor(parameters={"binary_data_size": 9}),
    "a shape beyond 64 bits": tensor(shape=[1 << 70]),
    "a shape whose product overflows": tensor(shape=[1 << 62, 4]),
    "a shape below zero": tensor(shape=[-2, -1]),
    "a shape of too many sizes": tensor(shape=[1] * 1000 + [2]),
    "a shape that is none": tensor(shape={"a": 1}),
    "a datatype that is none": tensor(datatype=["FP32"]),
    "bytes that fill no number": tensor(b"\0" * 7, shape=[2]),
    "BYTES whose lengths lie": tensor(b"\xff\xff\xff\xff", datatype="BYTES", shape=[1]),
    "BYTES that end within a length": tensor(b"\1\0", datatype="BYTES", shape=[1]),
    "inputs that are not tensors": with_length(b'{"inputs": [1]}'),
    "The handler returned outputs that are not tensors:": with_length(
        b'{"inputs": [], "outputs": [1]}'
    ),
    "parameters that are none": with_length(b'{"inputs": [], "parameters": [1]}'),
    "outputs that are nameless": with_length(b'{"inputs": [], "outputs": [{}]}'),
    "no inputs": with_length(b"[]"),
    "inputs that are no list": with_length(b'{"inputs": 3}'),
    "bytes that belong to no tensor": (b"14", b'{"inputs": []}abc'),
    "an unknown datatype": tensor(datatype="FP99"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_invalid_tensors_are_refused_and_their_neighbours_answered(kind: str) -> None:
    items = [
        (0, request_meta(f"id-{number}", b"", [(TENSORS_HEAD, length)]), body)
        for number, (length, body) in enumerate((tensor(), HOSTILE[kind], tensor()))
    ]
    model = a_served_model(lambda data, context: ["fine"] * len(data))
    first, (status, _, text), last = answer_batch(model, items, send_nowhere).answers
    body = bytes(text)
    assert first[0] == last[0] == 200
    assert status == 400, body
    assert 0 < len(json.loads(body)["message"]) < 500


@pytest.fixture
def new_process() -> Iterator[None]:
    """Set a new process's recursion limit, which torch.compile may have raised in this one."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("envelope", ["json", "kserve"])
def test_json_that_is_nested_too_deeply_is_refused_by_its_envelope(envelope: str) -> None:
    bodies = [b'{"instances": [%b]}' % NESTED, b'{"instances": [1]}']
    model = a_served_model(ENVELOPES[envelope](lambda data, context: [1] * len(data)).handle)
    bad, good = answers_of(model, *bodies, headers=[(b"content-type", b"application/json")])
    assert (bad[0], good[0]) == (400, 200)
    message = json.loads(bad[2])["message"]
    # The parser refuses it in some versions of Python, and the server in others.
    assert "nested too deeply" in message or "recursion" in message
