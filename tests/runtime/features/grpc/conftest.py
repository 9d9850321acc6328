"""A real server with gRPC, and a client whose code is generated from the .proto files."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tests.support.models import STATEFUL, make_model
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, Running, serving

PROTOS = Path(__file__).parents[4] / "runtime/tsx_runtime/grpc/protos"
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
        return [shown(element) for element in value]
    if hasattr(value, "tolist"):
        return [str(value.dtype), value.tolist()]
    return value.decode("latin-1") if isinstance(value, (bytes, bytearray)) else value
"""

COUNTING_HANDLER = """
calls = 0

def handle(data, context):
    global calls
    calls += len(data or [])
    return [str(calls)] * len(data or [])
"""


ROWS = """
import numpy


def handle(data, context):
    return None if data is None else [(numpy.asarray(tensor["data"]) * [2, 3, 4]).tolist() for tensor in data]
"""


class Client(NamedTuple):
    """The gRPC stubs of one server and their message modules."""

    predictions: Any
    models: Any
    messages: Any
    management: Any
    addresses: Callable[[str], str]
    inference_channel: grpc.Channel
    management_channel: grpc.Channel

    def request(
        self,
        model: str = "talker",
        *,
        version: str | None = None,
        sequence: str | None = None,
        **inputs: bytes,
    ) -> Any:
        return self.messages.PredictionsRequest(
            model_name=model, model_version=version, sequence_id=sequence, input=inputs
        )

    def ask(
        self, model: str = "talker", metadata: Any = (), timeout: float = TIMEOUT, **inputs: bytes
    ) -> Any:
        """Send one request and return (prediction, call)."""
        response, call = self.predictions.Predictions.with_call(
            self.request(model, **inputs), metadata=metadata, timeout=timeout
        )
        return response.prediction, call

    def start(self, model: str = "talker", metadata: Any = (), **inputs: bytes) -> Any:
        """Send one request and return the future of its answer."""
        return self.predictions.Predictions.future(
            self.request(model, **inputs), metadata=metadata, timeout=TIMEOUT
        )

    def stream(self, model: str = "talker", **inputs: bytes) -> Any:
        """Return the call whose messages are the parts of one streamed answer."""
        request = self.request(model, **inputs)
        return self.predictions.StreamPredictions(request, timeout=TIMEOUT)

    def converse(self, *requests: Any, metadata: Any = ()) -> Any:
        """Return the call that sends `requests` over one stream; its messages are the answers."""
        return self.predictions.StreamPredictions2(
            iter(requests), metadata=metadata, timeout=TIMEOUT
        )

    def manage(self, method: str, metadata: Any = (), **fields: Any) -> str:
        """Call a method of the management service and return its text."""
        request = getattr(self.management, f"{method}Request")(**fields)
        call = getattr(self.models, method)
        return str(call(request, metadata=metadata, timeout=TIMEOUT).msg)

    def count_pending(self) -> int:
        description = json.loads(self.manage("DescribeModel", model_name="talker"))
        return int(description[0]["jobQueueStatus"]["pendingRequests"])


def failure_of(call: Callable[[], Any]) -> Any:
    """Make a call that must fail and return its error, which has `code()` and `details()`."""
    with pytest.raises(grpc.RpcError) as exc_info:
        call()
    return exc_info.value


@pytest.fixture(scope="session")
def generated(
    processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Generate the modules that users of TorchServe generate from the .proto files."""
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
    names = ("inference_pb2", "inference_pb2_grpc", "management_pb2", "management_pb2_grpc")
    sys.path.append(str(directory))
    try:
        yield {name: importlib.import_module(name) for name in names}
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
    make_model(directory / "cached.mar", COUNTING_HANDLER, config="cache: {ttl: 1h}\n")
    make_model(
        directory / "broken.mar", "def handle(data, context):\n    import no_such_module_anywhere\n"
    )
    return directory


def a_server(
    directory: Path,
    *arguments: object,
    ports: tuple[object, ...] = FREE_GRPC_PORTS,
    **settings: object,
) -> AbstractContextManager[Running]:
    """Run `tsx serve` with gRPC; cache and state are in `directory`, `settings` are variables."""
    environment = {
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_STATE_DIR": str(directory / "state"),
        **{f"TSX_{name.upper()}": str(value) for name, value in settings.items()},
    }
    return serving(["serve", *arguments, *FREE_PORTS, *ports], directory, environment)


@pytest.fixture(scope="session")
def server(
    processes: None, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Run a server with one worker of `talker` and messages of up to 20 MB."""
    with a_server(
        tmp_path_factory.mktemp("grpc-server"),
        store / "talker.mar",
        "--model-store",
        store,
        max_request_size=20_000_000,
        max_response_size=20_000_000,
        write_timeout=2,
    ) as server_process:
        yield server_process


@pytest.fixture(scope="session")
def enveloped(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a server as KServe does: the models `whole` and `parts` use the KServe envelope.

    `parts` splits requests by rows.
    """
    directory = tmp_path_factory.mktemp("rows")
    models = [make_model(directory / f"{name}.mar", ROWS) for name in ("whole", "parts")]
    changes: list[str] = []
    for setting in ("split_rows=2", "workers=2", "batch_size=2"):
        changes += ("--set", f"models.parts.{setting}")
    with a_server(directory, *models, *changes, service_envelope="kservev2") as server_process:
        yield server_process


@contextmanager
def connected(
    server_process: Running,
    generated: dict[str, Any],
    make_channel: Callable[[str], grpc.Channel] = grpc.insecure_channel,
) -> Iterator[Client]:
    with (
        make_channel(server_process.address("gRPC predictions")) as inference,
        make_channel(server_process.address("gRPC models")) as management,
    ):
        yield Client(
            generated["inference_pb2_grpc"].InferenceAPIsServiceStub(inference),
            generated["management_pb2_grpc"].ManagementAPIsServiceStub(management),
            generated["inference_pb2"],
            generated["management_pb2"],
            server_process.address,
            inference,
            management,
        )


@pytest.fixture(scope="session")
def client(server: Running, generated: dict[str, Any]) -> Iterator[Client]:
    with connected(
        server, generated, lambda target: grpc.insecure_channel(target, UNLIMITED)
    ) as client:
        yield client
