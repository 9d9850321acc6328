"""Repeated calls and their deadline, without a network and with a clock that the test turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tsx_client import (
    AccessDenied,
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    Retry,
    ServerError,
)
from tsx_client.errors import failure
from tsx_client.exchange import Deadline, exchange

URL = "http://server/predictions/m"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def answer(status: int, kind: str = "", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(
        status, headers=named, content=json.dumps({"code": status, "type": kind, "message": "why"})
    )


Attempts = tuple[Any, list[float], list[httpx.Request]]


def drive(
    *results: httpx.Response | Exception, timeout: float | None = None, takes: float = 0.0
) -> Attempts:
    """Make a call whose attempts end with `results` and take `takes` seconds each.

    Return its result, the waits in seconds, and the requests.
    """
    clock = Clock()
    waits: list[float] = []
    requests: list[httpx.Request] = []
    attempts = list(results)

    async def send(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        clock.now += takes
        result = attempts.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        waits.append(seconds)

    try:
        end: Any = asyncio.run(
            exchange(
                lambda: httpx.Request("POST", URL), Retry(), Deadline(timeout, clock), send, sleep
            )
        )
    except ClientError as error:
        end = error
    return end, waits, requests


def test_a_refused_request_is_sent_again_after_the_time_that_the_server_asks_for() -> None:
    good = answer(200)
    end, waits, requests = drive(
        answer(429, retry_after="2"),
        answer(503, retry_after="0"),
        httpx.ConnectError("refused"),
        good,
    )
    assert end is good
    assert len(requests) == 4
    assert 2.1 <= waits[0] <= 2.2
    assert 0.2 <= waits[1] <= 0.4
    assert 0.4 <= waits[2] <= 0.8


def test_after_the_last_attempt_the_error_is_raised() -> None:
    end, waits, _ = drive(*[answer(503, retry_after="0")] * 4)
    assert isinstance(end, Overloaded)
    assert len(waits) == 3


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (answer(500), ServerError),
        (answer(503, "InternalServerException"), ServerError),
        # A handler or a lost replica may answer so.
        (answer(503), Overloaded),
        (answer(302), InvalidRequest),
        (answer(400), InvalidRequest),
        (answer(429, retry_after="31"), Overloaded),
        (httpx.ReadError("reset"), ConnectionFailed),
        (httpx.RemoteProtocolError("disconnected"), ConnectionFailed),
    ],
)
def test_a_request_that_may_have_run_or_would_wait_too_long_is_not_sent_again(
    result: Any, kind: type[ClientError]
) -> None:
    end, waits, _ = drive(result)
    assert isinstance(end, kind)
    assert waits == []


def test_one_deadline_holds_for_all_attempts_and_the_server_gets_the_rest_of_it() -> None:
    end, waits, requests = drive(
        answer(503, retry_after="0"), answer(503, retry_after="0"), answer(200), timeout=10, takes=2
    )
    assert end.status_code == 200
    timeouts = [int(request.headers["x-tsx-timeout-ms"]) for request in requests]
    assert timeouts[0] == 10_000
    assert timeouts[2] == pytest.approx(10_000 - 4000 - 1000 * sum(waits), abs=2)
    assert requests[0].extensions["timeout"]["read"] == 10


def test_no_wait_is_longer_than_the_deadline() -> None:
    end, waits, _ = drive(answer(503, retry_after="5"), timeout=3)
    assert isinstance(end, Overloaded)
    assert (waits, end.retry_after) == ([], 5)
    assert isinstance(drive(httpx.ReadTimeout("late"), timeout=3)[0], DeadlineExceeded)
    for late in (answer(503, retry_after="0"), answer(504)):
        assert isinstance(drive(late, timeout=3, takes=3)[0], DeadlineExceeded)
    # This is the model's own deadline.
    assert isinstance(drive(answer(504), timeout=3, takes=1)[0], ServerError)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (404, b'{"type": "ModelNotFoundException", "message": "no x"}', NotFound, "no x"),
        (400, b'{"type": "InvalidKeyException", "message": "Token"}', AccessDenied, "Token"),
        (400, b'{"error": {"message": "no role"}}', InvalidRequest, "no role"),
        (401, b"<html>", AccessDenied, "<html>"),
        (502, b"", ServerError, "The answer has no text."),
        (422, b"[1]", InvalidRequest, "[1]"),
    ],
)
def test_errors_have_the_servers_message_and_the_requests_id(
    status: int, body: bytes, kind: type[ClientError], message: str
) -> None:
    headers = {"x-request-id": "17", "retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}
    error = failure(status, headers, body)
    assert type(error) is kind
    assert (error.status, error.message, error.body) == (status, message, body)
    assert (error.request_id, error.retry_after) == ("17", 0.0)
    assert str(error) == f"{message} (status {status}, request 17)"
