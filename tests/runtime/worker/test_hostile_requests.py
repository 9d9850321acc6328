"""Hostile requests, which are refused without effect on other requests of the batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.served_model import a_served_model, answers_of
from tsx_runtime.errors import BadRequest
from tsx_runtime.wire import TENSORS_HEAD, request_meta
from tsx_runtime.worker.codecs.envelopes import ENVELOPES
from tsx_runtime.worker.codecs.requests import read_row
from tsx_runtime.worker.codecs.v2_binary import row_of_tensors
from tsx_runtime.worker.execution.batch import answer_batch, send_nowhere
from tsx_runtime.worker.handler_api.context import Context

DEEP = b"[" * 100_000
NESTED = b'{"a":' * 990 + b"1" + b"}" * 990


def tensor(tensor_bytes: bytes = b"\0" * 8, **differs: Any) -> tuple[bytes, bytes]:
    """Return the length of the JSON, and the body."""
    entry = {
        "name": "x",
        "datatype": "FP32",
        "shape": [2],
        "parameters": {"binary_data_size": len(tensor_bytes)},
    } | differs
    head = json.dumps({"inputs": [entry]}).encode()
    return b"%d" % len(head), head + tensor_bytes


def with_length(text: bytes) -> tuple[bytes, bytes]:
    return b"%d" % len(text), text


HOSTILE = {
    "JSON nested without end": with_length(DEEP),
    "a length in other digits": ("\u00b2".encode("latin-1"), tensor()[1]),
    "a length of 5000 digits": (b"1" * 5000, tensor()[1]),
    **{f"the length {length!r}": (length, tensor()[1]) for length in (b"", b"0", b"-1", b"1_0")},
    "a size that is infinite": tensor(parameters={"binary_data_size": float("inf")}),
    "a size below zero": tensor(parameters={"binary_data_size": -8}),
    "a size beyond the body": tensor(parameters={"binary_data_size": 9}),
    "a shape that is infinite": tensor(shape=[float("inf")]),
    "a shape beyond 64 bits": tensor(shape=[1 << 70]),
    "a shape whose product overflows": tensor(shape=[1 << 62, 4]),
    "a shape below zero": tensor(shape=[-2, -1]),
    "a shape of too many sizes": tensor(shape=[1] * 1000 + [2]),
    "a shape without elements but with lists": tensor(b"", shape=[10**9, 0]),
    "a shape that is none": tensor(shape={"a": 1}),
    "a datatype that is none": tensor(datatype=["FP32"]),
    "bytes that fill no number": tensor(b"\0" * 7, shape=[2]),
    "BYTES whose lengths lie": tensor(b"\xff\xff\xff\xff", datatype="BYTES", shape=[1]),
    "BYTES that end within a length": tensor(b"\1\0", datatype="BYTES", shape=[1]),
    "inputs that are not tensors": with_length(b'{"inputs": [1]}'),
    "outputs that are not tensors": with_length(b'{"inputs": [], "outputs": [1]}'),
    "outputs that are nameless": with_length(b'{"inputs": [], "outputs": [{}]}'),
    "no inputs": with_length(b"[]"),
    "inputs that are no list": with_length(b'{"inputs": 3}'),
    "bytes that belong to no tensor": (b"14", b'{"inputs": []}abc'),
    "an unknown datatype": tensor(datatype="FP99"),
    "parameters that are none": with_length(b'{"inputs": [], "parameters": [1]}'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_impossible_tensors_fail_alone(kind: str) -> None:
    items = [
        (0, request_meta(f"id-{number}", b"", [(TENSORS_HEAD, length)]), body)
        for number, (length, body) in enumerate((tensor(), HOSTILE[kind], tensor()))
    ]
    model = a_served_model(lambda data, context: ["fine"] * len(data))
    first, (status, _, text), last = answer_batch(model, items, send_nowhere).answers
    body = bytes(text)
    assert first[0] == last[0] == 200
    assert status == 400, body
    message = json.loads(body)["message"]
    assert 0 < len(message) < 500


sizes = st.integers() | st.floats() | st.text(max_size=3) | st.none() | st.booleans()
anything = st.recursive(
    sizes,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "name": anything,
        "datatype": st.sampled_from(["FP32", "BF16", "BYTES", "BOOL", "INT64"]) | anything,
        "shape": st.lists(sizes, max_size=3) | anything,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 20) | sizes})
        | anything,
        "data": anything,
    },
)


@given(st.lists(entries | anything, max_size=3), anything, anything, st.binary(max_size=20))
def test_any_json_instead_of_tensors_is_read_or_refused(
    inputs: list[Any], outputs: Any, parameters: Any, tensor_bytes: bytes
) -> None:
    head = json.dumps({"inputs": inputs, "outputs": outputs, "parameters": parameters}).encode()
    meta = request_meta("id", b"", [(TENSORS_HEAD, b"%d" % len(head))])
    try:
        row, _ = read_row(str(meta, "latin-1"), head + tensor_bytes, decode=True)
        row_of_tensors(row)
    except BadRequest:
        return
    assert "body" in row


types = st.sampled_from(
    [
        "multipart/form-data; boundary",
        "text/plain; charset",
        "application/json; charset",
        "application/x-www-form-urlencoded; charset",
        "application/vnd.tsx.inputs; a",
    ]
)
values = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12) | st.sampled_from(
    [
        "utf-16",
        "idna",
        "undefined",
        "hex",
        '"',
        '"\\',
        "utf-8''%ff",
        "*=utf-8''%e2",
        "punycode",
        "unicode_escape",
        "utf-7",
    ]
)


@given(
    types,
    st.sampled_from(["=", "*=", "*0=", "*0*=", ""]),
    values,
    st.binary(max_size=30),
    st.binary(max_size=12),
)
def test_a_body_of_any_content_type_is_read_or_refused(
    kind: str, sign: str, value: str, body: bytes, query: bytes
) -> None:
    query = bytes(byte for byte in query if byte > 32)
    meta = request_meta("id", query, [(b"content-type", f"{kind}{sign}{value}".encode("latin-1"))])
    try:
        read_row(str(meta, "latin-1"), body, decode=True)
    except BadRequest:
        return


@pytest.fixture
def new_process() -> Iterator[None]:
    """Set the recursion limit of a new process, since torch.compile may have raised it."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("envelope", ["json", "kserve"])
def test_json_that_is_nested_too_deeply_is_refused_by_its_envelope(envelope: str) -> None:
    bodies = [b'{"instances": [%b]}' % NESTED, b'{"instances": [1]}']
    model = a_served_model(ENVELOPES[envelope](lambda data, context: [1] * len(data)).handle)
    bad_answer, good_answer = answers_of(
        model, *bodies, headers=[(b"content-type", b"application/json")]
    )
    assert (bad_answer[0], good_answer[0]) == (400, 200)
    message = json.loads(bad_answer[2])["message"]
    # In some Python versions, the parser has no limit.
    assert "nested too deeply" in message or "recursion" in message


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("error", [ValueError("\ud800 of the client's JSON"), Mute()])
def test_an_exception_without_readable_text_fails_only_its_request(
    error: Exception,
) -> None:
    def handle(data: Any, context: Context) -> Any:
        if any(row["body"] == b"bad" for row in data):
            raise error
        return ["fine"] * len(data)

    good_answer, bad_answer = answers_of(a_served_model(handle), b"good", b"bad")
    assert (good_answer[0], bad_answer[0]) == (200, 500)
    assert json.loads(bad_answer[2])["message"].startswith("Prediction failed: ")
