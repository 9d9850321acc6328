"""An archive from a Python file answers alike on all targets, in a workflow and over gRPC."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
import torch

from tests.runtime.targets.image.test_serve import container
from tests.runtime.test_conformance import PREDICT, Ask, Case, by_http, by_lambda
from tests.support.models import make_war
from tests.support.platforms.lambda_api import function
from tests.support.platforms.sagemaker_host import container as endpoint
from tests.support.platforms.sagemaker_host import unpack
from tests.support.servers import DEADLINE, FREE_GRPC_PORTS, FREE_PORTS, FreePorts, serving
from tsx_archiver import write_archive
from tsx_cli.archive.python_files.models import one_model_each
from tsx_cli.archive.python_files.spec import python_file_spec
from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelInferRequest, ModelInferResponse
from tsx_runtime.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("processes")]

FILES = {
    "app.py": '''
# /// script
# dependencies = ["torch"]
# [tool.tsx]
# maxBatchDelay = 1
# ///
import json
from pathlib import Path

import torch
from pydantic import BaseModel

import nets.sum

HERE = Path(__file__).parent

class Row(BaseModel):
    row: list[float]

class Total:
    """Add the numbers of a row."""

    batch_size = 4
    precision = "bf16"

    def load(self, device):
        self.model = nets.sum.Sum()
        self.model.load_state_dict(torch.load(HERE / "weights.pth"))
        self.name = json.loads((HERE / "labels" / "names.json").read_text())[0]

    def predict(self, batch: list[Row]) -> list[dict[str, float]]:
        assert self.model.linear.weight.dtype is torch.bfloat16
        with torch.inference_mode():
            totals = self.model(torch.tensor([item.row for item in batch]))
        return [{self.name: total} for total in totals[:, 0].tolist()]

class Rounded:
    def predict(self, item: dict[str, float]) -> str:
        return str(round(item["total"]))

class Words:
    def predict(self, text: str, times: int = 1) -> str:
        return text * times
''',
    "nets/sum.py": """
import torch

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, rows):
        return self.linear(rows)
""",
    "labels/names.json": '["total"]',
}
JSON = {"content-type": "application/json"}
WORKFLOW = """
models:
  min-workers: 1
  max-workers: 1
  total: {url: total.mar}
  rounded: {url: rounded.mar}
dag:
  total: [rounded]
"""


class Targets(NamedTuple):
    """The model on each target; `serve` is the address of `tsx serve`, `grpc` is its channel."""

    asks: dict[str, Ask]
    serve: str
    grpc: grpc.Channel


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory, free_ports: FreePorts) -> Iterator[Targets]:
    directory = tmp_path_factory.mktemp("p")
    for name, text in FILES.items():
        path = directory / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    weights = {"linear.weight": torch.ones(1, 2), "linear.bias": torch.zeros(1)}
    torch.save(weights, directory / "project" / "weights.pth")
    archives = []
    for model in one_model_each(directory / "project" / "app.py"):
        with python_file_spec(model) as (spec, _):
            archives.append(write_archive(spec, directory))
    make_war(directory / "flow.war", WORKFLOW, None, name="flow")
    for name in ("model", "sagemaker", "own", "awslambdaric", "tsx"):
        (directory / name).mkdir()
    shutil.copy(archives[0], directory / "model")
    unpack(archives[0], directory / "sagemaker")
    common = {"TSX_CACHE_DIR": str(directory / "cache"), "OMP_NUM_THREADS": "1"}
    model_directory = {"TSX_MODEL_DIR": str(directory / "model"), **common}
    options = ["--model-store", ".", *FREE_PORTS, *FREE_GRPC_PORTS]
    with ExitStack() as stack:
        enter, ports = stack.enter_context, free_ports(3)
        serve = enter(serving(["serve", *archives, "flow.war", *options], directory, common))
        enter(container(directory / "own", ports[:2], **model_directory))
        host = enter(endpoint(directory / "sagemaker", ports[2], common))
        host.wait_until_healthy()
        address = serve.address("predictions")
        asks = {
            "tsx serve": by_http(address),
            "container": by_http(f"http://127.0.0.1:{ports[0]}"),
            "SageMaker": by_http(f"http://127.0.0.1:{ports[2]}"),
        }
        for client in ("awslambdaric", "tsx"):
            variables = {**model_directory, "TSX_LAMBDA_RUNTIME": client}
            asks[f"Lambda by {client}"] = by_lambda(enter(function(directory / client, variables)))
        channel = enter(grpc.insecure_channel(serve.address("gRPC predictions")))
        yield Targets(asks, address, channel)


TARGETS = ("tsx serve", "container", "SageMaker", "Lambda by awslambdaric", "Lambda by tsx")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("path", ["/predictions/total", "/invocations", "/v2/models/total/infer"])
def test_each_target_answers_alike(targets: Targets, target: str, path: str) -> None:
    ask = targets.asks[target]
    if path == "/invocations" and target == "tsx serve":
        path = "/predictions/total/1.0"  # The server has several models.
    row: dict[str, Any] = {"row": [1.5, 2]}
    expected: Any = {"total": 3.5}
    if "infer" in path:
        tensor = {"name": "row", "shape": [2], "datatype": "FP32", "data": row["row"]}
        row = {"inputs": [tensor]}
    accepted = ask(Case(JSON, json.dumps(row).encode(), path))
    answer = json.loads(accepted.body)
    if "infer" in path:
        (output,) = answer["outputs"]
        answer = {output["name"]: output["data"][0]}
    assert (accepted.status, answer) == (200, expected)
    refused = ask(Case(JSON, b'{"row": ["a"]}', path))
    assert refused.status == 422
    assert json.loads(refused.body)["detail"][0]["loc"] == ["body", "row", 0]


def test_a_workflow_has_typed_models_one_after_the_other(targets: Targets) -> None:
    response = httpx.post(f"{targets.serve}/wfpredict/flow", json={"row": [1, 2]}, timeout=DEADLINE)
    assert (response.status_code, response.text) == (200, "3")
    refused = httpx.post(f"{targets.serve}/wfpredict/flow", json={"row": 1}, timeout=DEADLINE)
    assert refused.status_code == 422
    assert "list_type" in refused.text


@pytest.mark.parametrize(
    ("model", "fields", "expected"),
    [
        ("total", {"data": '{"row": [1, 2]}'}, b'{"total":3.0}'),
        ("total", {"row": "[1, 2]"}, b'{"total":3.0}'),
        ("words", {"text": "ab", "times": "2"}, b"abab"),
        ("words", {"body": '{"text": "ab"}'}, b"ab"),
        ("total", {"data": '{"row": 1}'}, None),
    ],
)
def test_torchserves_grpc_calls_have_typed_inputs(
    targets: Targets, model: str, fields: dict[str, str], expected: bytes | None
) -> None:
    call = targets.grpc.unary_unary(
        PREDICT, PredictionsRequest.SerializeToString, PredictionResponse.FromString
    )
    inputs = {name: text.encode() for name, text in fields.items()}
    request = PredictionsRequest(model_name=model, input=inputs)
    if expected is not None:
        assert call(request, timeout=DEADLINE).prediction == expected
        return
    with pytest.raises(grpc.RpcError) as raised:
        call(request, timeout=DEADLINE)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_tensors_over_grpc_are_fields(targets: Targets) -> None:
    infer = targets.grpc.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        ModelInferRequest.SerializeToString,
        ModelInferResponse.FromString,
    )
    row = {"name": "row", "datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1, 2]}}
    text = {
        "name": "text",
        "datatype": "BYTES",
        "shape": [1],
        "contents": {"bytes_contents": [b"ab"]},
    }
    for model, tensor, output in (("total", row, "total"), ("words", text, "output")):
        request = ModelInferRequest(model_name=model, inputs=[tensor])
        (response,) = infer(request, timeout=DEADLINE).outputs
        assert (response.name, list(response.shape)) == (output, [1])
        contents = response.contents
        assert [*contents.fp64_contents, *contents.bytes_contents] in ([3.0], [b"ab"])
