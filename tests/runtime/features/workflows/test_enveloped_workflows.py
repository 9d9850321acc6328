"""Workflows whose models use an envelope: removed at the first node, added at the leaves."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model, make_war
from tsx_runtime.wire import NODE_HEADER

FUNCTIONS = """
import json


def start(data, context):
    return None if data is None else [read(row) for row in data]


def read(row):
    # A dict is a tensor of the protocol.
    row = row["data"] if isinstance(row, dict) else row
    if row in ("refuse", b"refuse"):
        from ts.utils.util import PredictionException
        raise PredictionException("not this", 422)
    return row if isinstance(row, (bytes, bytearray)) else {"value": row}


def left(data, context):
    return None if data is None else [f"<{opened(row).decode()}>" for row in data]


def right(data, context):
    return None if data is None else [opened(row).decode()[::-1] for row in data]


def opened(row):
    body = row if isinstance(row, (bytes, bytearray)) else row["body"]
    return bytes(body) if not body.startswith(b"{") else str(json.loads(body)["value"]).encode()


def joined(data, context):
    return None if data is None else [(row["left"] + b"|" + row["right"]).decode() for row in data]


def odd(data, context):
    return None if data is None else [opened(row).decode() for row in data] + ["more"]
"""
FLOWS = {
    "line": {"start": ["left"], "left": ["model"]},
    "diamond": {"start": ["left", "right"], "left": ["joined"], "right": ["joined"]},
    "leaves": {"start": ["left", "right"]},
    "uneven": {"start": ["odd", "right"], "odd": ["joined"], "right": ["joined"]},
}
MODEL = """
def handle(data, context):
    if data is None:
        return None
    bodies = [row if isinstance(row, (bytes, bytearray)) else row["body"] for row in data]
    return [body.decode().upper() for body in bodies]
"""


@pytest.fixture(scope="module", params=["body", "json", "kserve", "kservev2"])
def flows(
    request: pytest.FixtureRequest, processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp(request.param)
    make_model(store / "model.mar", MODEL)
    settings = make_settings(store, service_envelope=request.param, handler_error_status=500)
    with running_server(settings) as server:

        def register(name: str) -> None:
            edges = FLOWS[name]
            models = {"model": {"url": "model.mar"}} if name == "line" else {}
            make_war(store / f"{name}.war", json.dumps({"models": models, "dag": edges}), FUNCTIONS)
            response = server.management.post(f"/workflows?url={name}.war", timeout=120)
            assert response.status_code == 200, response.text

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(register, FLOWS))
        yield server


def tensors(rows: list[str]) -> list[dict[str, Any]]:
    return [
        {"name": f"in{number}", "shape": [1], "datatype": "BYTES", "data": [row]}
        for number, row in enumerate(rows)
    ]


def predict(server: RunningServer, flow: str, rows: list[str]) -> httpx.Response:
    """Send the rows in the server's envelope; the envelope `body` sends only the first row."""
    path, envelope = f"/wfpredict/{flow}", server.settings.service_envelope
    if envelope == "body":
        return server.inference.post(path, content=rows[0].encode())
    if envelope == "kservev2":
        return server.inference.post(path, json={"id": "7", "inputs": tensors(rows)})
    instances: list[Any] = [{"b64": base64.b64encode(rows[0].encode()).decode()}, *rows[1:]]
    return server.inference.post(path, json={"instances": instances})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flow", "rows", "results"),
    [
        ("line", ["ab", "cd", "ef"], ["<AB>", "<CD>", "<EF>"]),
        ("diamond", ["ab", "cd"], ["<ab>|ba", "<cd>|dc"]),
    ],
)
def test_the_envelope_is_removed_between_nodes_and_added_at_the_leaf(
    flows: RunningServer, flow: str, rows: list[str], results: list[str]
) -> None:
    answer = predict(flows, flow, rows)
    assert answer.status_code == 200, answer.text
    match flows.settings.service_envelope:
        case "body":
            assert answer.text == results[0]
        case "kservev2":
            leaf_name = "line__model" if flow == "line" else "diamond__joined"
            response = answer.json()
            response.pop("model_version", None)
            assert response == {"id": "7", "model_name": leaf_name, "outputs": tensors(results)}
        case _:
            assert answer.json() == {"predictions": results}


def test_every_leaf_has_the_envelope(flows: RunningServer) -> None:
    answer = predict(flows, "leaves", ["12", "34"]).json()
    match flows.settings.service_envelope:
        case "body":
            assert "left: its output is not JSON" in answer["message"]
        case "kservev2":
            data = {
                leaf_name: [tensor["data"] for tensor in response["outputs"]]
                for leaf_name, response in answer.items()
            }
            assert data == {"left": [["<12>"], ["<34>"]], "right": [["21"], ["43"]]}
        case _:
            assert answer == {
                "left": {"predictions": ["<12>", "<34>"]},
                "right": {"predictions": ["21", "43"]},
            }


def test_the_refusal_of_a_node_is_the_answer(flows: RunningServer) -> None:
    answer = predict(flows, "diamond", ["refuse"])
    assert answer.status_code == 422
    assert "Error executing start: " in answer.text
    assert "not this" in answer.text


def test_an_error_names_nodes_with_different_row_counts(flows: RunningServer) -> None:
    answer = predict(flows, "uneven", ["ab", "cd"])
    has_rows = flows.settings.service_envelope in ("kserve", "kservev2")
    assert answer.status_code == (400 if has_rows else 500)
    assert ("(odd, right) gave no rows" if has_rows else "expect: ") in answer.text


@pytest.mark.parametrize("flows", ["kserve"], indirect=True)
def test_a_node_called_directly_uses_the_envelope(flows: RunningServer) -> None:
    answer = flows.inference.post("/predictions/line__start", json={"instances": [5]})
    assert (answer.status_code, answer.json()) == (200, {"predictions": [{"value": 5}]})


@pytest.mark.parametrize("framing", [b"Content-Length: 10", b"Transfer-Encoding: chunked"])
def test_a_client_cannot_impersonate_a_node(flows: RunningServer, framing: bytes) -> None:
    """Refuse node headers of clients, since they would bypass the envelope."""
    address = flows.inference.base_url
    head = b"POST /predictions/line__model HTTP/1.1\r\nHost: localhost\r\n%b: last\r\n%b\r\n\r\n"
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head % (NODE_HEADER, framing))
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
