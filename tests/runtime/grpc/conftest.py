"""A real server process, and the clients that people have: code generated from the .proto files,
and Triton's own.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tests.support.models import STATEFUL, make_model
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, Running, serving

PROTOS = Path(__file__).parents[3] / "runtime/tsx_runtime/grpc/protos"
TIMEOUT = 60.0
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

HANDLER = """
import json, time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    return [act(idx, row, context) for idx, row in enumerate(data)]


def act(idx, row, context):
    word = text(row.get("do", b""))
    if word == "raise":
        raise RuntimeError("no such image")
    if word == "status":
        context.set_response_status(507, "Own words", idx)
        return "body of it"
    if word == "headers":
        context.set_response_content_type(idx, "text/csv")
        context.set_response_header(idx, "X-Own", "1")
        context.set_response_header(idx, "X-Name", "caf\\u00e9")
        return "a,b"
    if word == "large":
        return bytes(row["data"])
    if word == "wait":
        deadline = time.monotonic() + 90  # a test that failed must not hold the worker
        Path(text(row["begun"])).touch()
        while not Path(text(row["file"])).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        return "waited"
    if word == "flood":
        from ts.handler_utils.utils import send_intermediate_predict_response

        for _ in range(100_000):
            send_intermediate_predict_response([b"x" * 65536], {idx: context.get_request_id(idx)}, "Intermediate", 200, context)
    if word in ("stream", "stream-fails"):
        from ts.handler_utils.utils import send_intermediate_predict_response

        for part in ("a", "b", ""):
            send_intermediate_predict_response([part], {idx: context.get_request_id(idx)}, "Intermediate", 200, context)
        if word == "stream-fails":
            raise RuntimeError("in the middle")
        return "c"
    if word == "own tensors":
        outputs = [
            {"name": "numbers", "datatype": "INT32", "shape": [2], "data": [1, 2]},
            {"name": "words", "datatype": "BYTES", "shape": [2], "data": ["one", "two"]},
        ]
        return {"id": "own", "model_name": "talker", "outputs": outputs}
    if word == "two arrays":
        import numpy

        return {"a": numpy.zeros((1, 2), "float32"), "b": numpy.ones(3, "int64")}
    if "x" in row:
        return row["x"] * 2
    headers = {name: value for name, value in context.get_all_request_header(idx).items()}
    return json.dumps({"row": {name: shown(value) for name, value in row.items()}, "headers": headers})


def text(value):
    return value.decode() if isinstance(value, (bytes, bytearray)) else str(value)


def shown(value):
    if isinstance(value, list):
        return [shown(each) for each in value]
    if hasattr(value, "tolist"):
        return [str(value.dtype), value.tolist()]
    return value.decode("latin-1") if isinstance(value, (bytes, bytearray)) else value
"""

COUNTING = """
calls = 0

def handle(data, context):
    global calls
    calls += len(data or [])
    return [str(calls)] * len(data or [])
"""


class Client(NamedTuple):
    """Stubs for one server, and the modules of their messages."""

    predictions: Any
    models: Any
    messages: Any
    management: Any
    addresses: Callable[[str], str]
    inference_channel: grpc.Channel
    management_channel: grpc.Channel

    def ask(
        self, model: str = "talker", metadata: Any = (), timeout: float = TIMEOUT, **inputs: bytes
    ) -> Any:
        """(prediction, call) of one request."""
        request = self.messages.PredictionsRequest(model_name=model, input=inputs)
        response, call = self.predictions.Predictions.with_call(
            request, metadata=metadata, timeout=timeout
        )
        return response.prediction, call

    def pending(self) -> int:
        import json

        request = self.management.DescribeModelRequest(model_name="talker")
        described = json.loads(self.models.DescribeModel(request, timeout=TIMEOUT).msg)
        return int(described[0]["jobQueueStatus"]["pendingRequests"])


@pytest.fixture(scope="session")
def generated(
    processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """What TorchServe's users have: modules made by protoc from the .proto files."""
    directory = tmp_path_factory.mktemp("generated")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTOS}",
        f"--python_out={directory}",
        f"--grpc_python_out={directory}",
    ]
    subprocess.run(
        [*command, "inference.proto", "management.proto", "google/rpc/status.proto"],
        check=True,
        timeout=TIMEOUT,
    )
    sys.path.append(str(directory))
    try:
        yield {
            name: importlib.import_module(name)
            for name in (
                "inference_pb2",
                "inference_pb2_grpc",
                "management_pb2",
                "management_pb2_grpc",
            )
        }
    finally:
        sys.path.remove(str(directory))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grpc-store")
    make_model(directory / "talker.mar", HANDLER)
    make_model(directory / "talker2.mar", HANDLER, name="talker", version="2.0")
    make_model(
        directory / "stateful.mar",
        STATEFUL,
        config="sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 10\nmaxSequenceJobQueueSize: 10\nbatchSize: 4\n",
    )
    make_model(directory / "cached.mar", COUNTING, config="cache: {ttl: 1h}\n")
    make_model(
        directory / "broken.mar", "def handle(data, context):\n    import no_such_module_anywhere\n"
    )
    return directory


@pytest.fixture(scope="session")
def server(
    processes: None, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """`talker` with one worker; 20 MB for a message."""
    directory = tmp_path_factory.mktemp("grpc-server")
    environment = {
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_STATE_DIR": str(
            directory / "state"
        ),  # what is said of its traffic is no other server's of this store
        "TSX_MAX_REQUEST_SIZE": "20000000",
        "TSX_MAX_RESPONSE_SIZE": "20000000",
        "TSX_WORKER_PRELOAD": "false",
        "TSX_WRITE_TIMEOUT": "2",
    }
    with serving(
        ["serve", store / "talker.mar", "--model-store", store, *FREE_PORTS, *FREE_GRPC_PORTS],
        directory,
        environment,
    ) as running:
        yield running


def connected(
    running: Running, generated: dict[str, Any], make: Callable[[str], grpc.Channel]
) -> Client:
    inference, management = (
        make(running.address("gRPC predictions")),
        make(running.address("gRPC models")),
    )
    return Client(
        generated["inference_pb2_grpc"].InferenceAPIsServiceStub(inference),
        generated["management_pb2_grpc"].ManagementAPIsServiceStub(management),
        generated["inference_pb2"],
        generated["management_pb2"],
        running.address,
        inference,
        management,
    )


@pytest.fixture(scope="session")
def client(server: Running, generated: dict[str, Any]) -> Iterator[Client]:
    made = connected(server, generated, lambda target: grpc.insecure_channel(target, UNLIMITED))
    yield made
    made.inference_channel.close()
    made.management_channel.close()


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], object]], None]:
    """Wait for what gives no event."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return wait
