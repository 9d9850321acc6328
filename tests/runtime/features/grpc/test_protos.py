"""The .proto files, the modules generated from them, and those of TorchServe's clients."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tests.runtime.features.grpc.conftest import TIMEOUT
from tsx_runtime.features.grpc.open_inference import MESSAGES_BY_SERVICE
from tsx_runtime.grpc.pool import POOL
from tsx_runtime.grpc.protos import grpc_predict_v2_pb2, inference_pb2, management_pb2

ROOT = Path(__file__).parents[4]


def fields(message: Any) -> dict[str, int]:
    return {field.name: field.number for field in message.DESCRIPTOR.fields}


@pytest.mark.usefixtures("processes")
def test_the_generated_modules_match_the_proto_files() -> None:
    pinned_version = re.search(
        r"^grpcio-tools==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert pinned_version is not None
    if version("grpcio-tools") != pinned_version[1]:
        pytest.skip(
            f"another release than grpcio-tools {pinned_version[1]} may write the same otherwise"
        )
    command = [sys.executable, ROOT / "scripts/update_protos.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_both_open_inference_protos_differ_only_in_names() -> None:
    standard, torchserve = (POOL.FindServiceByName(name).file for name in MESSAGES_BY_SERVICE)
    own_proto, torchserve_proto = (
        FileDescriptorProto.FromString(file.serialized_pb) for file in (standard, torchserve)
    )
    assert (own_proto.package, torchserve_proto.package) == (
        "inference",
        "org.pytorch.serve.grpc.openinference",
    )
    text = (
        str(torchserve_proto)
        .replace(torchserve_proto.name, own_proto.name)
        .replace(torchserve_proto.package, own_proto.package)
    )
    assert text == str(own_proto)


def test_field_names_and_numbers_equal_torchserves() -> None:
    assert fields(inference_pb2.PredictionsRequest) == {
        "model_name": 1,
        "model_version": 2,
        "input": 3,
        "sequence_id": 4,
    }
    assert fields(inference_pb2.PredictionResponse) == {
        "prediction": 1,
        "sequence_id": 2,
        "status": 3,
    }
    assert fields(inference_pb2.TorchServeHealthResponse) == {"health": 1}
    assert fields(management_pb2.DescribeModelRequest) == {
        "model_name": 1,
        "model_version": 2,
        "customized": 3,
    }
    assert fields(management_pb2.ListModelsRequest) == {"limit": 1, "next_page_token": 2}
    register = "batch_size handler initial_workers max_batch_delay model_name response_timeout runtime synchronous url s3_sse_kms startup_timeout"
    assert fields(management_pb2.RegisterModelRequest) == {
        name: number for number, name in enumerate(register.split(), 1)
    }
    scale = "model_name model_version max_worker min_worker number_gpu synchronous timeout"
    assert fields(management_pb2.ScaleWorkerRequest) == {
        name: number for number, name in enumerate(scale.split(), 1)
    }
    assert (
        fields(management_pb2.SetDefaultRequest)
        == fields(management_pb2.UnregisterModelRequest)
        == {"model_name": 1, "model_version": 2}
    )
    assert fields(management_pb2.ManagementResponse) == {"msg": 1}
    infer = "model_name model_version id parameters inputs outputs raw_input_contents"
    assert fields(grpc_predict_v2_pb2.ModelInferRequest) == {
        name: number for number, name in enumerate(infer.split(), 1)
    }
    contents = "bool int int64 uint uint64 fp32 fp64 bytes"
    assert fields(grpc_predict_v2_pb2.InferTensorContents) == {
        f"{name}_contents": number for number, name in enumerate(contents.split(), 1)
    }


def test_every_service_has_torchserves_methods() -> None:
    methods = {
        "org.pytorch.serve.grpc.inference.InferenceAPIsService": "Ping Predictions StreamPredictions StreamPredictions2",
        "org.pytorch.serve.grpc.management.ManagementAPIsService": (
            "DescribeModel ListModels RegisterModel ScaleWorker SetDefault UnregisterModel"
        ),
        "org.pytorch.serve.grpc.openinference.GRPCInferenceService": (
            "ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelInfer ModelStreamInfer"
        ),
    }
    for service, names in methods.items():
        assert [method.name for method in POOL.FindServiceByName(service).methods] == names.split()


def test_a_clients_generated_code_works_in_the_same_process(generated: dict[str, Any]) -> None:
    client_request = generated["inference_pb2"].PredictionsRequest(
        model_name="m", input={"a": b"b"}
    )
    own_request = inference_pb2.PredictionsRequest.FromString(client_request.SerializeToString())
    assert (own_request.model_name, dict(own_request.input)) == ("m", {"a": b"b"})
    assert type(own_request) is not type(client_request)
