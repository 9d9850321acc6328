"""Predictions over HTTP: a real server, real workers."""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
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


def test_a_binary_body_is_given_as_body(server):
    answer = server.inference.post(
        PATH, content=b"\x00\xff", headers={"content-type": "application/octet-stream"}
    ).json()
    assert answer["row"] == {"body": {"bytes": "\x00\xff"}}


def test_a_json_body_is_given_decoded(server):
    assert server.inference.post(PATH, json={"a": [1]}).json()["row"] == {"body": {"a": [1]}}


def test_a_text_body_is_given_as_text(server):
    answer = server.inference.post(
        PATH, content="müsli", headers={"content-type": "text/plain; charset=utf-8"}
    ).json()
    assert answer["row"] == {"body": "müsli"}


def test_bad_json_is_given_as_it_is(server):
    answer = server.inference.post(
        PATH, content=b"{", headers={"content-type": "application/json"}
    ).json()
    assert answer["row"] == {"body": {"bytes": "{"}}


def test_a_multipart_form_is_given_by_field(server):
    answer = server.inference.post(
        PATH, files={"data": ("a.png", b"\x89PNG", "image/png"), "more": ("b", b"x")}
    ).json()
    assert answer["row"]["data"] == {"bytes": "\x89PNG"}
    assert answer["headers"]["data"] == {"content-type": "image/png"}


def test_a_urlencoded_form_is_given_by_field(server):
    assert server.inference.post(PATH, data={"data": "1"}).json()["row"] == {"data": {"bytes": "1"}}


@pytest.mark.parametrize("path", ["/talker/predict", "/models/talker/invoke", "/invocations"])
def test_query_parameters_are_inputs_where_torchserve_makes_them_some(server, path):
    row = server.inference.get(
        path, params={"data": "test", "more": "ä b", "model_name": "talker"}
    ).json()["row"]
    assert row["data"] == {"bytes": "test"}
    assert row["more"] == {"bytes": "ä b".encode().decode("latin-1")}


def test_elsewhere_they_are_not(server):
    assert server.inference.get(PATH, params={"data": "test"}).json()["row"] == {
        "body": {"bytes": ""}
    }


def test_a_handler_is_reported_what_the_route_says(server):
    headers = server.inference.post(f"{PATH}/1.0/a/b").json()["headers"]
    assert (headers["url_path"], headers["explain"]) == ("a/b", "False")


@pytest.mark.parametrize("verb", ["GET", "POST", "PUT", "PATCH", "DELETE", "REPORT"])
def test_every_verb_predicts(server, verb):
    assert server.inference.request(verb, PATH, content=b"x", headers={"x-do": "bytes"}).text == "x"


def test_the_handler_sees_the_clients_headers_as_they_were_written(server):
    headers = server.inference.post(PATH, headers={"X-Mine": "1", "x-YOURS": "2"}).json()["headers"]
    assert (headers["X-Mine"], headers["x-YOURS"]) == ("1", "2")


def test_the_answer_is_the_handlers_with_an_id_and_without_caching(server):
    answer = server.inference.post(
        PATH, content=b"abc", headers={"x-do": "bytes", "x-request-id": "the-clients"}
    )
    assert answer.content == b"abc"
    assert "content-type" not in answer.headers
    assert uuid.UUID(answer.headers["x-request-id"]).version == 4
    assert answer.headers["pragma"] == "no-cache"
    assert answer.headers["cache-control"] == "no-cache; no-store, must-revalidate, private"
    assert answer.headers["expires"] == "Thu, 01 Jan 1970 00:00:00 UTC"
    assert answer.headers["content-length"] == "3"


def test_the_id_of_the_answer_is_the_one_the_handler_knows(server):
    answer = server.inference.post(PATH)
    assert answer.json()["id"] == answer.headers["x-request-id"]


def test_a_handlers_headers_are_in_the_answer(server):
    answer = server.inference.post(PATH, headers={"x-do": "headers"})
    assert answer.headers["content-type"] == "text/csv"
    assert answer.headers["x-own"] == "1"
    assert answer.headers["cache-control"] == "max-age=60"
    assert answer.headers["x-request-id"] != "mine"


@pytest.mark.parametrize("status", [201, 404, 507])
def test_a_handlers_status_stands_with_its_body(server, status):
    answer = server.inference.post(PATH, headers={"x-do": "status", "x-status": str(status)})
    assert (answer.status_code, answer.text) == (status, "body of it")


def test_a_status_without_body_has_none(server):
    answer = server.inference.post(PATH, headers={"x-do": "status", "x-status": "204"})
    assert (answer.status_code, answer.content) == (204, b"")
    assert server.inference.post(PATH, content=b"next", headers={"x-do": "bytes"}).text == "next"


def test_a_version_can_be_asked_for(server):
    assert server.inference.post(f"{PATH}/1.0").json()["version"] == "1.0"
    assert server.inference.post(f"{PATH}/1.0/").json()["version"] == "1.0"
    assert server.inference.post(f"{PATH}/").json()["version"] == "1.0"


def test_what_follows_the_version_is_the_header_url_path(server):
    headers = server.inference.post(
        f"{PATH}/1.0/v1/chat", headers={"url_path": "the clients"}
    ).json()["headers"]
    assert headers["url_path"] == "v1/chat"
    assert server.inference.post(f"{PATH}/1.0").json()["headers"]["url_path"] == ""


def test_a_path_cannot_add_headers(server):
    headers = server.inference.post(f"{PATH}/1.0/a%0D%0Aexplain:%20True").json()["headers"]
    assert headers["explain"] == "False"
    assert headers["url_path"] == "a%0D%0Aexplain: True"


def test_explanations_say_so_in_a_header(server):
    for path in ("/explanations/talker", "/explanations/talker/1.0"):
        assert (
            server.inference.post(path, headers={"explain": "no"}).json()["headers"]["explain"]
            == "True"
        )


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


def test_a_head_of_a_stream_has_no_body(server):
    assert server.inference.head(PATH, headers={"x-do": "stream"}).content == b""
    assert server.inference.post(PATH, content=b"next", headers={"x-do": "bytes"}).text == "next"


def test_a_stream_whose_worker_dies_ends_without_its_last_chunk(empty):
    empty.register("talker.mar", initial_workers=1)
    with pytest.raises(httpx.RemoteProtocolError):
        empty.inference.post(PATH, headers={"x-do": "break"})


def test_an_unknown_model_is_not_found(server, error_of):
    answer = server.inference.post("/predictions/nobody", content=b"x" * 1000)
    assert answer.status_code == 404
    assert error_of(answer) == ("ModelNotFoundException", "Model not found: nobody")
    assert uuid.UUID(answer.headers["x-request-id"])
    assert answer.headers["pragma"] == "no-cache"


def test_an_unknown_version_is_not_found(server, error_of):
    answer = server.inference.post(f"{PATH}/9.9")
    assert answer.status_code == 404
    assert error_of(answer) == (
        "ModelVersionNotFoundException",
        "Model version: 9.9 does not exist for model: talker",
    )


@pytest.mark.parametrize(
    "path",
    [
        "/predictions",
        "/predictions/",
        "/explanations/",
        "/nothing",
        "//predictions/talker",
        "/models",
    ],
)
def test_an_unknown_route_is_not_found(server, path, error_of):
    answer = server.inference.get(str(server.inference.base_url) + path)
    assert answer.status_code in (404, 405)
    assert error_of(answer)[0] in ("ResourceNotFoundException", "MethodNotAllowedException")


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


def test_a_handler_that_raises_answers_500(server, error_of):
    answer = server.inference.post(PATH, headers={"x-do": "raise"})
    assert answer.status_code == 500
    kind, message = error_of(answer)
    assert kind == "InternalServerException"
    assert message.startswith("Prediction failed")
    assert "no such image" in message
    assert "Traceback" not in message


def test_a_worker_that_dies_answers_500(empty, error_of):
    empty.register("talker.mar", initial_workers=1)
    answer = empty.inference.post(PATH, headers={"x-do": "exit"})
    assert answer.status_code == 500
    assert error_of(answer)[0] == "InternalServerException"
    assert "Worker died." in error_of(answer)[1]
    assert empty.inference.post(PATH, content=b"again", headers={"x-do": "bytes"}).text == "again"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_by_name(server, chunked, error_of):
    body = bytes(100_001)
    answer = server.inference.post(
        PATH, content=iter([body[:50_000], body[50_000:]]) if chunked else body
    )
    assert answer.status_code == 413
    kind, message = error_of(answer)
    assert kind == "PayloadTooLargeException"
    assert "max_request_size, which is 100000 bytes" in message
    assert answer.headers["connection"] == "close"
    assert server.inference.post(
        PATH, content=bytes(100_000), headers={"x-do": "bytes"}
    ).content == bytes(100_000)


def test_a_client_that_asks_first_is_refused_before_it_sends(server):
    request = b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100001\r\nExpect: 100-continue\r\n\r\n"
    assert raw_exchange(str(server.inference.base_url), request, b"\r\n").startswith(
        b"HTTP/1.1 413 "
    )


def test_a_client_that_asks_first_is_notified_to_go_on(server):
    request = b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nx-do: bytes\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    assert raw_exchange(str(server.inference.base_url), request, b"\r\n\r\n").startswith(
        b"HTTP/1.1 100 Continue\r\n\r\n"
    )


def test_a_connection_carries_one_request_after_the_other(server):
    one = b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nx-do: bytes\r\nContent-Length: 1\r\n\r\n"
    received = raw_exchange(
        str(server.inference.base_url), one + b"1" + one + b"2" + one + b"3", b"\r\n\r\n3"
    )
    assert [part[:1] for part in received.split(b"\r\n\r\n")[1:]] == [b"1", b"2", b"3"]


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
    assert "has no worker to serve inference request" in message  # TorchServe's words
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
