"""Workflows over REST: real archives, real workers, TorchServe's words (contract 1.6)."""

from __future__ import annotations

import contextlib
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

from tests.runtime.conftest import RunningServer
from tests.support.models import make_model, make_war
from tsx_runtime.targets.server.snapshots import describe

ErrorOf = Callable[[httpx.Response], tuple[str, str]]

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
    if word == "status":
        context.set_response_status(422, "Own words", idx)
        return "not that"
    if word == "wait":
        Path(headers["x-file"]).with_suffix(".begun").touch()
        wait_for(headers["x-file"])
    kept = {key: value for key, value in headers.items() if key in ("x-mine", "content-type")}
    shown = {key: json.loads(value) if isinstance(value, (bytes, bytearray)) and value[:1] == b"{" else str(value, "latin-1")
             if isinstance(value, (bytes, bytearray)) else value for key, value in row.items()}
    return {"node": context.model_name, "row": shown, "headers": kept, "id": context.get_request_id(idx), "pid": os.getpid()}


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
QUICK = "models: {m1: {url: m1.mar, timeout-ms: 300, retry-attempts: 0}}\ndag: {m1: []}"


def write_war(path: Path, spec: str, *, handler: str | None = HANDLER, **more: str) -> Path:
    return make_war(path, spec, handler, **more)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workflow store, and the model store `models` in it."""
    directory = tmp_path_factory.mktemp("workflows")
    (directory / "models").mkdir()
    make_model(directory / "models" / "m1.mar", HANDLER)
    make_model(
        directory / "models" / "broken.mar",
        "def handle(data, context):\n    import no_such_module_anywhere\n",
    )
    for name, spec in (
        ("sequence", SEQUENCE),
        ("parallel", PARALLEL),
        ("leaves", LEAVES),
        ("quick", QUICK),
    ):
        write_war(directory / f"{name}.war", spec)
    return directory


@pytest.fixture(scope="module")
def flows(
    shelf: Path, start_server: Callable[..., contextlib.AbstractContextManager[RunningServer]]
) -> Iterator[RunningServer]:
    """A server with `sequence`, `parallel`, `leaves` and `quick`."""
    with start_server(
        model_store=shelf / "models",
        workflow_store=shelf,
        cache_dir=shelf / "cache",
        max_response_size=1 << 26,
    ) as server:
        with ThreadPoolExecutor(4) as pool:
            names = ("sequence", "parallel", "leaves", "quick")
            for answer in pool.map(
                lambda name: server.management.post("/workflows", params={"url": f"{name}.war"}),
                names,
            ):
                assert answer.status_code == 200, answer.text
        yield server


def call(
    server: RunningServer, workflow: str, content: bytes = b"hello", do: str = "", **headers: Any
) -> httpx.Response:
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()} | (
        {"x-do": do} if do else {}
    )
    return server.inference.post(f"/wfpredict/{workflow}", content=content, headers=named)


def test_a_workflow_that_is_registered_is_listed_and_described(flows: RunningServer) -> None:
    listed = flows.management.get("/workflows").json()
    assert listed["workflows"][-1] == {"workflowName": "sequence", "workflowUrl": "sequence.war"}
    assert [one["workflowName"] for one in listed["workflows"]] == [
        "leaves",
        "parallel",
        "quick",
        "sequence",
    ]
    page = flows.management.get("/workflows", params={"limit": 1, "next_page_token": 2}).json()
    assert page == {
        "nextPageToken": "3",
        "workflows": [{"workflowName": "quick", "workflowUrl": "quick.war"}],
    }
    assert flows.management.get("/workflows/sequence").json() == [
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
    assert (
        flows.management.get("/workflows/sequence/all").text
        == flows.management.get("/workflows/sequence").text
    )
    (defaults,) = flows.management.get("/workflows/leaves").json()
    assert list(defaults.values())[2:] == [1, 1, 1, 50, "{pre=[m1, post]}"]


def test_its_nodes_are_models_of_which_functions_are_not_listed(flows: RunningServer) -> None:
    names = [model["modelName"] for model in flows.management.get("/models").json()["models"]]
    assert names == ["leaves__m1", "parallel__m1", "parallel__m2", "quick__m1", "sequence__m1"]
    (model,) = flows.management.get("/models/sequence__m1").json()
    assert (
        model["modelUrl"],
        model["batchSize"],
        model["maxBatchDelay"],
        len(model["workers"]),
    ) == ("m1.mar", 4, 20, 2)
    (function,) = flows.management.get("/models/sequence__pre").json()
    assert "modelUrl" not in function
    assert (function["batchSize"], len(function["workers"])) == (1, 1)
    assert (
        flows.inference.post("/predictions/sequence__pre", content=b"x").json()["node"]
        == "sequence__pre"
    )
    assert 'model_name="sequence__m1"' in flows.metrics.get("/metrics").text


def test_snapshots_leave_nodes_to_their_workflow(flows: RunningServer) -> None:
    flows.register("m1.mar", model_name="alone", initial_workers=0)
    saved = flows.call(
        lambda: describe(flows.registry.models.values(), "x", 0, flows.settings.model_store, {})
    )
    assert list(json.loads(saved)["models"]) == ["alone"]
    assert flows.management.delete("/models/alone").status_code == 200


def test_a_sequence_hands_each_output_to_the_next_node(flows: RunningServer) -> None:
    response = call(flows, "sequence", x_mine="v", content_type="application/octet-stream")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    post = response.json()
    m1 = post["row"]["body"]
    pre = m1["row"]["body"]
    assert [node["node"] for node in (pre, m1, post)] == [
        "sequence__pre",
        "sequence__m1",
        "sequence__post",
    ]
    assert pre["row"] == {"body": "hello"}
    assert pre["headers"] == {"x-mine": "v", "content-type": "application/octet-stream"}
    assert m1["headers"] == post["headers"] == {"x-mine": "v"}
    assert {node["id"] for node in (pre, m1, post)} == {response.headers["x-request-id"]}
    assert len({node["pid"] for node in (pre, m1, post)} | {os.getpid()}) == 4


def test_the_first_node_gets_forms_and_json_as_a_model_does(flows: RunningServer) -> None:
    response = flows.inference.post(
        "/wfpredict/sequence?q=1", files={"image": b"bytes"}, data={"text": "words"}
    )
    assert response.json()["row"]["body"]["row"]["body"]["row"] == {
        "text": "words",
        "image": "bytes",
    }
    response = flows.inference.post("/wfpredict/sequence", json={"a": 1})
    assert response.json()["row"]["body"]["row"]["body"]["row"] == {"body": {"a": 1}}
    for method in ("GET", "PUT"):
        assert (
            flows.inference.request(method, "/wfpredict/sequence/1.0").json()["node"]
            == "sequence__post"
        )


@pytest.mark.parametrize(
    ("do", "node", "tries"), [("count@m1", "m1", 3), ("count@m2", "m2", 1), ("count@pre", "pre", 2)]
)
def test_the_node_that_fails_for_good_is_named(
    do: str, node: str, tries: int, flows: RunningServer, tmp_path: Path, error_of: ErrorOf
) -> None:
    response = call(flows, "parallel", do=do, x_file=tmp_path / "tries")
    assert response.status_code == 500
    kind, text = error_of(response)
    assert kind == "InternalServerException"
    assert text.startswith(f"Error executing {node}: Prediction failed")
    assert len((tmp_path / "tries").read_text()) == tries


def test_a_status_that_a_node_sets_is_the_workflows(
    flows: RunningServer, error_of: ErrorOf
) -> None:
    response = call(flows, "sequence", do="status@m1")
    assert response.status_code == 422
    assert error_of(response)[1] == "Error executing m1: it answered with status 422: not that"


def test_a_worker_that_dies_fails_its_node_alone(flows: RunningServer, error_of: ErrorOf) -> None:
    response = call(flows, "sequence", do="exit@m1")
    assert response.status_code == 500
    assert error_of(response)[1].startswith("Error executing m1: Worker died.")
    assert call(flows, "sequence").status_code == 200


def test_the_clients_own_time_is_kept_through_the_nodes(
    flows: RunningServer, tmp_path: Path, error_of: ErrorOf
) -> None:
    response = call(
        flows, "sequence", do="wait@m1", x_file=tmp_path / "go", x_tsx_timeout_ms=1500
    )  # enough for `pre`
    (tmp_path / "go").touch()
    assert (response.status_code, error_of(response)[0]) == (504, "GatewayTimeoutException")
    assert re.search("Error executing m1: .* deadline", response.text)
    assert error_of(call(flows, "sequence", x_tsx_timeout_ms="soon"))[0] == "BadRequestException"


def test_a_client_that_leaves_ends_its_request(
    flows: RunningServer, tmp_path: Path, until: Callable[..., None]
) -> None:
    """The node that runs is not called back, but none after it begins."""
    go = tmp_path / "go"
    address = flows.inference.base_url
    with socket.create_connection((address.host, address.port)) as client:
        head = f"POST /wfpredict/sequence HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nx-do: wait@pre\r\nx-file: {go}\r\n\r\n"
        client.sendall(head.encode())
        until(go.with_suffix(".begun").exists)
        before = requests_of(flows, "sequence__m1")
    workflow = flows.workflows.find("sequence")
    flows.call(workflow.finished)  # while `pre` still runs: nobody waits for it
    go.touch()
    assert call(flows, "sequence").status_code == 200
    assert requests_of(flows, "sequence__m1") == before + 1


def requests_of(server: RunningServer, model: str) -> int:
    return int(server.call(lambda: server.registry.find(model).stats.requests))


def test_many_requests_at_once_are_all_answered(flows: RunningServer) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: call(flows, "parallel", b"%d" % number), range(64)))
    assert [answer.status_code for answer in answers] == [200] * 64
    assert [answer.json()["row"]["m1"]["row"]["body"]["row"]["body"] for answer in answers] == [
        str(number) for number in range(64)
    ]


def test_a_likely_workflow_is_named(flows: RunningServer, error_of: ErrorOf) -> None:
    found = list(flows.management.get("/workflows").json()["workflows"])
    name = str(found[0]["workflowName"])
    assert (
        error_of(flows.inference.post(f"/wfpredict/{name}s"))[1]
        == f"Workflow not found: {name}s; did you mean {name!r}?"
    )


@pytest.mark.parametrize("path", ["/wfpredict/nosuch", "/wfpredict/nosuch/1.0"])
def test_a_workflow_that_is_not_there_is_reported(
    path: str, flows: RunningServer, error_of: ErrorOf
) -> None:
    response = flows.inference.post(path, content=b"x")
    assert (response.status_code, *error_of(response)) == (
        404,
        "WorkflowNotFoundException",
        "Workflow not found: nosuch",
    )
    for method in ("GET", "DELETE"):
        response = flows.management.request(method, "/workflows/nosuch")
        assert (response.status_code, *error_of(response)) == (
            404,
            "WorkflowNotFoundException",
            "Workflow not found: nosuch",
        )


def test_paths_and_verbs_that_mean_nothing_are_refused(flows: RunningServer) -> None:
    assert [flows.inference.post(path).status_code for path in ("/wfpredict", "/wfpredict/")] == [
        404,
        404,
    ]
    assert flows.management.put("/workflows/sequence").status_code == 405
    assert flows.management.delete("/workflows").status_code == 405
    assert flows.inference.get("/workflows").status_code == 404
    assert flows.inference.post("/wfpredict/sequence", content=b"x" * 100_001).status_code == 413


BAD: dict[str, tuple[str, int, str, str]] = {
    "cycle": (
        "dag: {pre: [post], post: [pre]}",
        400,
        "InvalidDAGException",
        "Not a valid DAG. spec.yaml: its dag has a cycle",
    ),
    "unknown": (
        "models: {m1: {url: m1.mar}}\ndag: {m1: [nosuch]}",
        500,
        "WorkflowException",
        "Workflow unknown has failed to register. Failures: [Failed to start workers for model unknown__nosuch version: 1.0.",
    ),
    "nomar": (
        "models: {m1: {url: m1.mar}, m9: {url: none.mar}}\ndag: {m1: [m9]}",
        500,
        "WorkflowException",
        "Workflow nomar has failed to register. Failures: [Workflow Node nomar__m9 failed to register. "
        "Details: Model not found at: none.mar",
    ),
    "outside": (
        "models: {m1: {url: ../sequence.war}}\ndag: {m1: []}",
        500,
        "WorkflowException",
        "Workflow outside has failed to register. Failures: [Workflow Node outside__m1 failed to register. Details: Relative path",
    ),
    "fetched": (
        "models: {m1: {url: 'http://169.254.169.254/x.mar'}}\ndag: {m1: []}",
        500,
        "WorkflowException",
        "Workflow fetched has failed to register. Failures: [Workflow Node fetched__m1 failed to register. Details: Given URL",
    ),
    "badyaml": ("a: [b", 500, "InvalidWorkflowException", "spec.yaml cannot be read as YAML"),
    "evil": (
        "x: !!python/object/apply:os.system ['true']",
        500,
        "InvalidWorkflowException",
        "spec.yaml cannot be read as YAML",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_workflow_that_cannot_be_is_refused_and_nothing_of_it_stays(
    name: str, shelf: Path, flows: RunningServer, error_of: ErrorOf
) -> None:
    spec, status, kind, reported = BAD[name]
    before = (
        flows.management.get("/models").json(),
        set(flows.call(lambda: set(flows.registry.models))),
    )
    write_war(shelf / f"{name}.war", spec)
    for _ in range(2):  # not even its name is taken
        response = flows.management.post("/workflows", params={"url": f"{name}.war"})
        found = error_of(response)
        assert (
            response.status_code,
            found[0],
            found[1][: len(reported)].replace(str(shelf), ""),
        ) == (status, kind, reported)
    assert (
        flows.management.get("/models").json(),
        set(flows.call(lambda: set(flows.registry.models))),
    ) == before
    assert flows.management.get(f"/workflows/{name}").status_code == 404


def test_the_traceback_of_a_node_that_does_not_load_is_reported(
    flows: RunningServer, shelf: Path
) -> None:
    write_war(shelf / "breaks.war", "models: {m1: {url: broken.mar}}\ndag: {pre: [m1]}")
    response = flows.management.post("/workflows", params={"url": "breaks.war"})
    assert response.status_code == 500
    assert "no_such_module_anywhere" in response.text
    assert "Traceback" in response.text


@pytest.mark.parametrize(
    ("parameters", "status", "kind", "reported"),
    [
        ({}, 400, "BadRequestException", "Parameter url is required."),
        ({"url": ""}, 400, "BadRequestException", "Parameter url is required."),
        (
            {"url": "none.war"},
            404,
            "WorkflowNotFoundException",
            "Workflow not found in workflow store: none.war",
        ),
        (
            {"url": "../x.war"},
            404,
            "WorkflowNotFoundException",
            "Relative path is not allowed in url: ../x.war",
        ),
        (
            {"url": "%2e%2e/x.war"},
            404,
            "WorkflowNotFoundException",
            "Relative path is not allowed in url: %2e%2e/x.war",
        ),
        (
            {"url": "/etc/passwd"},
            404,
            "WorkflowNotFoundException",
            "/etc/passwd is not in the store. Copy the file into this server's store, ",
        ),
        (
            {"url": "http://169.254.169.254/x.war"},
            404,
            "WorkflowNotFoundException",
            "Given URL http://169.254.169.254/x.war does not",
        ),
        (
            {"url": "file:///etc/passwd"},
            404,
            "WorkflowNotFoundException",
            "Given URL file:///etc/passwd does not match any allowed URL(s)",
        ),
        (
            {"url": "sequence.war"},
            409,
            "ConflictStatusException",
            "Workflow sequence is already registered.",
        ),
        (
            {"url": "sequence.war", "workflow_name": "a/b"},
            400,
            "BadRequestException",
            "The workflow name 'a/b' cannot be used",
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
def test_a_registration_that_cannot_be_is_refused(
    parameters: dict[str, str],
    status: int,
    kind: str,
    reported: str,
    shelf: Path,
    flows: RunningServer,
    error_of: ErrorOf,
) -> None:
    (shelf / "junk.war").write_bytes(b"junk")
    write_war(shelf / "slip.war", SEQUENCE, **{"../slipped.py": "x"})
    response = flows.management.post("/workflows", params=parameters)
    found = error_of(response)
    assert (response.status_code, found[0], found[1][: len(reported)]) == (status, kind, reported)
    assert not (shelf.parent / "slipped.py").exists()


def test_a_workflow_can_be_registered_by_json_under_a_name_of_its_own_and_leaves_without_a_trace(
    flows: RunningServer, shelf: Path
) -> None:
    body = {
        "url": "quick.war",
        "workflow_name": "mine",
        "response_timeout": 33,
        "startup_timeout": 44,
    }
    assert flows.management.post("/workflows", json=body).json() == {
        "status": "Workflow mine has been registered and scaled successfully."
    }
    (node,) = flows.management.get("/models/mine__m1").json()
    assert (node["responseTimeout"], node["startupTimeout"]) == (33, 44)
    refused = flows.management.delete("/models/mine__m1")
    assert (refused.status_code, refused.json()["message"]) == (
        409,
        "Model mine__m1 is a node of workflow mine. Unregister the workflow: DELETE /workflows/mine",
    )
    assert flows.management.delete("/workflows/mine").json() == {
        "status": 'Workflow "mine" unregistered'
    }
    assert flows.management.get("/models/mine__m1").status_code == 404
    assert flows.inference.post("/wfpredict/mine").status_code == 404
    assert flows.management.post("/workflows", json=body).status_code == 200
    assert flows.management.delete("/workflows/mine").status_code == 200


def test_what_is_accepted_is_answered_before_a_workflow_leaves(
    flows: RunningServer, tmp_path: Path, until: Callable[..., None]
) -> None:
    assert (
        flows.management.post(
            "/workflows", params={"url": "sequence.war", "workflow_name": "leaving"}
        ).status_code
        == 200
    )
    go = tmp_path / "go"
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(call, flows, "leaving", do="wait@pre", x_file=go)
        until(go.with_suffix(".begun").exists)
        leaving = pool.submit(flows.management.delete, "/workflows/leaving")
        until(lambda: flows.management.get("/workflows/leaving").status_code == 404)
        taken = flows.management.post(
            "/workflows", params={"url": "sequence.war", "workflow_name": "leaving"}
        )
        assert taken.status_code == 409
        go.touch()
        assert asked.result().json()["node"] == "leaving__post"
        assert leaving.result().status_code == 200
    assert flows.management.get("/models/leaving__m1").status_code == 404


def test_two_registrations_of_one_name_do_not_both_succeed(flows: RunningServer) -> None:
    start = threading.Barrier(2)

    def register(_: int) -> int:
        start.wait()
        return flows.management.post(
            "/workflows", params={"url": "quick.war", "workflow_name": "twice"}
        ).status_code

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(register, range(2))) == [200, 409]
    assert flows.management.delete("/workflows/twice").status_code == 200


def test_a_node_whose_name_a_model_has_already_is_reported(flows: RunningServer) -> None:
    flows.register("m1.mar", model_name="clash__m1", initial_workers=0)
    response = flows.management.post(
        "/workflows", params={"url": "quick.war", "workflow_name": "clash"}
    )
    assert response.status_code == 500
    assert (
        "Model version 1.0 is already registered for model clash__m1" in response.json()["message"]
    )
    assert flows.management.delete("/models/clash__m1").status_code == 200


def test_workflows_are_behind_the_tokens_of_their_listeners(
    shelf: Path, start_server: Callable[..., contextlib.AbstractContextManager[RunningServer]]
) -> None:
    with start_server(model_store=shelf, inference_token="i", management_token="m") as server:
        assert server.inference.post("/wfpredict/x").status_code in (400, 401)
        assert (
            server.inference.post("/wfpredict/x", headers={"authorization": "Bearer i"}).status_code
            == 404
        )
        for method, path in (
            ("GET", "/workflows"),
            ("POST", "/workflows?url=x.war"),
            ("GET", "/workflows/x"),
            ("DELETE", "/workflows/x"),
        ):
            assert server.management.request(method, path).status_code in (400, 401)
            assert server.management.request(
                method, path, headers={"authorization": "Bearer i"}
            ).status_code in (400, 401)
        assert server.management.get(
            "/workflows", headers={"authorization": "Bearer m"}
        ).json() == {"workflows": []}


def test_the_documents_say_what_there_is(flows: RunningServer) -> None:
    paths = flows.management.get("/api-description").json()["paths"]
    assert set(paths["/workflows"]) == {"get", "post"}
    assert set(paths["/workflows/{workflow}"]) == {"get", "delete"}
    assert "/wfpredict/{workflow}" in flows.inference.get("/api-description").json()["paths"]
