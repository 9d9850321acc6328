"""The Open Inference Protocol, asked by Triton's own clients: by gRPC, and by HTTP with tensors as
JSON and as bytes.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.runtime.grpc.conftest import TIMEOUT, Client
from tests.support.models import make_model
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, Running, serving
from tsx_runtime.grpc.protos import grpc_predict_v2_pb2

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
    """One of Triton's clients with its module, so that both are asked in the same words."""

    def __init__(self, module: Any, address: str) -> None:
        self.module = module
        self.client = module.InferenceServerClient(address)

    def tensor(self, name: str, values: Any, datatype: str, **options: Any) -> Any:
        array = np.array(values, dtype=object) if datatype == "BYTES" else np.asarray(values)
        made = self.module.InferInput(name, list(array.shape), datatype)
        made.set_data_from_numpy(array, **options)
        return made

    def do(self, word: str, *others: Any, **options: Any) -> Any:
        return self.client.infer(
            "talker", [self.tensor("do", [word.encode()], "BYTES"), *others], **options
        )


@pytest.fixture(scope="module", params=["grpc", "http"])
def triton(request: pytest.FixtureRequest, server: Running) -> Iterator[TritonClient]:
    if request.param == "grpc":
        asked = TritonClient(tritonclient.grpc, server.address("gRPC predictions"))
    else:
        asked = TritonClient(
            tritonclient.http, server.address("predictions").removeprefix("http://")
        )
    yield asked
    asked.client.close()


@pytest.fixture(scope="module")
def by_grpc(server: Running) -> Iterator[TritonClient]:
    asked = TritonClient(tritonclient.grpc, server.address("gRPC predictions"))
    yield asked
    asked.client.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type_come_to_the_handler_and_back(
    triton: TritonClient, dtype: str
) -> None:
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    datatype = tritonclient.utils.np_to_triton_dtype(values.dtype)
    result = triton.client.infer("talker", [triton.tensor("x", values, datatype)], request_id="7")
    doubled = result.as_numpy("output")
    np.testing.assert_array_equal(doubled, values * 2)
    assert doubled.dtype == (values * 2).dtype


def test_an_answer_says_what_it_answers(triton: TritonClient) -> None:
    response: Any = triton.client.infer(
        "talker", [triton.tensor("x", np.ones(2, "float32"), "FP32")], request_id="7"
    ).get_response()
    if not isinstance(response, dict):
        response = {
            "id": response.id,
            "model_name": response.model_name,
            "model_version": response.model_version,
        }
    assert (response["id"], response["model_name"], response["model_version"]) == (
        "7",
        "talker",
        "1.0",
    )


def test_what_names_nothing_has_the_name_that_is_asked_for(triton: TritonClient) -> None:
    wanted = triton.module.InferRequestedOutput("probabilities")
    result = triton.client.infer(
        "talker", [triton.tensor("x", np.ones(2, "float32"), "FP32")], outputs=[wanted]
    )
    np.testing.assert_array_equal(result.as_numpy("probabilities"), [2, 2])


def test_a_handler_s_own_tensors_are_taken_as_they_are_and_chosen_from(
    triton: TritonClient,
) -> None:
    result = triton.do("own tensors")
    np.testing.assert_array_equal(result.as_numpy("numbers"), [1, 2])
    assert result.as_numpy("words").tolist() == [b"one", b"two"]
    chosen = triton.do("own tensors", outputs=[triton.module.InferRequestedOutput("words")])
    assert chosen.as_numpy("numbers") is None
    with pytest.raises(
        InferenceServerException, match="no output 'neither'; its outputs are numbers, words"
    ):
        triton.do("own tensors", outputs=[triton.module.InferRequestedOutput("neither")])


def test_a_dict_of_arrays_is_an_output_for_each(triton: TritonClient) -> None:
    result = triton.do("two arrays")
    assert (result.as_numpy("a").shape, result.as_numpy("b").dtype) == ((1, 2), np.int64)


def test_what_is_no_tensor_comes_as_bytes(triton: TritonClient) -> None:
    several = triton.tensor("several", [b"a", b"b"], "BYTES")
    said = triton.do("echo", several).as_numpy("output").tolist()[0].decode()
    assert '"several": ["a", "b"]' in said
    assert '"do": "echo"' in said


def test_json_tensors_are_json_for_the_handler_and_binary_ones_if_asked_for_in_the_answer(
    server: Running,
) -> None:
    asked = TritonClient(tritonclient.http, server.address("predictions").removeprefix("http://"))
    tensor = asked.tensor("x", np.ones((1, 2), "float32"), "FP32", binary_data=False)
    said = asked.client.infer("talker", [tensor]).as_numpy("output").tolist()[0].decode()
    assert '"data": [1.0, 1.0]' in said
    asked.client.close()


def test_errors_say_what_is_wrong(triton: TritonClient) -> None:
    one = triton.tensor("x", np.ones(2, "float32"), "FP32")
    with pytest.raises(InferenceServerException, match="Model not found: nope"):
        triton.client.infer("nope", [one])
    with pytest.raises(InferenceServerException, match="no such image"):
        triton.do("raise")


def test_the_server_says_what_it_is_and_what_is_ready(by_grpc: TritonClient) -> None:
    client = by_grpc.client
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("talker")
    assert client.is_model_ready("talker", "1.0")
    for name, version in (("nope", ""), ("talker", "9.0")):
        with pytest.raises(InferenceServerException) as caught:
            client.is_model_ready(name, version)
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert client.get_server_metadata().name == "Torchserve"
    assert list(client.get_model_metadata("talker").versions) == ["1.0"]
    with pytest.raises(InferenceServerException, match="Model not found: nope"):
        client.get_model_metadata("nope")


def test_a_stream_brings_each_part_and_errors_end_nothing(by_grpc: TritonClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    by_grpc.client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for model, word in (("talker", b"stream"), ("nope", b""), ("talker", b"large")):
        inputs = [
            by_grpc.tensor("do", [word], "BYTES"),
            by_grpc.tensor("data", [b"whole"], "BYTES"),
        ]
        by_grpc.client.async_stream_infer(model, inputs, request_id="9")
    found = [answers.get(timeout=TIMEOUT) for _ in range(6)]
    by_grpc.client.stop_stream()
    said = [None if result is None else result.as_numpy("output").tolist() for result, _ in found]
    assert said == [[b"a"], [b"b"], [b""], [b"c"], None, [b"whole"]]
    assert "Model not found: nope" in str(found[4][1])


def test_torchserve_s_name_serves_the_same_with_typed_contents(client: Client) -> None:
    messages = grpc_predict_v2_pb2
    name = "/org.pytorch.serve.grpc.openinference.GRPCInferenceService/ModelInfer"
    infer = client.inference_channel.unary_unary(
        name, messages.ModelInferRequest.SerializeToString, messages.ModelInferResponse.FromString
    )
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, 2],
        "contents": {"fp32_contents": [1, 2.5]},
    }
    response = infer(
        messages.ModelInferRequest(model_name="talker", id="3", inputs=[tensor]), timeout=TIMEOUT
    )
    assert list(response.outputs[0].contents.fp32_contents) == [2, 5]
    assert list(response.outputs[0].shape) == [1, 2]
    assert not response.raw_output_contents
    words = infer(
        messages.ModelInferRequest(
            model_name="talker",
            inputs=[
                {
                    "name": "do",
                    "datatype": "BYTES",
                    "shape": [1],
                    "contents": {"bytes_contents": [b"own tensors"]},
                }
            ],
        ),
        timeout=TIMEOUT,
    )
    assert list(words.outputs[1].contents.bytes_contents) == [b"one", b"two"]
    assert words.id == "own"


@pytest.mark.parametrize(
    ("method", "parameter"),
    [("ModelReady", "name"), ("ModelMetadata", "model_name"), ("ModelInfer", "model_name")],
)
def test_a_call_that_names_no_model_is_refused_in_torchserves_words(
    client: Client, method: str, parameter: str
) -> None:
    ask = client.inference_channel.unary_unary(
        f"/org.pytorch.serve.grpc.openinference.GRPCInferenceService/{method}"
    )
    with pytest.raises(grpc.RpcError) as refused:
        ask(b"", timeout=TIMEOUT)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(f"Parameter {parameter} is required.\n")


ENVELOPED = """
import numpy


def handle(data, context):
    return None if data is None else [(numpy.asarray(tensor["data"]) * 2).tolist() for tensor in data]
"""


@pytest.fixture(scope="module")
def enveloped(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server as KServe starts it: every model has the envelope of the protocol."""
    directory = tmp_path_factory.mktemp("enveloped")
    make_model(directory / "m.mar", ENVELOPED)
    environment = {
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_WORKER_PRELOAD": "false",
        "TSX_SERVICE_ENVELOPE": "kservev2",
    }
    with serving(
        ["serve", directory / "m.mar", *FREE_PORTS, *FREE_GRPC_PORTS], directory, environment
    ) as running:
        yield running


@pytest.mark.parametrize("module", [tritonclient.grpc, tritonclient.http])
@pytest.mark.parametrize("binary", [True, False])
def test_an_envelope_gets_tensors_however_they_come(
    enveloped: Running, module: Any, binary: bool
) -> None:
    by_http = module is tritonclient.http
    address = enveloped.address("predictions" if by_http else "gRPC predictions").removeprefix(
        "http://"
    )
    asked = TritonClient(module, address)
    options = {"binary_data": binary} if by_http else {}
    tensor = asked.tensor("x", np.array([[1.5, 2]], "float32"), "FP32", **options)
    result = asked.client.infer("m", [tensor], request_id="5")
    np.testing.assert_array_equal(result.as_numpy("x"), [[3, 4]])
    response = result.get_response()
    assert (response["id"] if by_http else response.id) == "5"
    asked.client.close()
