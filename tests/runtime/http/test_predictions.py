"""Predictions over HTTP: a real server, real workers."""

from __future__ import annotations

import asyncio
import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest

from tsx_runtime.http.app import build_apps

PATH = "/predictions/talker"

FRAGILE = """
import os

def handle(data, context):
    if data is None:
        if os.path.exists({flag!r}):
            raise RuntimeError("gone")
    else:
        os._exit(1)
"""


def raw_exchange(address, request, until=b""):
    """What the server sends for these very bytes, up to `until` or to the end of the connection."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as sock:
        sock.sendall(request)
        received = b""
        while not until or until not in received:
            piece = sock.recv(65536)
            if not piece:
                break
            received += piece
    return received


def test_the_handler_sees_the_clients_headers_as_they_were_written(server):
    headers = server.inference.post(PATH, headers={"X-Mine": "1", "x-YOURS": "2"}).json()["headers"]
    assert (headers["X-Mine"], headers["x-YOURS"]) == ("1", "2")


def test_head_has_the_headers_of_the_answer_alone(server):
    answer = server.inference.head(PATH, params={"a": "b"})
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) > 0
    assert answer.content == b""
    assert server.inference.post(PATH, content=b"next", headers={"x-do": "bytes"}).text == "next"


def test_options_describe_the_models_predictions(server, error_of):
    document = server.inference.options(PATH).json()
    assert list(document["paths"])[:2] == ["/predictions/talker", "/explanations/talker"]
    assert error_of(server.inference.options("/predictions/nobody")) == (
        "ModelNotFoundException",
        "Model not found: nobody",
    )


def test_a_stream_comes_in_chunks(server):
    received = raw_exchange(
        str(server.inference.base_url),
        b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nx-do: stream\r\nContent-Length: 0\r\n\r\n",
        b"0\r\n\r\n",
    )
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    assert b"content-length" not in head.lower()
    assert b"x-request-id: " in head.lower()
    assert body == b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n"


def test_a_stream_whose_worker_dies_ends_without_its_last_chunk(empty):
    empty.register("talker.mar", initial_workers=1)
    with pytest.raises(httpx.RemoteProtocolError):
        empty.inference.post(PATH, headers={"x-do": "break"})


def test_a_version_without_workers_says_how_to_get_some(server, error_of):
    answer = server.inference.post(f"{PATH}/2.0")
    assert answer.status_code == 503
    kind, message = error_of(answer)
    assert kind == "ServiceUnavailableException"
    assert message.startswith(
        'Model "talker" has no worker to serve inference request. Please use scale workers API to add workers.'
    )
    assert message.endswith(
        "(version 2.0): `tsx models scale talker 1 --version 2.0` (PUT /models/talker/2.0?min_worker=1)"
    )
    assert "sequence" not in message


def test_a_worker_that_dies_answers_500(empty, error_of):
    empty.register("talker.mar", initial_workers=1)
    answer = empty.inference.post(PATH, headers={"x-do": "exit"})
    assert answer.status_code == 500
    assert error_of(answer)[0] == "InternalServerException"
    assert "Worker died." in error_of(answer)[1]
    assert empty.inference.post(PATH, content=b"again", headers={"x-do": "bytes"}).text == "again"


def test_a_client_that_leaves_in_the_middle_of_its_body_does_no_harm(server):
    parts = urlsplit(str(server.inference.base_url))
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(
            b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n123"
        )
    assert server.inference.post(PATH, content=b"next", headers={"x-do": "bytes"}).text == "next"


def test_a_full_queue_refuses_and_says_when_to_come_again(start_server, tmp_path, until, error_of):
    gate = tmp_path / "open"
    with start_server(job_queue_size=1) as server:
        server.register("talker.mar", initial_workers=1)
        version = server.registry.find("talker")
        held = []

        def ask():
            held.append(
                httpx.post(
                    f"{server.inference.base_url}{PATH}",
                    headers={"x-do": "wait", "x-file": str(gate)},
                    timeout=60,
                )
            )

        threads = []
        while not version.pending:  # what a worker holds does not wait
            threads.append(threading.Thread(target=ask))
            threads[-1].start()
            until(lambda: version.stats.requests == len(threads))
            server.call(
                lambda: None
            )  # by now the request is on its way to the worker, or stays in the queue
        answer = server.inference.post(PATH)
        gate.touch()
        for thread in threads:
            thread.join(60)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    kind, message = error_of(answer)
    assert kind == "ServiceUnavailableException"
    # TorchServe's words
    assert message.startswith('Model "talker" has no worker to serve inference request')
    assert "jobQueueSize" in message
    assert [one.text for one in held] == ["waited"] * len(threads)


def test_ping_is_healthy_by_any_verb(server):
    for verb in ("GET", "POST", "PUT"):
        answer = server.inference.request(verb, "/ping")
        assert (answer.status_code, answer.text) == (200, '{\n  "status": "Healthy"\n}\n')


def test_ping_is_unhealthy_once_a_worker_is_given_up(empty, store, until):
    flag = store / "flag"
    flag.unlink(missing_ok=True)
    handler = FRAGILE.format(flag=str(flag))
    empty.write_mar("fragile.mar", name="fragile", handler=handler)
    empty.register("fragile.mar", initial_workers=1)
    assert empty.inference.get("/ping").status_code == 200
    flag.touch()
    assert empty.inference.post("/predictions/fragile").status_code == 500
    until(lambda: empty.inference.get("/ping").status_code != 200)
    answer = empty.inference.get("/ping")
    assert (answer.status_code, answer.json()) == (500, {"status": "Unhealthy"})


def test_a_request_that_is_cancelled_while_it_waits_is_never_run(start_server, tmp_path, until):
    gate = tmp_path / "open"
    with start_server() as server:
        server.register("talker.mar", initial_workers=1, batch_size=1)
        version = server.registry.find("talker")
        (app,) = build_apps(server.registry, server.settings, [("inference",)])
        busy = threading.Thread(
            target=server.inference.post,
            args=(PATH,),
            kwargs={"headers": {"x-do": "wait", "x-file": str(gate)}},
        )
        busy.start()
        until(lambda: version.stats.requests == 1)
        begun = server.call(lambda: asyncio.ensure_future(answer_nobody(app)))
        begun_again = server.call(lambda: asyncio.ensure_future(answer_nobody(app)))
        until(lambda: version.stats.requests == 3)
        server.call(begun_again.cancel)
        gate.touch()
        until(
            lambda: (
                begun.done()
                and version.stats.refusals["ClientLeft"] + version.stats.answers.total() == 3
            )
        )
        busy.join(60)
        assert version.stats.refusals["ClientLeft"] == 1


async def answer_nobody(app):
    """One request straight to the app, whose answer goes nowhere."""

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"host", b"localhost")],
    }
    await app(scope, receive, send)


def test_a_client_that_leaves_a_stream_does_no_harm(empty, until, tmp_path):
    gate = tmp_path / "open"
    empty.register("talker.mar", initial_workers=1)
    request = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nx-do: stream-wait\r\nx-file: {gate}\r\nContent-Length: 0\r\n\r\n"
    assert raw_exchange(str(empty.inference.base_url), request.encode(), b"1\r\na\r\n").endswith(
        b"1\r\na\r\n"
    )
    gate.touch()
    assert empty.inference.post(PATH, content=b"next", headers={"x-do": "bytes"}).text == "next"
    until(
        lambda: empty.registry.find("talker").stats.answers[200] == 2
    )  # it is counted after the answer is written
