"""Requests with a Content-Encoding, on every path that runs a model."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.connections import connect_raw
from tests.runtime.conftest import TALKER, RunningServer, make_settings, running_server
from tests.support.models import make_model, make_war
from tests.support.openai_models import COUNTER

BODY = json.dumps(
    {"instances": [1], "inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}]}
).encode()
COUNTING_HANDLER = """
calls = 0

def handle(data, context):
    global calls
    calls += len(data or [])
    return [str(calls) for _ in data or []]
"""


@pytest.fixture(scope="module")
def server(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store: Path = tmp_path_factory.mktemp("compressed")
    make_model(store / "talker.mar", TALKER)
    make_model(store / "counter.mar", COUNTER)
    make_model(store / "counting.mar", COUNTING_HANDLER, config="cache: {size: 1MiB, ttl: 1h}\n")
    make_war(
        store / "flow.war",
        json.dumps({"models": {"talk": {"url": "talker.mar"}}, "dag": {"talk": []}}),
        None,
    )
    with running_server(make_settings(store)) as server:
        for name in ("talker", "counter", "counting"):
            server.register(f"{name}.mar", initial_workers=1)
        assert server.management.post("/workflows?url=flow.war", timeout=120).status_code == 200
        yield server


def post(
    server: RunningServer, path: str, data: Any, coding: str = "gzip", **headers: str
) -> httpx.Response:
    header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.inference.post(
        path,
        content=data,
        headers={"content-encoding": coding, "content-type": "application/json", **header_fields},
    )


@pytest.mark.parametrize(
    "path",
    [
        "/predictions/talker",
        "/explanations/talker",
        "/invocations?model_name=talker",
        "/models/talker/invoke",
        "/v1/models/talker:predict",
        "/v2/models/talker/infer",
        "/talker/predict",
        "/wfpredict/flow",
    ],
)
def test_a_handler_gets_the_decoded_body(server, path):
    data = gzip.compress(BODY)
    for content in (data, iter([data[:3], data[3:]])):
        answer = post(server, path, content)
        assert answer.status_code == 200, answer.text
        received = answer.json()
        assert received["row"]["body"] == json.loads(BODY)
        headers = {name.lower(): value for name, value in received["headers"].items()}
        assert "content-encoding" not in headers
        assert headers.get("content-length", str(len(BODY))) == str(len(BODY))


def test_openais_api_accepts_a_compressed_request(server):
    answer = post(server, "/v1/embeddings", gzip.compress(b'{"model": "counter", "input": "x"}'))
    assert answer.status_code == 200, answer.text


def test_a_job_and_a_form_that_names_the_model_may_be_compressed(server):
    job_response = post(
        server, "/predictions/talker", gzip.compress(BODY), prefer="respond-async, wait=60"
    )
    assert (job_response.status_code, job_response.json()["row"]["body"]) == (200, json.loads(BODY))
    form = gzip.compress(b"model_name=talker&data=1")
    answer = post(server, "/invocations", form, content_type="application/x-www-form-urlencoded")
    assert answer.json()["row"]["data"] == {"bytes": "1"}


def test_compression_does_not_change_the_identity_of_a_request(server):
    """Check that the idempotency key and the reply cache use the decoded body."""
    for headers in ({"idempotency_key": "one"}, {}):
        path = "/predictions/counting"
        first = post(server, path, gzip.compress(BODY), **headers)
        second_response = post(server, path, BODY, "identity", **headers)
        deflated = post(server, path, zlib.compress(BODY), "deflate", **headers)
        assert first.status_code == 200
        assert first.text == second_response.text == deflated.text


@pytest.mark.parametrize("headers", [{}, {"idempotency_key": "large"}, {"prefer": "respond-async"}])
@pytest.mark.parametrize(
    "path", ["/predictions/talker", "/invocations?model_name=talker", "/v2/models/talker/infer"]
)
def test_a_body_that_cannot_be_decoded_is_refused(server, path, headers):
    data = gzip.compress(BODY)
    assert post(server, path, data[:-1], **headers).status_code == 400
    assert post(server, path, BODY, **headers).status_code == 400
    unknown = post(server, path, data, "br", **headers)
    assert (unknown.status_code, unknown.headers["accept-encoding"]) == (415, "gzip, deflate")
    if "prefer" not in headers:  # jobs have another limit
        assert post(server, path, gzip.compress(bytes(100_001)), **headers).status_code == 413
    assert server.ask(b"x").status_code == 200


def test_requests_after_a_compressed_one_are_answered_in_order(server):
    data = gzip.compress(b'"first"')
    head = b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    compressed = head % (len(data), b"Content-Encoding: gzip\r\n") + data
    uncompressed = head % (8, b"Connection: close\r\n") + b'"second"'
    with connect_raw(server) as connection:
        connection.send(compressed + compressed + uncompressed)
        answers = [json.loads(answer.body) for answer in iter(connection.answer, None)]
    assert [answer["row"]["body"] for answer in answers] == ["first", "first", "second"]


def test_a_body_that_arrives_byte_by_byte_is_decoded(server):
    data = gzip.compress(BODY)
    answer = post(
        server, "/predictions/talker", iter([data[index : index + 1] for index in range(len(data))])
    )
    assert answer.json()["row"]["body"] == json.loads(BODY)
