"""Tensors from a client's message to a handler and back, without a server.

`tests/runtime/worker/test_hostile_requests.py` tests the bodies that are refused.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tsx_runtime import wire
from tsx_runtime.errors import BadRequest, PredictionFailed
from tsx_runtime.features.grpc import tensors as front
from tsx_runtime.features.grpc.inference import join_inputs
from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelInferRequest, ModelInferResponse
from tsx_runtime.worker.codecs import v2_binary
from tsx_runtime.worker.codecs.requests import read_row
from tsx_runtime.worker.handler_api.context import Context

NUMBERS = {name: np.dtype(code) for name, code in v2_binary.DTYPES.items()}
TYPED_DTYPES = {name: dtype for name, dtype in NUMBERS.items() if name in front.CONTENTS_FIELDS}


def any_array(dtypes: dict[str, np.dtype[Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    shapes = arrays.array_shapes(min_dims=0, min_side=0, max_side=4)
    return st.sampled_from(sorted(dtypes)).flatmap(
        lambda name: st.tuples(st.just(name), arrays.arrays(dtypes[name], shapes))
    )


def context() -> Context:
    context = Context("m", "/", {}, 1, None, "0")
    context.begin(["id\r\n\r\n"])
    return context


def through_the_worker(
    tensor: dict[str, Any], raw: bytes | None = None, result: Any = None
) -> tuple[dict[str, Any], Any]:
    """Send a tensor to a handler.

    Return the handler's row and the response to its result; by default the result is the tensor.
    """
    contents = {} if raw is None else {"raw_input_contents": [raw]}
    head, body = front.pack(ModelInferRequest(inputs=[tensor], **contents))
    data = b"".join(map(bytes, body.pieces if isinstance(body, wire.Parts) else [body]))
    row, output_request = read_row(
        f"id\r\n\r\ninference-header-content-length: {head}\r\n", data, True
    )
    assert isinstance(output_request, v2_binary.OutputRequest)
    row = v2_binary.row_of_tensors(row)
    response_context = context()
    answer = v2_binary.TensorResponse(
        row["x"] if result is None else result, output_request, 0, response_context, "1.0"
    ).encode()
    response = ModelInferResponse()
    length = response_context.get_response_headers(0).get("inference-header-content-length")
    front.unpack(
        response, None if length is None else int(length), answer, use_contents=raw is None
    )
    return row, response


def tensor_of(datatype: str, *shape: int, **extra_fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, **extra_fields}


@given(any_array(NUMBERS))
def test_raw_contents_of_every_type_are_preserved(typed_array: tuple[str, Any]) -> None:
    datatype, array = typed_array
    row, response = through_the_worker(tensor_of(datatype, *array.shape), array.tobytes())
    assert np.asarray(row["x"]).tobytes() == array.tobytes()
    assert row["x"].shape == array.shape
    assert row["body"] is row["x"]
    assert list(response.raw_output_contents) == [array.tobytes()]
    (output,) = response.outputs
    assert (output.datatype, tuple(output.shape)) == (datatype, array.shape)


@given(any_array(TYPED_DTYPES))
def test_typed_contents_are_answered_with_typed_contents(typed_array: tuple[str, Any]) -> None:
    datatype, array = typed_array
    field = front.CONTENTS_FIELDS[datatype].field
    contents = {field: array.ravel().tolist()}
    row, response = through_the_worker(tensor_of(datatype, *array.shape, contents=contents))
    assert np.asarray(row["x"]).tobytes() == array.tobytes() or np.isnan(array).any()
    np.testing.assert_array_equal(
        np.array(getattr(response.outputs[0].contents, field), array.dtype), array.ravel()
    )
    assert not response.raw_output_contents


@given(st.lists(st.binary(max_size=20), max_size=4))
def test_bytes_are_preserved(values: list[bytes]) -> None:
    tensor = tensor_of("BYTES", len(values), contents={"bytes_contents": values})
    row, _ = through_the_worker(tensor, result="an answer")
    assert row["x"] == (values[0] if len(values) == 1 else values)


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=200), max_size=5))
def test_named_inputs_keep_their_names(inputs: dict[str, bytes]) -> None:
    body = join_inputs(inputs)
    assert read_row(f"id\r\n\r\ncontent-type: {wire.INPUTS.decode()}\r\n", bytes(body), True) == (
        inputs,
        {},
    )


def test_large_inputs_are_sent_without_a_copy() -> None:
    large_bytes = bytes(wire.MAX_COPIED_BYTES + 1)
    body = join_inputs({"a": large_bytes})
    assert isinstance(body, wire.Parts)
    assert any(piece is large_bytes for piece in body.pieces)
    _, packed_request = front.pack(
        ModelInferRequest(
            inputs=[tensor_of("UINT8", len(large_bytes))], raw_input_contents=[large_bytes]
        )
    )
    assert isinstance(packed_request, wire.Parts)
    assert sum(map(len, packed_request.pieces)) == len(packed_request)


def test_bfloat16_inputs_are_float32_in_the_handler_and_bfloat16_in_the_answer() -> None:
    values = np.array([1.5, -2.0], "<f4")
    raw = (values.view("<u4") >> 16).astype("<u2").tobytes()
    output = {"outputs": [{**tensor_of("BF16", 2), "data": [1.5, -2.0]}]}
    row, response = through_the_worker(tensor_of("BF16", 2), raw, result=output)
    assert row["x"].tolist() == [1.5, -2.0]
    assert response.raw_output_contents[0] == raw


@pytest.mark.parametrize(
    ("tensor", "raw", "reason"),
    [
        (tensor_of("FP32", 2), [b"", b""], "2 raw_input_contents do not fit 1"),
        (tensor_of("FP32", 2, contents={}), [b"12345678"], "send only one of them"),
        (tensor_of("FP32", 2, contents={"fp32_contents": [1]}), [], "1 elements in fp32_contents"),
        (tensor_of("FP99", 2), [], "'FP99': contents take BOOL"),
        (tensor_of("INT8", 1, contents={"int_contents": [300]}), [], "not INT8"),
    ],
)
def test_an_invalid_tensor_is_refused_with_its_input_name(
    tensor: dict[str, Any], raw: list[bytes], reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason):
        front.pack(ModelInferRequest(inputs=[tensor], raw_input_contents=raw))


def test_input_arrays_have_the_truth_value_of_lists() -> None:
    array = v2_binary.array_of("FP32", [2], memoryview(bytearray(8)))
    assert {"body": array}.get("data") or {"body": array}.get("body") is array
    assert bool(array)
    assert bool(v2_binary.array_of("FP32", [1], memoryview(bytearray(4))))
    assert not v2_binary.array_of("FP32", [0], memoryview(bytearray()))
    assert not v2_binary.array_of("FP32", [1], memoryview(bytearray(4))) > 5
    # The handler may change its array.
    array += 1
    assert array.tolist() == [1, 1]


def encoded(value: Any) -> Any:
    """Return the outputs of an answer to a request that asks for JSON."""
    output_request = v2_binary.parse_output_request({})
    answer = v2_binary.TensorResponse(value, output_request, 0, context(), "1.0").encode()
    return json.loads(answer)["outputs"]


@pytest.mark.parametrize(
    ("value", "datatype", "shape", "data"),
    [
        ([1, 2], "INT64", [2], [1, 2]),
        ([[0.5], [1]], "FP64", [2, 1], [0.5, 1.0]),
        ([True, False], "BOOL", [2], [True, False]),
        (3, "INT64", [], [3]),
        (["a", "b"], "BYTES", [2], ["a", "b"]),
        ("text", "BYTES", [1], ["text"]),
        (b"text", "BYTES", [1], ["text"]),
        ([[1], [1, 2]], "BYTES", [1], ["[[1], [1, 2]]"]),
        ({"tabby": 0.4}, "BYTES", [1], ['{"tabby": 0.4}']),
        (None, "BYTES", [1], ["null"]),
        ([{"a": 1}], "BYTES", [1], ['[{"a": 1}]']),
        ([], "FP64", [0], []),
    ],
)
def test_any_handler_result_is_converted_to_a_tensor(
    value: Any, datatype: str, shape: list[int], data: list[Any]
) -> None:
    assert encoded(value) == [
        {"name": "output", "datatype": datatype, "shape": shape, "data": data}
    ]


def test_torch_tensors_are_converted() -> None:
    torch = pytest.importorskip("torch")
    assert encoded(torch.ones(2, dtype=torch.float16))[0]["datatype"] == "FP16"
    assert encoded(torch.ones(2, dtype=torch.bfloat16))[0]["datatype"] == "FP32"
    named_outputs = encoded({"a": torch.zeros(1), "b": np.zeros(2, "int8")})
    assert [(output["name"], output["datatype"]) for output in named_outputs] == [
        ("a", "FP32"),
        ("b", "INT8"),
    ]


def test_values_without_a_json_form_are_refused() -> None:
    for value, reason in (
        (b"\xff", "ask for it with binary_data"),
        ({1, 2}, "neither a tensor nor JSON"),
        ({"outputs": [{**tensor_of("FP32", 1), "data": ["a"]}]}, "'x' of the handler is not a"),
    ):
        with pytest.raises(PredictionFailed, match=reason):
            encoded(value)


def test_each_output_has_the_requested_encoding() -> None:
    outputs = [{**tensor_of("INT32", 1), "name": name, "data": [1]} for name in "abc"]
    output_request = v2_binary.parse_output_request(
        {"outputs": [{"name": "c", "parameters": {"binary_data": True}}, {"name": "a"}]}
    )
    response_context = context()
    answer = v2_binary.TensorResponse(
        {"outputs": outputs}, output_request, 0, response_context, "1.0"
    ).encode()
    length = int(response_context.get_response_headers(0)["inference-header-content-length"])
    assert json.loads(answer[:length])["outputs"] == [
        {"name": "c", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}},
        {"name": "a", "datatype": "INT32", "shape": [1], "data": [1]},
    ]
    assert answer[length:] == b"\1\0\0\0"


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({"parameters": {"binary_data_size": 8}}, b"1234"),
        ({"parameters": {"binary_data_size": -1}}, b"1234"),
        ({"parameters": {"binary_data_size": 3}, "shape": [1]}, b"123"),
        ({"name": 7, "data": [1, 2]}, b""),
        ({"shape": ["one"], "data": [1]}, b""),
        ({"datatype": "FP99", "data": [1, 2]}, b""),
    ],
)
def test_an_answer_with_invalid_tensors_is_a_handler_failure(
    changes: dict[str, Any], data: bytes
) -> None:
    head = json.dumps({"outputs": [tensor_of("FP32", 2) | changes]}).encode()
    with pytest.raises(PredictionFailed, match="outputs that are not tensors:"):
        front.unpack(ModelInferResponse(), len(head), head + data, use_contents=True)
