"""Retries and deadlines of calls, without a network and with a clock that the test advances."""

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


def response(status: int, kind: str = "", **headers: str) -> httpx.Response:
    header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(
        status,
        headers=header_fields,
        content=json.dumps({"code": status, "type": kind, "message": "why"}),
    )


Attempts = tuple[Any, list[float], list[httpx.Request]]


def drive(
    *results: httpx.Response | Exception,
    timeout: float | None = None,
    seconds_per_attempt: float = 0.0,
) -> Attempts:
    """Make a call whose attempts end with `results` and take `seconds_per_attempt` each.

    Return the outcome, which is a response or an error, the waits in seconds, and the requests.
    """
    clock = Clock()
    waits: list[float] = []
    requests: list[httpx.Request] = []
    attempts = list(results)

    async def send(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        clock.now += seconds_per_attempt
        result = attempts.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        waits.append(seconds)

    try:
        outcome: Any = asyncio.run(
            exchange(
                lambda: httpx.Request("POST", URL), Retry(), Deadline(timeout, clock), send, sleep
            )
        )
    except ClientError as error:
        outcome = error
    return outcome, waits, requests


def test_a_refused_request_is_sent_again_after_the_time_that_the_server_asks_for() -> None:
    success = response(200)
    outcome, waits, requests = drive(
        response(429, retry_after="2"),
        response(503, retry_after="0"),
        httpx.ConnectError("refused"),
        success,
    )
    assert outcome is success
    assert len(requests) == 4
    assert 2.1 <= waits[0] <= 2.2
    assert 0.2 <= waits[1] <= 0.4
    assert 0.4 <= waits[2] <= 0.8


def test_after_the_last_attempt_the_error_is_raised() -> None:
    outcome, waits, _ = drive(*[response(503, retry_after="0")] * 4)
    assert isinstance(outcome, Overloaded)
    assert len(waits) == 3


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (response(500), ServerError),
        (response(503, "InternalServerException"), ServerError),
        # A bare 503 may come from a handler or a lost replica, after the request has run.
        (response(503), Overloaded),
        (response(302), InvalidRequest),
        (response(400), InvalidRequest),
        (response(429, retry_after="31"), Overloaded),
        (httpx.ReadError("reset"), ConnectionFailed),
        (httpx.RemoteProtocolError("disconnected"), ConnectionFailed),
    ],
)
def test_a_request_that_may_have_run_or_would_wait_too_long_is_not_sent_again(
    result: Any, kind: type[ClientError]
) -> None:
    outcome, waits, _ = drive(result)
    assert isinstance(outcome, kind)
    assert waits == []


def test_all_attempts_share_one_deadline_and_send_the_remaining_time() -> None:
    outcome, waits, requests = drive(
        response(503, retry_after="0"),
        response(503, retry_after="0"),
        response(200),
        timeout=10,
        seconds_per_attempt=2,
    )
    assert outcome.status_code == 200
    timeouts = [int(request.headers["x-tsx-timeout-ms"]) for request in requests]
    assert timeouts[0] == 10_000
    assert timeouts[2] == pytest.approx(10_000 - 4000 - 1000 * sum(waits), abs=2)
    assert requests[0].extensions["timeout"]["read"] == 10


def test_no_wait_is_longer_than_the_deadline() -> None:
    outcome, waits, _ = drive(response(503, retry_after="5"), timeout=3)
    assert isinstance(outcome, Overloaded)
    assert (waits, outcome.retry_after) == ([], 5)
    assert isinstance(drive(httpx.ReadTimeout("late"), timeout=3)[0], DeadlineExceeded)
    for late_response in (response(503, retry_after="0"), response(504)):
        assert isinstance(
            drive(late_response, timeout=3, seconds_per_attempt=3)[0], DeadlineExceeded
        )
    # A 504 before the client's deadline comes from the model's own timeout.
    assert isinstance(drive(response(504), timeout=3, seconds_per_attempt=1)[0], ServerError)


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
