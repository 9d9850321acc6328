"""Workflows over REST with real archives, real workers, and TorchServe's messages."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.management import describe
from tests.runtime.conftest import BROKEN, RunningServer
from tests.support.models import make_model, make_war
from tsx_runtime.features.torchserve import snapshots

ErrorOf = Callable[[httpx.Response], tuple[str, str]]
Until = Callable[[Callable[[], object]], None]

HANDLER = """
import json, os, time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    return [act(idx, row, context) for idx, row in enumerate(data)]


def act(idx, row, context):
    headers = context.get_all_request_header(idx)
    word, _, node = headers.get("x-do", "").partition("@")
    name = context.model_name.rpartition("__")[2]
    if node and node != name:
        word = ""
    if word == "count":
        with Path(headers["x-file"]).open("a") as file:
            file.write("x")
        raise RuntimeError("no such image")
    if word == "exit":
        os._exit(7)
    if word == "wait":
        Path(headers["x-file"]).with_suffix(".begun").touch()
        wait_for(headers["x-file"])
    return {
        "node": context.model_name,
        "row": {key: decode(value) for key, value in row.items()},
        "headers": {key: headers[key] for key in ("x-mine", "content-type") if key in headers},
        "id": context.get_request_id(idx),
        "pid": os.getpid(),
    }


def decode(value):
    if not isinstance(value, (bytes, bytearray)):
        return value
    return json.loads(value) if value[:1] == b"{" else str(value, "latin-1")


def wait_for(file):
    deadline = time.monotonic() + 90  # a test that failed must not hold the worker
    while not Path(file).exists() and time.monotonic() < deadline:
        time.sleep(0.002)


pre = post = join = handle
"""

SEQUENCE = """
models:
    min-workers: 1
    max-workers: 2
    max-batch-delay: 20
    timeout-ms: 20000
    retry-attempts: 0
    m1:
        url: m1.mar
        batch-size: 4
dag:
    pre: [m1]
    m1: [post]
"""
PARALLEL = """
models:
    m1: {url: m1.mar, retry-attempts: 2, timeout-ms: 20000}
    m2: {url: m1.mar, retry-attempts: 0, timeout-ms: 20000}
dag:
    pre: [m1, m2]
    m1: [join]
    m2: [join]
"""
LEAVES = "models: {m1: {url: m1.mar}}\ndag: {pre: [m1, post]}"
QUICK_WORKFLOW = "models: {m1: {url: m1.mar}}\ndag: {m1: []}"
FLOWS = {"sequence": SEQUENCE, "parallel": PARALLEL, "leaves": LEAVES, "quick": QUICK_WORKFLOW}


@pytest.fixture(scope="module")
def workflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a workflow store that contains the model store `models`."""
    directory = tmp_path_factory.mktemp("workflows")
    make_model(directory / "models" / "m1.mar", HANDLER)
    make_model(directory / "models" / "broken.mar", BROKEN)
    for name, spec in FLOWS.items():
        make_war(directory / f"{name}.war", spec, HANDLER)
    return directory


@pytest.fixture(scope="module")
def flows(workflow_store: Path, start_server: Any) -> Iterator[RunningServer]:
    """Run a server with `sequence`, `parallel`, `leaves` and `quick`."""
    with start_server(
        model_store=workflow_store / "models",
        workflow_store=workflow_store,
        cache_dir=workflow_store / "cache",
    ) as server:
        with ThreadPoolExecutor(4) as pool:
            for answer in pool.map(lambda name: post_workflow(server, f"{name}.war"), FLOWS):
                assert answer.status_code == 200, answer.text
        yield server


def post_workflow(server: RunningServer, url: str, **parameters: str) -> httpx.Response:
    return server.management.post("/workflows", params={"url": url, **parameters})


def predict(
    server: RunningServer, workflow: str, content: bytes = b"hello", **headers: Any
) -> httpx.Response:
    text = {name: str(value) for name, value in headers.items()}
    return server.ask(content, f"/wfpredict/{workflow}", **text)


def test_a_registered_workflow_is_listed_and_described(flows: RunningServer) -> None:
    rows = flows.management.get("/workflows").json()["workflows"]
    assert [row["workflowName"] for row in rows] == ["leaves", "parallel", "quick", "sequence"]
    assert rows[-1] == {"workflowName": "sequence", "workflowUrl": "sequence.war"}
    page = flows.management.get("/workflows", params={"limit": 1, "next_page_token": 2}).json()
    assert page == {"nextPageToken": "3", "workflows": [rows[2]]}
    description = flows.management.get("/workflows/sequence")
    assert description.json() == [
        {
            "workflowName": "sequence",
            "workflowUrl": "sequence.war",
            "minWorkers": 1,
            "maxWorkers": 2,
            "batchSize": 1,
            "maxBatchDelay": 20,
            "workflowDag": "{pre=[m1], m1=[post]}",
        }
    ]
    assert flows.management.get("/workflows/sequence/all").text == description.text
    (defaults,) = flows.management.get("/workflows/leaves").json()
    assert list(defaults.values())[2:] == [1, 1, 1, 50, "{pre=[m1, post]}"]


def test_nodes_are_models_but_functions_are_not_listed(flows: RunningServer) -> None:
    names = [model["modelName"] for model in flows.management.get("/models").json()["models"]]
    assert names == ["leaves__m1", "parallel__m1", "parallel__m2", "quick__m1", "sequence__m1"]
    model = describe(flows, "sequence__m1")
    assert (model["modelUrl"], len(model["workers"])) == ("m1.mar", 2)
    assert (model["batchSize"], model["maxBatchDelay"]) == (4, 20)
    function = describe(flows, "sequence__pre")
    assert "modelUrl" not in function
    assert (function["batchSize"], len(function["workers"])) == (1, 1)
    answer = flows.inference.post("/predictions/sequence__pre", content=b"x")
    assert answer.json()["node"] == "sequence__pre"
    assert 'model_name="sequence__m1"' in flows.metrics.get("/metrics").text


def test_snapshots_do_not_contain_workflow_nodes(flows: RunningServer) -> None:
    flows.register("m1.mar", model_name="alone", initial_workers=0)
    store = flows.settings.model_store
    snapshot = flows.call(
        lambda: snapshots.describe(flows.registry.models.values(), "x", 0, store, {})
    )
    assert list(json.loads(snapshot)["models"]) == ["alone"]
    assert flows.management.delete("/models/alone").status_code == 200


def test_a_sequence_passes_each_output_to_the_next_node(flows: RunningServer) -> None:
    response = predict(flows, "sequence", x_mine="v", content_type="application/octet-stream")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    post = response.json()
    m1 = post["row"]["body"]
    pre = m1["row"]["body"]
    nodes = (pre, m1, post)
    assert [node["node"].removeprefix("sequence__") for node in nodes] == ["pre", "m1", "post"]
    assert pre["row"] == {"body": "hello"}
    assert pre["headers"] == {"x-mine": "v", "content-type": "application/octet-stream"}
    assert m1["headers"] == post["headers"] == {"x-mine": "v"}
    assert {node["id"] for node in nodes} == {response.headers["x-request-id"]}
    assert len({node["pid"] for node in nodes} | {os.getpid()}) == 4


def test_the_first_node_gets_forms_and_json_like_a_model(flows: RunningServer) -> None:
    def first_row(**content: Any) -> Any:
        answer = flows.inference.post("/wfpredict/sequence?q=1", **content)
        return answer.json()["row"]["body"]["row"]["body"]["row"]

    form = first_row(files={"image": b"bytes"}, data={"text": "words"})
    assert form == {"text": "words", "image": "bytes"}
    assert first_row(json={"a": 1}) == {"body": {"a": 1}}
    for method in ("GET", "PUT"):
        answer = flows.inference.request(method, "/wfpredict/sequence/1.0")
        assert answer.json()["node"] == "sequence__post"


@pytest.mark.parametrize(("node", "attempts"), [("m1", 3), ("m2", 1), ("pre", 2)])
def test_the_error_names_the_node_that_failed_all_attempts(
    node: str, attempts: int, flows: RunningServer, tmp_path: Path, error_of: ErrorOf
) -> None:
    file = tmp_path / "attempts"
    response = predict(flows, "parallel", x_do=f"count@{node}", x_file=file)
    kind, text = error_of(response)
    assert (response.status_code, kind) == (500, "InternalServerException")
    assert text.startswith(f"Error executing {node}: Prediction failed")
    assert len(file.read_text()) == attempts


def test_a_worker_death_fails_only_its_node(flows: RunningServer, error_of: ErrorOf) -> None:
    response = predict(flows, "sequence", x_do="exit@m1")
    assert response.status_code == 500
    assert error_of(response)[1].startswith("Error executing m1: Worker died.")
    assert predict(flows, "sequence").status_code == 200


def test_the_clients_timeout_applies_to_all_nodes(
    flows: RunningServer, tmp_path: Path, error_of: ErrorOf
) -> None:
    gate = tmp_path / "go"
    response = predict(flows, "sequence", x_do="wait@pre", x_file=gate, x_tsx_timeout_ms=200)
    gate.touch()
    assert (response.status_code, error_of(response)[0]) == (504, "GatewayTimeoutException")
    assert re.search("Error executing pre: .* deadline", response.text)
    kind, _ = error_of(predict(flows, "sequence", x_tsx_timeout_ms="soon"))
    assert kind == "BadRequestException"


def test_a_client_that_leaves_ends_its_request(
    flows: RunningServer, tmp_path: Path, until: Until
) -> None:
    """Check that the running node is not cancelled, but that no later node starts."""
    gate = tmp_path / "go"
    m1, workflow = flows.registry.find("sequence__m1"), flows.workflows.find("sequence")
    address = flows.inference.base_url
    with socket.create_connection((address.host, address.port)) as client:
        client.sendall(
            b"POST /wfpredict/sequence HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
            b"x-do: wait@pre\r\nx-file: %b\r\n\r\n" % str(gate).encode()
        )
        until(gate.with_suffix(".begun").exists)
        requests = m1.stats.requests
    # The request ends while `pre` still runs.
    flows.call(workflow.wait_idle)
    gate.touch()
    assert predict(flows, "sequence").status_code == 200
    assert m1.stats.requests == requests + 1


def test_many_concurrent_requests_are_answered(flows: RunningServer) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: predict(flows, "parallel", b"%d" % n), range(32)))
    rows = [answer.json()["row"]["m1"]["row"]["body"]["row"]["body"] for answer in answers]
    assert rows == [str(number) for number in range(32)]


def test_a_missing_workflow_is_not_found(flows: RunningServer, error_of: ErrorOf) -> None:
    for client, method, path in (
        (flows.inference, "POST", "/wfpredict/nosuch"),
        (flows.inference, "POST", "/wfpredict/nosuch/1.0"),
        (flows.management, "GET", "/workflows/nosuch"),
        (flows.management, "DELETE", "/workflows/nosuch"),
    ):
        response = client.request(method, path)
        message = "Workflow not found: nosuch"
        assert response.status_code == 404
        assert error_of(response) == ("WorkflowNotFoundException", message)
    message = error_of(predict(flows, "sequences"))[1]
    assert message == "Workflow not found: sequences; did you mean 'sequence'?"


def test_unknown_workflow_paths_and_methods_are_refused(flows: RunningServer) -> None:
    for client, method, path, status in (
        (flows.inference, "POST", "/wfpredict", 404),
        (flows.inference, "POST", "/wfpredict/", 404),
        (flows.management, "PUT", "/workflows/sequence", 405),
        (flows.management, "DELETE", "/workflows", 405),
        (flows.inference, "GET", "/workflows", 404),
    ):
        assert client.request(method, path).status_code == status
    assert predict(flows, "sequence", b"x" * 100_001).status_code == 413


BAD: dict[str, tuple[str, int, str, str]] = {
    "cycle": ("dag: {pre: [post], post: [pre]}", 400, "InvalidDAGException", "has a cycle"),
    "unknown": (
        "models: {m1: {url: m1.mar}}\ndag: {m1: [nosuch]}",
        500,
        "WorkflowException",
        "[Failed to start workers for model unknown__nosuch version: 1.0.",
    ),
    "nomar": (
        "models: {m1: {url: m1.mar}, m9: {url: none.mar}}\ndag: {m1: [m9]}",
        500,
        "WorkflowException",
        "Workflow nomar has failed to register. Failures: [Workflow Node nomar__m9 failed to "
        "register. "
        "Details: Model not found at: none.mar",
    ),
    "outside": (
        "models: {m1: {url: ../sequence.war}}\ndag: {m1: []}",
        500,
        "WorkflowException",
        "Details: Relative path",
    ),
    "fetched": (
        "models: {m1: {url: 'http://169.254.169.254/x.mar'}}\ndag: {m1: []}",
        500,
        "WorkflowException",
        "Details: Given URL",
    ),
    "breaks": (
        "models: {m1: {url: broken.mar}}\ndag: {pre: [m1]}",
        500,
        "WorkflowException",
        "No module named 'no_such_module_anywhere'",
    ),
    "badyaml": ("a: [b", 500, "InvalidWorkflowException", "cannot be read as YAML"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_workflow_is_refused_and_leaves_nothing(
    name: str, workflow_store: Path, flows: RunningServer, error_of: ErrorOf
) -> None:
    def models() -> list[str]:
        return list(flows.call(lambda: sorted(flows.registry.models)))

    spec, status, kind, expected = BAD[name]
    models_before = models()
    make_war(workflow_store / f"{name}.war", spec, HANDLER)
    # A failed first attempt must not reserve the name.
    for _ in range(2):
        response = post_workflow(flows, f"{name}.war")
        error = error_of(response)
        assert (response.status_code, error[0]) == (status, kind)
        assert expected in error[1]
    assert models() == models_before
    assert flows.management.get(f"/workflows/{name}").status_code == 404


@pytest.mark.parametrize(
    ("parameters", "status", "kind", "expected"),
    [
        ({"url": ""}, 400, "BadRequestException", "Parameter url is required."),
        ({"url": "none.war"}, 404, "WorkflowNotFoundException", "in workflow store: none.war"),
        ({"url": "file:///etc/passwd"}, 404, "WorkflowNotFoundException", "Given URL file:"),
        ({"url": "sequence.war"}, 409, "ConflictStatusException", "sequence is already registered"),
        (
            {"url": "sequence.war", "workflow_name": "a/b"},
            400,
            "BadRequestException",
            "'a/b' cannot be used",
        ),
        (
            {"url": "sequence.war", "startup_timeout": "soon"},
            400,
            "BadRequestException",
            "Parameter startup_timeout is 'soon'",
        ),
        ({"url": "junk.war"}, 500, "InvalidWorkflowException", ""),
        ({"url": "slip.war"}, 500, "InvalidWorkflowException", ""),
    ],
)
def test_an_invalid_registration_is_refused(
    parameters: dict[str, str],
    status: int,
    kind: str,
    expected: str,
    workflow_store: Path,
    flows: RunningServer,
    error_of: ErrorOf,
) -> None:
    (workflow_store / "junk.war").write_bytes(b"junk")
    make_war(workflow_store / "slip.war", SEQUENCE, HANDLER, **{"../slipped.py": "x"})
    response = post_workflow(flows, **parameters)
    error = error_of(response)
    assert (response.status_code, error[0]) == (status, kind)
    assert expected in error[1]
    assert not (workflow_store.parent / "slipped.py").exists()


def test_a_workflow_registered_by_json_is_removed_completely(flows: RunningServer) -> None:
    options = {
        "url": "quick.war",
        "workflow_name": "mine",
        "response_timeout": 33,
        "startup_timeout": 44,
    }
    assert flows.management.post("/workflows", json=options).json() == {
        "status": "Workflow mine has been registered and scaled successfully."
    }
    node = describe(flows, "mine__m1")
    assert (node["responseTimeout"], node["startupTimeout"]) == (33, 44)
    refusal = flows.management.delete("/models/mine__m1")
    assert refusal.status_code == 409
    assert refusal.json()["message"].startswith("Model mine__m1 is a node of workflow mine.")
    assert flows.management.delete("/workflows/mine").json() == {
        "status": 'Workflow "mine" unregistered'
    }
    assert flows.management.get("/models/mine__m1").status_code == 404
    assert flows.inference.post("/wfpredict/mine").status_code == 404
    assert flows.management.post("/workflows", json=options).status_code == 200
    assert flows.management.delete("/workflows/mine").status_code == 200


def test_accepted_requests_are_answered_before_a_workflow_is_removed(
    flows: RunningServer, tmp_path: Path, until: Until
) -> None:
    registration = {"url": "sequence.war", "workflow_name": "leaving"}
    assert post_workflow(flows, **registration).status_code == 200
    gate = tmp_path / "go"
    with ThreadPoolExecutor(2) as pool:
        request = pool.submit(predict, flows, "leaving", x_do="wait@pre", x_file=gate)
        until(gate.with_suffix(".begun").exists)
        removal = pool.submit(flows.management.delete, "/workflows/leaving")
        until(lambda: flows.management.get("/workflows/leaving").status_code == 404)
        assert post_workflow(flows, **registration).status_code == 409
        gate.touch()
        assert request.result().json()["node"] == "leaving__post"
        assert removal.result().status_code == 200
    assert flows.management.get("/models/leaving__m1").status_code == 404


def test_only_one_of_two_concurrent_registrations_succeeds(flows: RunningServer) -> None:
    start = threading.Barrier(2)

    def register(_: int) -> int:
        start.wait()
        return post_workflow(flows, "quick.war", workflow_name="twice").status_code

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(register, range(2))) == [200, 409]
    assert flows.management.delete("/workflows/twice").status_code == 200


def test_a_node_name_that_is_already_a_model_is_refused(flows: RunningServer) -> None:
    flows.register("m1.mar", model_name="clash__m1", initial_workers=0)
    response = post_workflow(flows, "quick.war", workflow_name="clash")
    assert response.status_code == 500
    assert "already registered for model clash__m1" in response.json()["message"]
    assert flows.management.delete("/models/clash__m1").status_code == 200


def test_workflow_calls_need_the_tokens_of_their_listeners(
    workflow_store: Path, start_server: Any
) -> None:
    inference, management = ({"authorization": f"Bearer {token}"} for token in "im")
    with start_server(
        model_store=workflow_store, inference_token="i", management_token="m"
    ) as server:
        assert server.inference.post("/wfpredict/x").status_code == 400
        assert server.inference.post("/wfpredict/x", headers=inference).status_code == 404
        for method, path in (
            ("GET", "/workflows"),
            ("POST", "/workflows?url=x.war"),
            ("GET", "/workflows/x"),
            ("DELETE", "/workflows/x"),
        ):
            for headers in ({}, inference):
                answer = server.management.request(method, path, headers=headers)
                assert answer.status_code == 400
        listing = server.management.get("/workflows", headers=management)
        assert listing.json() == {"workflows": []}
