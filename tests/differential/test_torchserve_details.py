"""Details of TorchServe and tsx: tokens, tracebacks, compilation, batching and directories."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import grpc
import pytest

from tests.differential.pair import RESPONSE_TIMEOUT_S, wait_for
from tests.support import forked

PROPERTIES = """
inference_address=http://127.0.0.1:{0}
management_address=http://127.0.0.1:{1}
metrics_address=http://127.0.0.1:{2}
grpc_inference_port={3}
grpc_management_port={4}
default_workers_per_model=1
enable_model_api=true
disable_system_metrics=true
"""
BATCH_SIZE_HANDLER = (
    "def handle(data, context):\n    return [str(len(data))] * len(data) if data else None\n"
)
FAILING_HANDLER = (
    "def call5():\n    assert False\n\n\ndef handle(data, context):\n    return call5()\n"
)
COMPILED_HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler


class Compiled(BaseHandler):
    def initialize(self, context):
        torch.save(torch.nn.Linear(1, 1).state_dict(), "linear.pt")
        context.manifest["model"].update({"modelFile": "model.py", "serializedFile": "linear.pt"})
        context.system_properties["model_dir"] = "."
        super().initialize(context)

    def handle(self, data, context):
        return ["compiled"] * len(data)
"""
MODEL_CODE = "import torch\n\n\nclass Linear(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(1, 1)\n"
Until: TypeAlias = Callable[[Callable[[], object]], None]
TSX_COMMAND = [sys.executable, "-m", "tsx_cli.serve.torchserve"]


class Server(NamedTuple):
    """A running server with tokens: its ports, its directory, its command and environment."""

    ports: list[int]
    directory: Path
    command: list[str]
    environment: dict[str, str]

    def keys(self) -> dict[str, dict[str, str]]:
        return dict(json.loads((self.directory / "key_file.json").read_bytes()))

    def ask(
        self, port: int, target: str, kind: str, method: str = "POST", body: bytes | None = b"x"
    ) -> bytes:
        headers = {
            "Authorization": f"Bearer {self.keys()[kind]['key']}",
            "Content-Type": "text/plain",
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[port]}{target}", body, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=RESPONSE_TIMEOUT_S) as answer:
            return bytes(answer.read())

    def model_log(self) -> str:
        return (self.directory / "model_log.log").read_text()


def archive(path: Path, handler: str, config: str, **files: str) -> None:
    model = {
        "modelName": path.stem,
        "modelVersion": "1.0",
        "handler": "handler.py",
        "configFile": "model-config.yaml",
    }
    members = {
        "handler.py": handler,
        "model-config.yaml": f"minWorkers: 1\nmaxWorkers: 1\nmaxRetryTimeoutInSec: 1\n{config}",
        **files,
    }
    members["MAR-INF/MANIFEST.json"] = json.dumps(
        {"runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    )
    with zipfile.ZipFile(path, "w") as archive_file:
        for member, text in members.items():
            archive_file.writestr(member, text)


@contextlib.contextmanager
def running(
    command: list[str], directory: Path, store: Path, ports: list[int], path: str
) -> Iterator[Server]:
    directory.mkdir()
    (directory / "config.properties").write_text(PROPERTIES.format(*ports))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TS_", "TSX_"))
    }
    environment |= {
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "TEMP": str(directory),
        "LOG_LOCATION": str(directory),
    }
    environment["TS_OPEN_INFERENCE_PROTOCOL"] = "oip"
    environment.pop("TMPDIR", None)
    server = Server(ports, directory, command, environment)
    arguments = shlex.split(
        f"--start --foreground --ncs --ts-config config.properties --model-store {store}"
    )
    with (directory / "log").open("wb") as log:
        process = forked.Popen(
            [*command, *arguments],
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(
            process,
            f"http://127.0.0.1:{ports[0]}/ping",
            directory / "log",
            None,
            lambda: server.keys()["inference"]["key"],
        )
        yield server
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


@pytest.fixture(scope="module")
def servers(
    torchserve: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[list[Server]]:
    """Start TorchServe and tsx."""
    directory = tmp_path_factory.mktemp("details")
    store = directory / "store"
    store.mkdir()
    archive(store / "count.mar", BATCH_SIZE_HANDLER, "")
    archive(store / "waits.mar", BATCH_SIZE_HANDLER, "batchPolicy: wait\n")
    archive(store / "fails.mar", FAILING_HANDLER, "")
    archive(store / "compiled.mar", COMPILED_HANDLER, "pt2: inductor\n", **{"model.py": MODEL_CODE})
    ports = free_ports(10)
    with (
        running(
            [str(torchserve / "torchserve")],
            directory / "theirs",
            store,
            ports[:5],
            str(torchserve),
        ) as theirs,
        running(
            TSX_COMMAND, directory / "ours", store, ports[5:], str(Path(sys.executable).parent)
        ) as ours,
    ):
        yield [theirs, ours]


def register(server: Server, model: str, more: str = "") -> None:
    server.ask(1, f"/models?url={model}.mar&initial_workers=1&synchronous=true{more}", "management")


def test_a_new_key_does_not_change_the_other_keys_expiry(servers: list[Server]) -> None:
    for server in servers:
        keys_before = server.keys()
        server.ask(1, "/token?type=inference", "API", "GET", None)
        assert server.keys()["management"] == keys_before["management"]
        assert server.keys()["inference"] != keys_before["inference"]


@pytest.mark.parametrize("method", ["ModelReady", "ModelMetadata", "ModelInfer"])
def test_a_call_without_a_name_is_refused_with_equal_texts(
    servers: list[Server], method: str
) -> None:
    refusals = []
    for server in servers:
        with grpc.insecure_channel(f"127.0.0.1:{server.ports[3]}") as channel:
            call = channel.unary_unary(
                f"/org.pytorch.serve.grpc.openinference.GRPCInferenceService/{method}"
            )
            with pytest.raises(grpc.RpcError) as refused:
                call(
                    b"",
                    metadata=[("authorization", f"Bearer {server.keys()['inference']['key']}")],
                    timeout=RESPONSE_TIMEOUT_S,
                )
            refusals.append((refused.value.code(), refused.value.details().splitlines()[0]))
    (their_code, their_text), (our_code, our_text) = refusals
    assert their_text == our_text
    # The codes differ on purpose, since retrying an invalid call cannot help.
    assert (their_code, our_code) == (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


def test_a_missing_temporary_directory_ends_the_start_equally(
    servers: list[Server], tmp_path: Path
) -> None:
    outcomes = []
    for server in servers:
        environment = {**server.environment, "TEMP": str(tmp_path / "nowhere")}
        commands = [["--start", "--model-store", str(tmp_path)], ["--stop"], ["--version"]]
        results = [
            forked.run(
                [*server.command, *command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=RESPONSE_TIMEOUT_S,
            )
            for command in commands
        ]
        outcomes.append(
            [
                (process.returncode, process.stdout.partition(" (tsx")[0].strip())
                for process in results
            ]
        )
    assert outcomes[0] == outcomes[1]


def test_a_loading_failure_has_an_equal_traceback(servers: list[Server], until: Until) -> None:
    traces = []
    for server in servers:
        with contextlib.suppress(OSError):
            register(server, "fails")
        last_line = re.compile(r"AssertionError *$", re.MULTILINE)
        until(
            lambda log=server.model_log, last_line=last_line: last_line.search(
                log().partition("Traceback (most")[2]
            )
        )  # type: ignore[misc]
        lines = [
            re.sub(r"^.*? MODEL_LOG - ", "", line).rstrip()
            for line in server.model_log().splitlines()
            if "-fails_1.0-" in line
        ]
        trace = lines[lines.index("Traceback (most recent call last):") :]
        trace = trace[: trace.index("AssertionError") + 1]
        start = next(
            number
            for number, line in enumerate(trace)
            if line.endswith('handler.py", line 6, in handle')
        )
        traces.append([re.sub(r'File ".*/', 'File "', line) for line in trace[start:]])
    assert traces[0] == traces[1]
    assert '  File "handler.py", line 2, in call5' in traces[1]


def test_a_compiled_model_is_logged_equally(servers: list[Server], until: Until) -> None:
    for server in servers:
        register(server, "compiled")
        until(lambda log=server.model_log: "Compiled model with backend inductor" in log())  # type: ignore[misc]


@pytest.mark.parametrize(
    ("model", "sizes"), [("count", [["2", "2"], ["1", "1"]]), ("waits", [["2", "2"], ["2", "2"]])]
)
def test_only_torchserve_waits_for_a_batch_by_default(
    servers: list[Server], model: str, sizes: Any
) -> None:
    answers = []
    for server in servers:
        register(server, model, "&batch_size=4&max_batch_delay=3000")
        with ThreadPoolExecutor(2) as pool:
            futures = [
                pool.submit(server.ask, 0, f"/predictions/{model}", "inference") for _ in range(2)
            ]
            answers.append([future.result().decode() for future in futures])
    assert answers == sizes
