"""Tensors from a client's message to a handler, and back, without a server: all types, and what is
wrong with some.
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
from tsx_runtime.grpc import tensors as front
from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelInferRequest, ModelInferResponse
from tsx_runtime.worker.codecs import v2_binary
from tsx_runtime.worker.codecs.requests import read_row
from tsx_runtime.worker.handler_api.context import Context

NUMBERS = {name: np.dtype(code) for name, code in v2_binary.DTYPES.items()}
TYPED = {name: dtype for name, dtype in NUMBERS.items() if name in front.TYPED}


def any_array(dtypes: dict[str, np.dtype[Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    shapes = arrays.array_shapes(min_dims=0, min_side=0, max_side=4)
    return st.sampled_from(sorted(dtypes)).flatmap(
        lambda name: st.tuples(st.just(name), arrays.arrays(dtypes[name], shapes))
    )


def context() -> Context:
    made = Context("m", "/", {}, 1, None, "0")
    made.begin(["id\r\n\r\n"])
    return made


def through_the_worker(request: Any, result: Any = None) -> tuple[dict[str, Any], Any]:
    """What a handler gets of a message, and the response to what it returns (its first input, if
    nothing else).
    """
    head, body = front.pack(request)
    whole = (
        b"".join(bytes(piece) for piece in body.pieces)
        if isinstance(body, wire.Parts)
        else bytes(body)
    )
    row, wanted = read_row(f"id\r\n\r\ninference-header-content-length: {head}\r\n", whole, True)
    assert isinstance(wanted, v2_binary.OutputRequest)
    row = v2_binary.as_row(row)
    about = context()
    answer = v2_binary.TensorResponse(
        next(iter(row.values())) if result is None else result, wanted, 0, about, "1.0"
    ).encode()
    response = ModelInferResponse()
    length = about.get_response_headers(0).get("inference-header-content-length")
    front.unpack(
        response,
        None if length is None else int(length),
        answer,
        typed=not request.raw_input_contents,
    )
    return row, response


@given(any_array(NUMBERS))
def test_raw_contents_of_every_type_come_through_unharmed(given: tuple[str, Any]) -> None:
    datatype, array = given
    tensor = {"name": "x", "datatype": datatype, "shape": array.shape}
    row, response = through_the_worker(
        ModelInferRequest(inputs=[tensor], raw_input_contents=[array.tobytes()])
    )
    assert np.asarray(row["x"]).tobytes() == array.tobytes()
    assert row["x"].shape == array.shape
    assert row["body"] is row["x"]
    assert list(response.raw_output_contents) == [array.tobytes()]
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == (
        datatype,
        list(array.shape),
    )


@given(any_array(TYPED))
def test_typed_contents_come_through_as_typed_contents(given: tuple[str, Any]) -> None:
    datatype, array = given
    field = front.TYPED[datatype].field
    tensor = {
        "name": "x",
        "datatype": datatype,
        "shape": array.shape,
        "contents": {field: array.ravel().tolist()},
    }
    row, response = through_the_worker(ModelInferRequest(inputs=[tensor]))
    assert np.asarray(row["x"]).tobytes() == array.tobytes() or np.isnan(array).any()
    np.testing.assert_array_equal(
        np.array(getattr(response.outputs[0].contents, field), array.dtype), array.ravel()
    )
    assert not response.raw_output_contents


@given(st.lists(st.binary(max_size=20), max_size=4))
def test_bytes_come_through_whatever_they_hold(values: list[bytes]) -> None:
    tensor = {
        "name": "x",
        "datatype": "BYTES",
        "shape": [len(values)],
        "contents": {"bytes_contents": values},
    }
    row, _ = through_the_worker(ModelInferRequest(inputs=[tensor]), result="an answer")
    assert row["x"] == (values[0] if len(values) == 1 else values)


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=200), max_size=5))
def test_named_inputs_come_through_under_their_names(inputs: dict[str, bytes]) -> None:
    from tsx_runtime.grpc.inference import body_of

    body = body_of(inputs)
    assert read_row(f"id\r\n\r\ncontent-type: {wire.INPUTS.decode()}\r\n", bytes(body), True) == (
        inputs,
        {},
    )


def test_large_inputs_are_sent_from_where_they_lie() -> None:
    from tsx_runtime.grpc.inference import body_of

    large = bytes(wire.COPIED + 1)
    body = body_of({"a": large})
    assert isinstance(body, wire.Parts)
    assert any(piece is large for piece in body.pieces)
    _, packed = front.pack(
        ModelInferRequest(
            inputs=[{"name": "x", "datatype": "UINT8", "shape": [len(large)]}],
            raw_input_contents=[large],
        )
    )
    assert isinstance(packed, wire.Parts)
    assert sum(map(len, packed.pieces)) == len(packed)


def test_brain_floats_are_floats_for_the_handler_and_brain_floats_are_said_to_be_such() -> None:
    half = np.array([1.5, -2.0], "<f4")
    raw = (half.view("<u4") >> 16).astype("<u2").tobytes()
    tensor = {"name": "x", "datatype": "BF16", "shape": [2]}
    output = {"outputs": [{"name": "y", "datatype": "BF16", "shape": [2], "data": [1.5, -2.0]}]}
    row, response = through_the_worker(
        ModelInferRequest(inputs=[tensor], raw_input_contents=[raw]), result=output
    )
    assert row["x"].tolist() == [1.5, -2.0]
    assert response.raw_output_contents[0] == raw


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            {
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [2]}],
                "raw_input_contents": [b"", b""],
            },
            "2 raw_input_contents do not fit 1",
        ),
        (
            {
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "contents": {}}],
                "raw_input_contents": [b"12345678"],
            },
            "has contents although the request has raw_input_contents: send only one of them.",
        ),
        (
            {
                "inputs": [
                    {
                        "name": "x",
                        "datatype": "FP32",
                        "shape": [2],
                        "contents": {"fp32_contents": [1]},
                    }
                ]
            },
            "1 elements in fp32_contents",
        ),
        (
            {"inputs": [{"name": "x", "datatype": "FP99", "shape": [2]}]},
            "'FP99': contents take BOOL",
        ),
        (
            {
                "inputs": [
                    {
                        "name": "x",
                        "datatype": "INT8",
                        "shape": [1],
                        "contents": {"int_contents": [300]},
                    }
                ]
            },
            "not INT8",
        ),
    ],
)
def test_a_message_that_cannot_be_tensors_is_refused_by_the_input_s_name(
    request_: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        front.pack(ModelInferRequest(**request_))


def with_head(request: Any, rest: bytes = b"") -> tuple[str, bytearray]:
    head = json.dumps(request).encode()
    return str(len(head)), bytearray(head + rest)


@pytest.mark.parametrize(
    ("length", "body", "words"),
    [
        ("x", b"{}", "takes the number of bytes"),
        ("0", b"{}", "takes the number of bytes"),
        ("9", b"{}", "takes the number of bytes"),
        ("2", b"{}", "list of inputs"),
        ("2", b"\xff\xff", "list of inputs"),
        ("100000", b"[" * 100_000, "list of inputs"),
        (*with_head([]), "list of inputs"),
        (*with_head({"inputs": 3}), "list of inputs"),
        (*with_head({"inputs": [3]}), "input 3 cannot be read"),
        (*with_head({"inputs": []}, b"abc"), "3 bytes follow the JSON"),
        (
            *with_head({"inputs": [{"name": "x", "parameters": {"binary_data_size": 9}}]}, b"abc"),
            "'x' cannot be read",
        ),
        (
            *with_head(
                {
                    "inputs": [
                        {
                            "name": "x",
                            "datatype": "FP32",
                            "shape": [2],
                            "parameters": {"binary_data_size": 4},
                        }
                    ]
                },
                b"abcd",
            ),
            "'x' cannot be read",
        ),
        (
            *with_head(
                {
                    "inputs": [
                        {
                            "name": "x",
                            "datatype": "FP99",
                            "shape": [1],
                            "parameters": {"binary_data_size": 4},
                        }
                    ]
                },
                b"abcd",
            ),
            "no datatype 'FP99'",
        ),
        (
            *with_head(
                {
                    "inputs": [
                        {
                            "name": "x",
                            "datatype": "BYTES",
                            "shape": [1],
                            "parameters": {"binary_data_size": 4},
                        }
                    ]
                },
                b"\xff\0\0\0",
            ),
            "lengths of its elements",
        ),
        (*with_head({"inputs": [], "outputs": [{}]}), "parameters or outputs"),
    ],
)
def test_a_body_that_cannot_be_tensors_is_refused(length: str, body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        v2_binary.read(length, bytearray(body))


def test_arrays_say_yes_like_lists_and_what_is_reckoned_from_them_does_not() -> None:
    array = v2_binary.array_of("FP32", [2], memoryview(bytearray(8)))
    assert {"body": array}.get("data") or {"body": array}.get("body") is array
    assert bool(array)
    assert bool(v2_binary.array_of("FP32", [1], memoryview(bytearray(4))))
    assert not v2_binary.array_of("FP32", [0], memoryview(bytearray()))
    assert not v2_binary.array_of("FP32", [1], memoryview(bytearray(4))) > 5
    array += 1  # it is the handler's own
    assert array.tolist() == [1, 1]


def encoded(value: Any, **request: Any) -> Any:
    """The JSON of an answer to a request that asks for JSON."""
    wanted = v2_binary.parse_output_request(request)
    return json.loads(v2_binary.TensorResponse(value, wanted, 0, context(), "1.0").encode())[
        "outputs"
    ]


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
def test_whatever_a_handler_returns_is_a_tensor(
    value: Any, datatype: str, shape: list[int], data: list[Any]
) -> None:
    assert encoded(value) == [
        {"name": "output", "datatype": datatype, "shape": shape, "data": data}
    ]


def test_a_torch_tensor_is_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    assert encoded(torch.ones(2, dtype=torch.float16))[0]["datatype"] == "FP16"
    assert encoded(torch.ones(2, dtype=torch.bfloat16))[0]["datatype"] == "FP32"
    named = encoded({"a": torch.zeros(1), "b": np.zeros(2, "int8")})
    assert [(output["name"], output["datatype"]) for output in named] == [
        ("a", "FP32"),
        ("b", "INT8"),
    ]


def test_what_json_cannot_carry_is_said() -> None:
    with pytest.raises(PredictionFailed, match="ask for it with binary_data"):
        encoded(b"\xff")
    with pytest.raises(PredictionFailed, match="neither a tensor nor JSON"):
        encoded({1, 2})
    with pytest.raises(PredictionFailed, match="'x' of the handler is not a tensor of FP32"):
        encoded({"outputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": ["a"]}]})


def test_each_output_comes_as_it_is_asked_for() -> None:
    value = {
        "outputs": [
            {"name": name, "datatype": "INT32", "shape": [1], "data": [1]}
            for name in ("a", "b", "c")
        ]
    }
    wanted = v2_binary.parse_output_request(
        {"outputs": [{"name": "c", "parameters": {"binary_data": True}}, {"name": "a"}]}
    )
    about = context()
    answer = v2_binary.TensorResponse(value, wanted, 0, about, "1.0").encode()
    length = int(about.get_response_headers(0)["inference-header-content-length"])
    assert json.loads(answer[:length])["outputs"] == [
        {"name": "c", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}},
        {"name": "a", "datatype": "INT32", "shape": [1], "data": [1]},
    ]
    assert answer[length:] == b"\1\0\0\0"


@pytest.mark.parametrize(
    ("output", "rest"),
    [
        (
            {"name": "y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
            b"1234",
        ),
        (
            {"name": "y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": -1}},
            b"1234",
        ),
        (
            {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 3}},
            b"123",
        ),
        ({"name": 7, "datatype": "FP32", "shape": [1], "data": [1]}, b""),
        ({"name": "y", "datatype": "FP32", "shape": ["one"], "data": [1]}, b""),
        ({"name": "y", "datatype": "FP99", "shape": [1], "data": [1]}, b""),
    ],
)
def test_an_answer_that_cannot_be_tensors_is_the_handlers_failure(
    output: dict[str, Any], rest: bytes
) -> None:
    head, body = with_head({"outputs": [output]}, rest)
    with pytest.raises(
        PredictionFailed, match="The handler returned outputs that are not tensors:"
    ):
        front.unpack(ModelInferResponse(), int(head), bytes(body), typed=True)
