"""Envelopes unwrap requests for the handler and wrap its answers."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.served_model import a_context, a_served_model, answers_of
from tsx_runtime.errors import PredictionFailed
from tsx_runtime.wire import NODE_HEADER, request_meta
from tsx_runtime.worker.codecs.envelopes import ENVELOPES
from tsx_runtime.worker.codecs.json_text import JsonText
from tsx_runtime.worker.codecs.v2_json import output_tensor, read_input
from tsx_runtime.worker.exceptions import BadRows
from tsx_runtime.worker.handler_api.context import Context

Seen = list[Any]


def a_batch(*metas: bytes) -> Context:
    """Return a context whose batch has these requests."""
    context = a_context(manifest={"model": {"modelVersion": "1.0"}})
    context.begin([meta.decode() for meta in metas])
    return context


def requests(count: int, **headers: str) -> list[bytes]:
    """Return the metas of requests with ids `id-0`, `id-1` and so on."""
    block = [(name.encode(), value.encode()) for name, value in headers.items()]
    return [request_meta(f"id-{idx}", b"", block) for idx in range(count)]


def run(
    name: str,
    bodies: list[Any],
    act: Callable[[list[Any], Context], Any] | None = None,
    **headers: str,
) -> tuple[Any, Seen]:
    """Return the answers, and the rows of each call of the handler."""
    seen: Seen = []

    def handler(data: Any, context: Context) -> Any:
        seen.append(list(data))
        return act(data, context) if act else list(data)

    return ENVELOPES[name](handler).handle(
        [{"body": body} for body in bodies], a_batch(*requests(len(bodies), **headers))
    ), seen


def test_body_hands_over_what_is_in_the_rows() -> None:
    context = a_batch(*requests(2))
    answers = ENVELOPES["body"](lambda data, context: [data]).handle(
        [{"data": b"a"}, {"body": {"b": 1}}], context
    )
    assert answers == [[b"a", {"b": 1}]]


def test_json_calls_the_handler_once_for_the_instances_of_all_requests() -> None:
    answers, seen = run(
        "json", [{"instances": [1, {"x": 2}]}, b'{"instances": [[3]]}', {"instances": []}]
    )
    assert seen == [[1, {"x": 2}, [3]]]
    assert answers == [
        '{"predictions": [1, {"x": 2}]}',
        '{"predictions": [[3]]}',
        '{"predictions": []}',
    ]


def test_base64_entries_come_as_bytes() -> None:
    text = base64.b64encode(b"\x00\xff").decode()
    _, seen = run(
        "kserve",
        [{"instances": [{"b64": text}, {"data": {"b64": text}, "n": 1}, [{"b64": text}], [1, 2]]}],
    )
    assert seen == [[b"\x00\xff", {"data": b"\x00\xff", "n": 1}, [b"\x00\xff"], [1, 2]]]


def test_kserve_answers_every_request_of_a_batch_each_under_its_own_number() -> None:
    def ids(data: Any, context: Context) -> Any:
        return [[value, context.get_request_id(idx)] for idx, value in enumerate(data)]

    single, seen = run("kserve", [{"instances": [1]}, {"instances": [2]}], ids)
    assert (single, len(seen)) == (
        [{"predictions": [[1, "id-0"]]}, {"predictions": [[2, "id-1"]]}],
        1,
    )

    def first_id(data: Any, context: Context) -> Any:
        context.set_response_header(0, "X-Id", context.get_request_id(0))
        return [[value, context.get_request_id(0)] for value in data]

    many, seen = run(
        "kserve", [{"instances": [1, 2]}, {"instances": [3]}, {"instances": []}], first_id
    )
    assert many == [
        {"predictions": [[1, "id-0"], [2, "id-0"]]},
        {"predictions": [[3, "id-1"]]},
        {"predictions": []},
    ]
    assert len(seen) == 2


def test_a_call_for_one_request_leaves_its_headers_with_that_request() -> None:
    context = a_batch(*requests(2))

    def mark(data: Any, context: Context) -> Any:
        context.set_response_header(0, "X-Id", str(context.get_request_id(0)))
        context.set_response_status(200 + len(data), "", 0)
        return data

    ENVELOPES["kserve"](mark).handle(
        [{"body": {"instances": [1, 2]}}, {"body": {"instances": [3]}}], context
    )
    assert [context.get_response_headers(idx)["x-id"] for idx in range(2)] == ["id-0", "id-1"]
    assert [context.get_response_status(idx)[0] for idx in range(2)] == [202, 201]


def test_an_explanation_is_called_one() -> None:
    assert run("kserve", [{"instances": [1]}], explain="True")[0] == [{"explanations": [1]}]
    assert run("kserve", [{"instances": [1]}], explain="False")[0] == [{"predictions": [1]}]


def test_a_description_is_asked_for_without_an_envelope() -> None:
    assert run("kservev2", [b""], describe="True")[1] == [[{"body": b""}]]


def test_open_inference_tensors_come_nested_and_go_flat() -> None:
    inputs = [
        {"name": "a", "shape": [2, 2], "datatype": "FP32", "data": [1.0, 2, 3, 4]},
        {"name": "b", "shape": [1], "datatype": "BYTES", "data": ["text"]},
        {"name": "c", "shape": [-1, 1], "datatype": "INT64", "data": [[1], [2]]},
    ]
    outputs = [[[1.5], [2]], {"k": 1}, 3]
    ((answer,), seen) = run(
        "kservev2",
        [{"id": "7", "inputs": inputs}],
        lambda data, context: [context.input_names, *outputs],
    )
    assert [entry["data"] for entry in seen[0]] == [[[1.0, 2], [3, 4]], "text", [[1], [2]]]
    assert answer == {
        "id": "7",
        "model_name": "m",
        "model_version": "1.0",
        "outputs": [
            {"name": "a", "shape": [3], "datatype": "BYTES", "data": ["a", "b", "c"]},
            {"name": "b", "shape": [2, 1], "datatype": "FP64", "data": [1.5, 2]},
            {"name": "c", "shape": [1], "datatype": "BYTES", "data": [{"k": 1}]},
            {"name": "output-3", "shape": [1], "datatype": "INT64", "data": [3]},
        ],
    }


def test_an_open_inference_request_without_an_id_gets_its_requests() -> None:
    body = {"inputs": [{"name": "a", "shape": [1], "datatype": "BOOL", "data": [True]}]}
    answers, seen = run(
        "kservev2",
        [body, {**body, "id": "x"}],
        lambda data, context: [entry["data"] for entry in data],
    )
    assert [answer["id"] for answer in answers] == ["id-0", "x"]
    assert len(seen) == 1


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape), st.permutations(range(math.prod(shape))), st.booleans()
        )
    )
)
def test_a_tensor_survives_the_way_in_and_out(case: tuple[list[int], list[int], bool]) -> None:
    shape, values, open_end = case
    reported = [-1, *shape[1:]] if open_end else shape
    read = read_input({"name": "t", "shape": reported, "datatype": "INT64", "data": values})
    assert output_tensor("t", read["data"]) == {
        "name": "t",
        "shape": shape,
        "datatype": "INT64",
        "data": list(values),
    }


@pytest.mark.parametrize("name", ["json", "kserve"])
def test_a_batch_may_hold_requests_of_workflows_and_others(name: str) -> None:
    results: dict[Any, Any] = {0: b"\xff\x00", 1: {"x": [1]}, 2: "text", 3: JsonText("[1]")}
    seen: Seen = []

    def handler(data: Any, context: Context) -> Any:
        seen.extend(data)
        return [results.get(row, row) if isinstance(row, int) else "" for row in data]

    def ask(bodies: list[Any], *places: bytes) -> Any:
        context = a_batch(
            *(request_meta("id", b"", [(NODE_HEADER, node)] if node else []) for node in places)
        )
        return ENVELOPES[name](handler).handle([{"body": body} for body in bodies], context)

    relayed, plain = ask([{"instances": [0, 1, 2, 3]}, {"instances": [9, 3]}], b"first", b"")
    assert (json.loads(plain) if name == "json" else plain) == {"predictions": [9, [1]]}
    seen.clear()
    ask([bytearray(relayed.encode()), {"instances": [9]}], b"last", b"")
    assert seen == [
        {"body": b"\xff\x00"},
        {"body": b'{\n  "x": [\n    1\n  ]\n}'},
        {"body": b"text"},
        {"body": b"[1]"},
        9,
    ]


def test_arrays_keep_their_datatype_and_uneven_lists_are_one_row() -> None:
    numpy = pytest.importorskip("numpy")
    assert output_tensor("t", numpy.ones((1, 2), "float32")) == {
        "name": "t",
        "shape": [1, 2],
        "datatype": "FP32",
        "data": [1.0, 1.0],
    }
    assert output_tensor("t", numpy.float64(2.5)) == {
        "name": "t",
        "shape": [],
        "datatype": "FP64",
        "data": [2.5],
    }
    assert output_tensor("t", [[1, 2], [3]]) == {
        "name": "t",
        "shape": [3],
        "datatype": "INT64",
        "data": [1, 2, 3],
    }
    assert output_tensor("t", [b"a", b"\xff"])["data"] == ["a", "/w=="]


WRONG = [
    ("json", b"{", "not JSON"),
    ("json", {"x": 1}, '"instances"'),
    ("kserve", [1], '"instances"'),
    ("kserve", {"instances": [{"b64": "x"}]}, "not base64"),
    ("kservev2", {"inputs": []}, '"inputs"'),
    ("kservev2", {"inputs": [{"name": "a"}]}, "needs name, shape, datatype and data"),
    (
        "kservev2",
        {"inputs": [{"name": "a", "shape": [2], "datatype": "FP32", "data": [1]}]},
        "must have 2 values; it has 1",
    ),
    (
        "kservev2",
        {"inputs": [{"name": "a", "shape": "2", "datatype": "FP32", "data": [1]}]},
        "must be a list of sizes",
    ),
    (
        "kservev2",
        {"inputs": [{"name": "a", "shape": [1], "datatype": "STR", "data": [1]}]},
        "datatype 'STR'",
    ),
]


@pytest.mark.parametrize(("name", "body", "message"), WRONG)
def test_what_is_not_in_the_envelopes_form_is_refused_and_named(
    name: str, body: Any, message: str
) -> None:
    with pytest.raises(BadRows) as caught:
        run(name, [body])
    assert message in caught.value.faults[0]


def test_a_wrong_request_and_a_refusal_of_the_handler_harm_no_other_request() -> None:
    def refuses(data: Any, context: Context) -> Any:
        bad = {idx: "two!" for idx, value in enumerate(data) if value == 2}
        if bad:
            raise BadRows(bad)
        return data

    model = a_served_model(ENVELOPES["json"](refuses).handle)
    bodies = [b'{"instances": [0, 1]}', b"{}", b'{"instances": [0, 2]}', b'{"instances": [4]}']
    answers = answers_of(model, *bodies)
    assert [status for status, _, _ in answers] == [200, 400, 400, 200]
    assert json.loads(answers[2][2])["message"] == "two!"
    assert json.loads(answers[3][2]) == {"predictions": [4]}


@pytest.mark.parametrize("name", ["json", "kserve"])
def test_a_handler_that_returns_another_number_is_reported_both(name: str) -> None:
    with pytest.raises(PredictionFailed, match=r"expect: 2, got: 1"):
        run(name, [{"instances": [1]}, {"instances": [2]}], lambda data, context: [0])
