"""`mlflow deployments -t tsx://...` with a real MLflow server and a real tsx server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow.pytorch
import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from mlflow.deployments.cli import commands
from mlflow.exceptions import MlflowException
from mlflow.models import infer_signature
from mlflow.pyfunc.scoring_server.client import ScoringServerClient
from mlflow.tracking import MlflowClient

from tests.cli.conftest import Answering, Run
from tests.support.servers import FREE_PORTS, Running, serving
from tsx_cli import mlflow_deployments
from tsx_cli.mlflow_deployments import TsxDeploymentClient, address

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "mlflow.md"
ROW = [[1.0, 2.0, 3.0, 4.0]]


@pytest.fixture(scope="module")
def tracking(
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[str]:
    """Start an MLflow server with two versions of a model, of which the first is the champion."""
    directory = tmp_path_factory.mktemp("mlflow")
    (port,) = free_ports(1)
    options = f"--backend-store-uri sqlite:///mlflow.db --workers 1 --host 127.0.0.1 --port {port}"
    # Job execution would start processes that these tests do not need.
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *options.split()],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "Application startup complete" in line:
                break
        else:
            raise AssertionError(lines)
        previous_uri = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(f"http://127.0.0.1:{port}")
        _log_models()
        yield f"http://127.0.0.1:{port}"
        mlflow.set_tracking_uri(previous_uri)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        server.stdout.close()


def _log_models() -> None:
    rows = np.array(ROW, dtype=np.float32)
    for seed in (1, 2):
        torch.manual_seed(seed)
        net = torch.nn.Linear(4, 2)
        signature = infer_signature(rows, net(torch.from_numpy(rows)).detach().numpy())
        with mlflow.start_run():
            mlflow.pytorch.log_model(
                net,
                name="net",
                signature=signature,
                registered_model_name="iris",
                serialization_format="pickle",
                pip_requirements=["torch"],
            )
    MlflowClient().set_registered_model_alias("iris", "champion", "1")
    MlflowClient().set_model_version_tag("iris", "1", "owner", "botany")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("server")
    (directory / "models").mkdir()
    arguments = ("serve", "--model-store", "models", *FREE_PORTS, "--set", "enable_model_api=true")
    with serving(arguments, directory, {"TSX_CACHE_DIR": str(directory / "cache")}) as running:
        yield running


@pytest.fixture
def store(server: Running) -> Path:
    return server.log_file.parent / "models"


@pytest.fixture
def client(
    server: Running, store: Path, tracking: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TsxDeploymentClient]:
    """Return a client of the server at the settings' addresses, and empty the server afterwards."""
    monkeypatch.setenv("TSX_MODEL_STORE", str(store))
    for role, title in (("INFERENCE", "predictions"), ("MANAGEMENT", "models")):
        monkeypatch.setenv(f"TSX_{role}_ADDRESS", server.address(title))
    client = TsxDeploymentClient("tsx")
    yield client
    for endpoint in client.list_endpoints():
        client.delete_endpoint(endpoint["name"])


def names(resources: list[dict[str, Any]]) -> list[str]:
    return [resource["name"] for resource in resources]


def refused(act: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(MlflowException) as caught:
        act(*arguments, **options)
    return caught.value.error_code, caught.value.message


def test_mlflows_own_client_reads_the_predictions_of_a_deployment(
    server: Running, client: TsxDeploymentClient
) -> None:
    client.create_deployment("flowers", "models:/iris@champion")
    host, port = server.address("predictions").removeprefix("http://").split(":")
    scoring = ScoringServerClient(host, port)
    scoring.wait_server_ready()
    predictions = scoring.invoke(pd.DataFrame(ROW)).get_predictions()
    assert predictions.shape == (1, 2)


def test_each_command_of_the_documentation_works(
    tracking: str,
    client: TsxDeploymentClient,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run MLflow's commands in this process, since starting one takes seconds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(store)
    (tmp_path / "rows.json").write_text(json.dumps(ROW))
    lines = re.findall(r"^\$ mlflow deployments (.*)$", PAGE.read_text(), re.MULTILINE)
    outputs = []
    for line in lines:
        arguments = shlex.split(line.replace("tsx://127.0.0.1:8080", "tsx"))
        result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
        assert result.exit_code == 0, (line, result.output)
        outputs.append(result.output)
    outputs_by_line = dict(zip(lines, outputs, strict=True))
    assert len(lines) == 10
    assert "pytorch deployment iris is created" in outputs[0]
    assert "predictions" in outputs[1]
    assert "modelVersion: 1" in outputs[2]
    assert "Deployment iris is updated (with flavor unchanged)" in outputs[3]
    split = next(
        output for line, output in outputs_by_line.items() if line.startswith("get-endpoint")
    )
    assert "traffic: {'1': 0.9, '2': 0.1}" in split
    list_output = next(
        output for line, output in outputs_by_line.items() if line.startswith("list")
    )
    assert "{'name': '1', 'endpoint': 'iris'}, {'name': '2', 'endpoint': 'iris'}" in list_output
    assert client.list_deployments() == []


def test_a_deployment_is_created_changed_replaced_and_deleted(client: TsxDeploymentClient) -> None:
    assert client.create_deployment("iris", "models:/iris/1", config={"batch_size": 8}) == {
        "name": "iris",
        "flavor": "pytorch",
    }
    assert client.list_deployments() == [{"name": "iris"}]
    first = client.predict("iris", np.array(ROW))
    inputs: list[Any] = [torch.tensor(ROW), {"inputs": np.array(ROW)}, {"inputs": ROW}, ROW]
    for value in inputs:
        assert client.predict("iris", value) == first
    assert client.predict("iris/1", pd.DataFrame(ROW)) == first
    assert len(client.explain("iris", ROW)) == len(ROW[0])
    updated = client.update_deployment("iris", config={"BATCH-SIZE": 4})
    assert updated == {"name": "iris", "flavor": "unchanged"}
    assert client.get_deployment("iris")["batchSize"] == 4
    updated = client.update_deployment("iris", "models:/iris/2", flavor="pytorch")
    assert updated["flavor"] == "pytorch"
    assert client.list_deployments(endpoint="iris") == [{"name": "2", "endpoint": "iris"}]
    assert client.predict("iris", ROW) != first
    client.delete_deployment("iris")
    client.delete_deployment("iris")
    assert client.list_deployments() == []


def test_an_endpoint_splits_its_requests_among_its_deployments(client: TsxDeploymentClient) -> None:
    assert client.create_endpoint("flowers") == {"name": "flowers"}
    client.create_deployment("a", "models:/iris/1", endpoint="flowers")
    client.create_deployment("b", "models:/iris/2", endpoint="flowers")
    assert names(client.list_endpoints()) == ["flowers"]
    assert names(client.list_deployments(endpoint="flowers")) == ["a", "b"]
    assert client.get_endpoint("flowers") == {
        "name": "flowers",
        "default": "a",
        "traffic": {"a": 1.0, "b": 0.0},
    }
    client.update_endpoint("flowers", {"traffic": {"a": 0, "b": 100}})
    assert client.get_endpoint("flowers")["traffic"] == {"a": 0.0, "b": 1.0}
    split = client.predict(endpoint="flowers", inputs=ROW)
    assert split == client.predict("b", ROW, endpoint="flowers")
    client.update_deployment("flowers/b", config={"set-default": "true"})
    assert client.get_endpoint("flowers")["default"] == "b"
    client.update_endpoint("flowers", {"default": "a"})
    client.update_endpoint("flowers", {"default": "b"})
    client.delete_deployment("a", endpoint="flowers")
    assert names(client.list_deployments(endpoint="flowers")) == ["b"]
    assert refused(client.create_endpoint, "flowers")[0] == "RESOURCE_ALREADY_EXISTS"
    client.delete_endpoint("flowers")
    client.delete_endpoint("flowers")
    assert client.list_endpoints() == []


def test_a_refused_deployment_is_reported_with_a_remedy(
    client: TsxDeploymentClient, store: Path, tmp_path: Path
) -> None:
    create, update = client.create_deployment, client.update_deployment
    model = "models:/iris/1"
    code, message = refused(create, "tulips", model, config={"EXPORT_PATH": str(tmp_path)})
    assert code == "RESOURCE_DOES_NOT_EXIST"
    assert f"the server does not read {tmp_path}" in message
    assert list(tmp_path.iterdir()) == []
    for name, source, settings, error in (
        ("iris", model, {"config": {"EXPORT_PATH": "none"}}, "EXPORT_PATH=DIR names the server's"),
        ("iris", model, {"config": {"batchsizes": 1}}, "did you mean 'batch_size'?"),
        ("iris", model, {"flavor": "onnx"}, "has the flavour pytorch, not onnx"),
        ("roses", "models:/roses/1", {}, "(name=roses, version=1) not found"),
        ("iris/3", model, {"config": {"VERSION": "4"}}, "leave it out"),
    ):
        assert error in refused(create, name, source, **settings)[1]
    create("iris", model)
    assert refused(create, "iris", model)[0] == "RESOURCE_ALREADY_EXISTS"
    assert "give --model-uri as well" in refused(update, "iris", flavor="pytorch")[1]
    assert "nothing to update" in refused(update, "iris")[1]
    assert "name it, as in iris/2" in refused(update, "iris", config={"set_default": True})[1]
    files_before = set(store.iterdir())
    code, _ = refused(update, "iris", model, config={"initial_workers": -1})
    assert code == "INVALID_PARAMETER_VALUE"
    # The served archive still exists.
    assert set(store.iterdir()) == files_before
    code, message = refused(client.predict, "iris", [[1, 2]])
    assert (code, "float32 rows of shape [4]" in message) == ("INVALID_PARAMETER_VALUE", True)
    assert refused(client.get_deployment, "roses")[0] == "RESOURCE_DOES_NOT_EXIST"


def test_a_torch_model_file_is_deployed(client: TsxDeploymentClient, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(4, 2)), tmp_path / "net.pt")  # type: ignore[no-untyped-call]  # torch's
    client.create_deployment("file", str(tmp_path / "net.pt"), config={"VERSION": "3"})
    assert len(client.predict("file/3", {"instances": ROW})["predictions"][0]) == 2
    assert len(client.predict("file", pd.DataFrame(ROW))["predictions"][0]) == 2


def test_an_archive_has_the_version_and_the_run_of_its_model(tracking: str, run: Run) -> None:
    server = f"--tracking-uri {tracking}"
    result = run(f"archive models:/iris@champion {server} --json")
    assert result.code == 0, result.err
    version = MlflowClient(tracking).get_model_version("iris", "1")
    inspection = json.loads(run("archive inspect iris.mar --json").out)
    assert inspection["version"] == "1"
    origin = inspection["manifest"]["mlflow"]
    assert (origin["version"], origin["run_id"]) == ("1", version.run_id)
    assert origin["tags"] == {"owner": "botany"}
    assert run(f"archive runs:/{version.run_id}/net --version 9 {server}").code == 0
    assert json.loads(run("archive inspect net.mar --json").out)["version"] == "9"
    result = run(f"archive models:/iris/17 {server}")
    assert (result.code, "(name=iris, version=17) not found" in result.err) == (1, True)


def test_a_local_run_serves_the_model_until_ctrl_c(tracking: str, tmp_path: Path) -> None:
    target = "-t tsx --name iris -m models:/iris/1 -C version=5"
    addresses = [f"-C {role}_address=http://127.0.0.1:0" for role in ("inference", "management")]
    arguments = " ".join(["deployments run-local", target, *addresses])
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": tracking,
        "TSX_METRICS_ADDRESS": "http://127.0.0.1:0",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *arguments.split()],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        try:
            # The server prints this line last.
            assert any(line.startswith("try: ") for line in output)
        finally:
            # A terminal signals the whole group.
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 0, output.read()


@pytest.mark.parametrize(
    ("target", "inference", "management"),
    [
        ("tsx://host:9000", "http://host:9000", "http://host:9001"),
        ("tsx://host/", "http://host:8080", "http://host:8081"),
        ("tsx://[::1]:80", "http://[::1]:80", "http://[::1]:81"),
        ("tsx", None, None),
        ("tsx:/", None, None),
    ],
)
def test_a_target_defines_two_addresses(
    target: str, inference: str | None, management: str | None
) -> None:
    assert (address(target, "inference"), address(target, "management")) == (inference, management)


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("tsx://host?port=1", "one looks like tsx://HOST:PORT"),
        ("tsx://host/models", "one looks like tsx://HOST:PORT"),
        ("tsx://host:x", "is not the address of a server"),
        ("tsx://host:70000", "is not the address of a server"),
    ],
)
def test_an_invalid_target_is_refused(target: str, hint: str) -> None:
    assert hint in refused(TsxDeploymentClient, target)[1]


def test_help_names_every_key() -> None:
    text = CliRunner().invoke(commands, ["help", "-t", "tsx"]).output
    for argument in (
        *mlflow_deployments.PACKING,
        *mlflow_deployments.ENDPOINT_KEYS,
        "TSX_MANAGEMENT_TOKEN",
    ):
        assert argument in text


def test_an_unreadable_response_is_reported(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSX_MANAGEMENT_ADDRESS", answering(200, b"[[]]"))
    client = TsxDeploymentClient("tsx")
    calls = [
        client.list_endpoints,
        lambda: client.get_endpoint("m"),
        lambda: client.get_deployment("m"),
        lambda: client.list_deployments("m"),
    ]
    for call in calls:
        with pytest.raises(MlflowException, match="the server's answer cannot be read"):
            call()
