"""The Open Inference Protocol, tested with Triton's gRPC and HTTP clients."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.runtime.features.grpc.conftest import TIMEOUT, Client, failure_of
from tests.support.servers import Running
from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelInferRequest, ModelInferResponse

DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]


class TritonClient:
    """One of Triton's clients with its module, so that tests can use both in the same way."""

    def __init__(self, module: Any, server: Running) -> None:
        self.module = module
        listener = "predictions" if module is tritonclient.http else "gRPC predictions"
        address = server.address(listener).removeprefix("http://")
        self.client = module.InferenceServerClient(address)

    def tensor(self, name: str, values: Any, **options: Any) -> Any:
        """Return an input; texts are of the datatype BYTES."""
        array = np.asarray(values)
        datatype = np_to_triton_dtype(array.dtype)
        if array.dtype.kind in "SUO":
            array, datatype = np.array(values, dtype=object), "BYTES"
        tensor = self.module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, **options)
        return tensor

    def infer(self, *tensors: Any, model: str = "talker", **options: Any) -> Any:
        return self.client.infer(model, list(tensors), **options)

    def do(self, action: str, *tensors: Any, **options: Any) -> Any:
        return self.infer(self.tensor("do", [action.encode()]), *tensors, **options)


@contextmanager
def triton_client(module: Any, server: Running) -> Iterator[TritonClient]:
    triton = TritonClient(module, server)
    yield triton
    triton.client.close()


@pytest.fixture(scope="module", params=[tritonclient.grpc, tritonclient.http])
def triton(request: pytest.FixtureRequest, server: Running) -> Iterator[TritonClient]:
    with triton_client(request.param, server) as client:
        yield client


@pytest.fixture(scope="module")
def by_grpc(server: Running) -> Iterator[TritonClient]:
    with triton_client(tritonclient.grpc, server) as client:
        yield client


ONES = np.ones(2, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type_reach_the_handler_and_return(
    triton: TritonClient, dtype: str
) -> None:
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    doubled_values = triton.infer(triton.tensor("x", values)).as_numpy("output")
    np.testing.assert_array_equal(doubled_values, values * 2)
    assert doubled_values.dtype == (values * 2).dtype


def test_an_answer_contains_its_request_id_model_and_version(triton: TritonClient) -> None:
    response: Any = triton.infer(triton.tensor("x", ONES), request_id="7").get_response()
    if not isinstance(response, dict):
        response = {field.name: value for field, value in response.ListFields()}
    names = [response[name] for name in ("id", "model_name", "model_version")]
    assert names == ["7", "talker", "1.0"]


def test_an_unnamed_output_gets_the_requested_name(triton: TritonClient) -> None:
    output = triton.module.InferRequestedOutput("probabilities")
    result = triton.infer(triton.tensor("x", ONES), outputs=[output])
    np.testing.assert_array_equal(result.as_numpy("probabilities"), [2, 2])


def test_a_handlers_own_tensors_are_passed_on_and_selected(triton: TritonClient) -> None:
    result = triton.do("own tensors")
    np.testing.assert_array_equal(result.as_numpy("numbers"), [1, 2])
    assert result.as_numpy("words").tolist() == [b"one", b"two"]
    selected_outputs = triton.do(
        "own tensors", outputs=[triton.module.InferRequestedOutput("words")]
    )
    assert selected_outputs.as_numpy("numbers") is None
    with pytest.raises(InferenceServerException, match="no output 'neither'"):
        triton.do("own tensors", outputs=[triton.module.InferRequestedOutput("neither")])


def test_a_dict_of_arrays_becomes_one_output_per_key(triton: TritonClient) -> None:
    result = triton.do("two arrays")
    assert (result.as_numpy("a").shape, result.as_numpy("b").dtype) == ((1, 2), np.int64)


def test_an_answer_that_is_not_a_tensor_is_returned_as_bytes(triton: TritonClient) -> None:
    two_strings = triton.tensor("several", [b"a", b"b"])
    text = triton.do("echo", two_strings).as_numpy("output").tolist()[0].decode()
    assert '"several": ["a", "b"]' in text
    assert '"do": "echo"' in text


def test_json_tensors_reach_the_handler_as_json(server: Running) -> None:
    with triton_client(tritonclient.http, server) as triton:
        tensor = triton.tensor("x", [ONES], binary_data=False)
        text = triton.infer(tensor).as_numpy("output").tolist()[0].decode()
    assert '"data": [1.0, 1.0]' in text


def test_errors_reach_triton_s_clients(triton: TritonClient) -> None:
    with pytest.raises(InferenceServerException, match="Model not found: nope"):
        triton.infer(triton.tensor("x", ONES), model="nope")
    with pytest.raises(InferenceServerException, match="no such image"):
        triton.do("raise")


def test_the_server_and_its_models_report_readiness(by_grpc: TritonClient) -> None:
    client = by_grpc.client
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("talker")
    assert client.is_model_ready("talker", "1.0")
    for name, version in (("nope", ""), ("talker", "9.0")):
        with pytest.raises(InferenceServerException) as exc_info:
            client.is_model_ready(name, version)
        assert exc_info.value.status() == "StatusCode.NOT_FOUND"
    assert client.get_server_metadata().name == "Torchserve"
    assert list(client.get_model_metadata("talker").versions) == ["1.0"]
    with pytest.raises(InferenceServerException, match="Model not found: nope"):
        client.get_model_metadata("nope")


PARTS = [[b"a"], [b"b"], [b""], [b"c"]]
UNKNOWN, FAILED = "Model not found: nope", "no such image"


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        (["stream", "", "large"], [*PARTS, UNKNOWN, [b"whole"]]),
        # Once a message is sent, the headers of a further response cannot be sent as metadata.
        (["stream", "stream"], [*PARTS, *PARTS]),
        (["large", "stream", "headers"], [[b"whole"], *PARTS, [b"a,b"]]),
        (["", "stream"], [UNKNOWN, *PARTS]),
        (["raise", "stream"], [FAILED, *PARTS]),
    ],
)
def test_a_stream_answers_each_request_with_its_parts_or_error(
    by_grpc: TritonClient, actions: list[str], expected: list[Any]
) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    by_grpc.client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for action in actions:
        inputs = [by_grpc.tensor("do", [action.encode()]), by_grpc.tensor("data", [b"whole"])]
        by_grpc.client.async_stream_infer("talker" if action else "nope", inputs, request_id="9")
    received = [answers.get(timeout=TIMEOUT) for _ in expected]
    by_grpc.client.stop_stream()
    outputs = [
        next((text for text in (UNKNOWN, FAILED) if text in str(error)), error)
        if result is None
        else result.as_numpy("output").tolist()
        for result, error in received
    ]
    assert outputs == expected


def test_the_service_under_torchserves_name_accepts_typed_contents(client: Client) -> None:
    infer = client.inference_channel.unary_unary(
        "/org.pytorch.serve.grpc.openinference.GRPCInferenceService/ModelInfer",
        ModelInferRequest.SerializeToString,
        ModelInferResponse.FromString,
    )

    def infer_tensor(**tensor: Any) -> Any:
        request = ModelInferRequest(model_name="talker", id="3", inputs=[tensor])
        return infer(request, timeout=TIMEOUT)

    response = infer_tensor(
        name="x", datatype="FP32", shape=[1, 2], contents={"fp32_contents": [1, 2.5]}
    )
    assert list(response.outputs[0].contents.fp32_contents) == [2, 5]
    assert list(response.outputs[0].shape) == [1, 2]
    assert not response.raw_output_contents
    response = infer_tensor(
        name="do", datatype="BYTES", shape=[1], contents={"bytes_contents": [b"own tensors"]}
    )
    assert list(response.outputs[1].contents.bytes_contents) == [b"one", b"two"]
    assert response.id == "own"


@pytest.mark.parametrize(
    ("method", "parameter"),
    [("ModelReady", "name"), ("ModelMetadata", "model_name"), ("ModelInfer", "model_name")],
)
def test_a_call_without_a_model_is_refused_with_torchserves_message(
    client: Client, method: str, parameter: str
) -> None:
    ask = client.inference_channel.unary_unary(
        f"/org.pytorch.serve.grpc.openinference.GRPCInferenceService/{method}"
    )
    error = failure_of(lambda: ask(b"", timeout=TIMEOUT))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"Parameter {parameter} is required.\n")


@pytest.mark.parametrize("module", [tritonclient.grpc, tritonclient.http])
@pytest.mark.parametrize("binary", [True, False])
def test_an_envelope_accepts_all_tensor_encodings(
    enveloped: Running, module: Any, binary: bool
) -> None:
    by_http = module is tritonclient.http
    with triton_client(module, enveloped) as triton:
        options = {"binary_data": binary} if by_http else {}
        tensor = triton.tensor("x", np.array([[1.5, 2, 1]], "float32"), **options)
        result = triton.infer(tensor, model="whole", request_id="5")
    np.testing.assert_array_equal(result.as_numpy("x"), [[3, 6, 4]])
    response = result.get_response()
    assert (response["id"] if by_http else response.id) == "5"
