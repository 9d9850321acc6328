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
    """Return a context with a batch of these requests."""
    context = a_context(manifest={"model": {"modelVersion": "1.0"}})
    context.begin([meta.decode() for meta in metas])
    return context


def requests(count: int, **headers: str) -> list[bytes]:
    """Return the metadata of requests with the ids `id-0`, `id-1` and so on."""
    block = [(name.encode(), value.encode()) for name, value in headers.items()]
    return [request_meta(f"id-{idx}", b"", block) for idx in range(count)]


def run(
    name: str,
    bodies: list[Any],
    function: Callable[[list[Any], Context], Any] | None = None,
    **headers: str,
) -> tuple[Any, Seen]:
    """Return the answers, and the rows that each call of the handler got."""
    calls: Seen = []

    def handler(data: Any, context: Context) -> Any:
        calls.append(list(data))
        return function(data, context) if function else list(data)

    return ENVELOPES[name](handler).handle(
        [{"body": body} for body in bodies], a_batch(*requests(len(bodies), **headers))
    ), calls


def test_the_body_envelope_passes_only_the_values_of_rows() -> None:
    context = a_batch(*requests(2))
    answers = ENVELOPES["body"](lambda data, context: [data]).handle(
        [{"data": b"a"}, {"body": {"b": 1}}], context
    )
    assert answers == [[b"a", {"b": 1}]]


def test_json_passes_the_instances_of_all_requests_in_one_call() -> None:
    answers, calls = run(
        "json", [{"instances": [1, {"x": 2}]}, b'{"instances": [[3]]}', {"instances": []}]
    )
    assert calls == [[1, {"x": 2}, [3]]]
    assert answers == [
        '{"predictions": [1, {"x": 2}]}',
        '{"predictions": [[3]]}',
        '{"predictions": []}',
    ]


def test_base64_entries_become_bytes() -> None:
    text = base64.b64encode(b"\x00\xff").decode()
    _, calls = run(
        "kserve",
        [{"instances": [{"b64": text}, {"data": {"b64": text}, "n": 1}, [{"b64": text}], [1, 2]]}],
    )
    assert calls == [[b"\x00\xff", {"data": b"\x00\xff", "n": 1}, [b"\x00\xff"], [1, 2]]]


def test_kserve_calls_the_handler_per_request_if_one_has_several_instances() -> None:
    def ids(data: Any, context: Context) -> Any:
        return [[value, context.get_request_id(idx)] for idx, value in enumerate(data)]

    single_answers, calls = run("kserve", [{"instances": [1]}, {"instances": [2]}], ids)
    assert (single_answers, len(calls)) == (
        [{"predictions": [[1, "id-0"]]}, {"predictions": [[2, "id-1"]]}],
        1,
    )

    def first_id(data: Any, context: Context) -> Any:
        context.set_response_header(0, "X-Id", context.get_request_id(0))
        return [[value, context.get_request_id(0)] for value in data]

    several_answers, calls = run(
        "kserve", [{"instances": [1, 2]}, {"instances": [3]}, {"instances": []}], first_id
    )
    assert several_answers == [
        {"predictions": [[1, "id-0"], [2, "id-0"]]},
        {"predictions": [[3, "id-1"]]},
        {"predictions": []},
    ]
    assert len(calls) == 2


def test_headers_set_in_a_call_for_one_request_belong_to_that_request() -> None:
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


def test_the_result_of_an_explain_request_is_named_explanations() -> None:
    assert run("kserve", [{"instances": [1]}], explain="True")[0] == [{"explanations": [1]}]
    assert run("kserve", [{"instances": [1]}], explain="False")[0] == [{"predictions": [1]}]


def test_a_describe_request_bypasses_the_envelope() -> None:
    assert run("kservev2", [b""], describe="True")[1] == [[{"body": b""}]]


def test_open_inference_tensors_are_nested_for_the_handler_and_flat_in_answers() -> None:
    inputs = [
        {"name": "a", "shape": [2, 2], "datatype": "FP32", "data": [1.0, 2, 3, 4]},
        {"name": "b", "shape": [1], "datatype": "BYTES", "data": ["text"]},
        {"name": "c", "shape": [-1, 1], "datatype": "INT64", "data": [[1], [2]]},
    ]
    outputs = [[[1.5], [2]], {"k": 1}, 3]
    ((answer,), calls) = run(
        "kservev2",
        [{"id": "7", "inputs": inputs}],
        lambda data, context: [context.input_names, *outputs],
    )
    assert [entry["data"] for entry in calls[0]] == [[[1.0, 2], [3, 4]], "text", [[1], [2]]]
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


def test_an_open_inference_answer_has_the_request_id_by_default() -> None:
    body = {"inputs": [{"name": "a", "shape": [1], "datatype": "BOOL", "data": [True]}]}
    answers, calls = run(
        "kservev2",
        [body, {**body, "id": "x"}],
        lambda data, context: [entry["data"] for entry in data],
    )
    assert [answer["id"] for answer in answers] == ["id-0", "x"]
    assert len(calls) == 1


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape), st.permutations(range(math.prod(shape))), st.booleans()
        )
    )
)
def test_a_tensor_is_unchanged_after_reading_and_writing(
    case: tuple[list[int], list[int], bool],
) -> None:
    shape, values, has_open_size = case
    reported = [-1, *shape[1:]] if has_open_size else shape
    tensor = read_input({"name": "t", "shape": reported, "datatype": "INT64", "data": values})
    assert output_tensor("t", tensor["data"]) == {
        "name": "t",
        "shape": shape,
        "datatype": "INT64",
        "data": list(values),
    }


@pytest.mark.parametrize("name", ["json", "kserve"])
def test_a_batch_may_mix_requests_of_workflows_and_of_clients(name: str) -> None:
    results: dict[Any, Any] = {0: b"\xff\x00", 1: {"x": [1]}, 2: "text", 3: JsonText("[1]")}
    calls: Seen = []

    def handler(data: Any, context: Context) -> Any:
        calls.extend(data)
        return [results.get(row, row) if isinstance(row, int) else "" for row in data]

    def ask(bodies: list[Any], *nodes: bytes) -> Any:
        context = a_batch(
            *(request_meta("id", b"", [(NODE_HEADER, node)] if node else []) for node in nodes)
        )
        return ENVELOPES[name](handler).handle([{"body": body} for body in bodies], context)

    workflow_answer, client_answer = ask(
        [{"instances": [0, 1, 2, 3]}, {"instances": [9, 3]}], b"first", b""
    )
    assert (json.loads(client_answer) if name == "json" else client_answer) == {
        "predictions": [9, [1]]
    }
    calls.clear()
    ask([bytearray(workflow_answer.encode()), {"instances": [9]}], b"last", b"")
    assert calls == [
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


INVALID_BODIES = [
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


@pytest.mark.parametrize(("name", "body", "message"), INVALID_BODIES)
def test_a_body_of_another_form_than_the_envelopes_is_refused(
    name: str, body: Any, message: str
) -> None:
    with pytest.raises(BadRows) as exc_info:
        run(name, [body])
    assert message in exc_info.value.faults[0]


def test_invalid_and_refused_requests_do_not_affect_others() -> None:
    def refuses(data: Any, context: Context) -> Any:
        errors = {idx: "two!" for idx, value in enumerate(data) if value == 2}
        if errors:
            raise BadRows(errors)
        return data

    model = a_served_model(ENVELOPES["json"](refuses).handle)
    bodies = [b'{"instances": [0, 1]}', b"{}", b'{"instances": [0, 2]}', b'{"instances": [4]}']
    answers = answers_of(model, *bodies)
    assert [status for status, _, _ in answers] == [200, 400, 400, 200]
    assert json.loads(answers[2][2])["message"] == "two!"
    assert json.loads(answers[3][2]) == {"predictions": [4]}


@pytest.mark.parametrize("name", ["json", "kserve"])
def test_a_wrong_number_of_results_is_reported_with_the_expected_one(name: str) -> None:
    with pytest.raises(PredictionFailed, match=r"expect: 2, got: 1"):
        run(name, [{"instances": [1]}, {"instances": [2]}], lambda data, context: [0])
