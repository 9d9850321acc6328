"""Workflows whose models have an envelope: off where the request comes in, on at the leaves."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model, make_war
from tsx_runtime.wire import NODE_HEADER

FUNCTIONS = """
import json


def start(data, context):
    return None if data is None else [begun(row) for row in data]


def begun(row):
    row = row["data"] if isinstance(row, dict) else row  # of the protocol's tensors, else as it is
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
    "one": {"start": []},
    "line": {"start": ["left"], "left": ["model"]},
    "diamond": {"start": ["left", "right"], "left": ["joined"], "right": ["joined"]},
    "leaves": {"start": ["left", "right"]},
    "uneven": {"start": ["odd", "right"], "odd": ["joined"], "right": ["joined"]},
}
MODEL = """
def handle(data, context):
    return None if data is None else [(row if isinstance(row, (bytes, bytearray)) else row["body"]).decode().upper() for row in data]
"""


@pytest.fixture(scope="module", params=["body", "json", "kserve", "kservev2"])
def flows(
    request: pytest.FixtureRequest, processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp(request.param)
    make_model(store / "model.mar", MODEL)
    with running_server(
        make_settings(store, service_envelope=request.param, handler_error_status=500)
    ) as server:
        for name, edges in FLOWS.items():
            models = {"model": {"url": "model.mar"}} if "model" in str(edges) else {}
            make_war(store / f"{name}.war", json.dumps({"models": models, "dag": edges}), FUNCTIONS)
            response = server.management.post(f"/workflows?url={name}.war", timeout=120)
            assert response.status_code == 200, response.text
        yield server


def ask(server: RunningServer, flow: str, rows: list[str]) -> httpx.Response:
    envelope = server.settings.service_envelope
    if envelope == "body":
        return server.inference.post(f"/wfpredict/{flow}", content=rows[0].encode())
    if envelope == "kservev2":
        inputs = [
            {"name": f"in{idx}", "shape": [1], "datatype": "BYTES", "data": [row]}
            for idx, row in enumerate(rows)
        ]
        return server.inference.post(f"/wfpredict/{flow}", json={"id": "7", "inputs": inputs})
    instances: list[Any] = [{"b64": base64.b64encode(rows[0].encode()).decode()}, *rows[1:]]
    return server.inference.post(f"/wfpredict/{flow}", json={"instances": instances})


def enveloped(server: RunningServer, node: str, rows: list[str]) -> Any:
    envelope = server.settings.service_envelope
    if envelope == "body":
        return rows[0]
    if envelope == "kservev2":
        outputs = [
            {"name": f"in{idx}", "shape": [1], "datatype": "BYTES", "data": [row]}
            for idx, row in enumerate(rows)
        ]
        return {"id": "7", "model_name": node, "model_version": None, "outputs": outputs}
    return {"predictions": rows}


@pytest.mark.parametrize(
    ("flow", "leaf", "rows", "results"),
    [
        ("line", "model", ["ab", "cd", "ef"], ["<AB>", "<CD>", "<EF>"]),
        ("line", "model", ["ab"], ["<AB>"]),
        ("diamond", "joined", ["ab", "cd"], ["<ab>|ba", "<cd>|dc"]),
    ],
)
def test_the_envelope_is_off_between_nodes_and_on_at_the_leaf(
    flows: RunningServer, flow: str, leaf: str, rows: list[str], results: list[str]
) -> None:
    answer = ask(flows, flow, rows)
    assert answer.status_code == 200, answer.text
    expected = enveloped(flows, f"{flow}__{leaf}", results)
    if isinstance(expected, dict):
        answered = answer.json()
        answered.pop("model_version", None), expected.pop("model_version", None)
        assert answered == expected
    else:
        assert answer.text == expected


def test_each_of_several_leaves_has_the_envelope(flows: RunningServer) -> None:
    answer = ask(flows, "leaves", ["12", "34"])
    if flows.settings.service_envelope in ("json", "kserve"):
        assert answer.json() == {
            "left": {"predictions": ["<12>", "<34>"]},
            "right": {"predictions": ["21", "43"]},
        }
    elif flows.settings.service_envelope == "kservev2":
        data = {
            leaf: [tensor["data"] for tensor in response["outputs"]]
            for leaf, response in answer.json().items()
        }
        assert data == {"left": [["<12>"], ["<34>"]], "right": [["21"], ["43"]]}
    else:
        assert "left: its output is not JSON" in answer.json()["message"]


def test_the_status_and_the_words_of_a_node_that_refuses_are_the_answer(
    flows: RunningServer,
) -> None:
    answer = ask(flows, "diamond", ["refuse"])
    assert (
        answer.status_code,
        "Error executing start: " in answer.text,
        "not this" in answer.text,
    ) == (422, True, True)


def test_nodes_that_give_different_numbers_of_rows_are_named(flows: RunningServer) -> None:
    answer = ask(flows, "uneven", ["ab", "cd"])
    if flows.settings.service_envelope in ("kserve", "kservev2"):
        assert (
            answer.status_code,
            "(odd, right) gave no rows, or different numbers" in answer.text,
        ) == (400, True)
    else:
        assert (answer.status_code, "expect: " in answer.text) == (500, True)


def test_a_node_asked_for_itself_has_the_envelope_both_ways(flows: RunningServer) -> None:
    if flows.settings.service_envelope != "kserve":
        pytest.skip("shown with one envelope")
    answer = flows.inference.post("/predictions/line__start", json={"instances": [5]})
    assert (answer.status_code, answer.json()) == (200, {"predictions": [{"value": 5}]})


@pytest.mark.parametrize("framing", [b"Content-Length: 10", b"Transfer-Encoding: chunked"])
def test_no_client_passes_for_a_node(flows: RunningServer, framing: bytes) -> None:
    """On neither lane of HTTP: such a request would get around the envelope."""
    host = httpx.URL(flows.addresses["inference"])
    head = b"POST /predictions/line__model HTTP/1.1\r\nHost: localhost\r\n%b: last\r\n%b\r\n\r\n"
    with socket.create_connection((host.host, host.port or 80)) as connection:
        connection.sendall(head % (NODE_HEADER, framing))
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
