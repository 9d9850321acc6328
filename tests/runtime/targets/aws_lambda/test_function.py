"""A model as a Lambda function: the entry of the image in front of a Runtime API."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.formed import doubling
from tests.support.models import make_model
from tests.support.platforms.lambda_api import (
    Host,
    RequestTooLarge,
    answer_of,
    balancer,
    bridge,
    function,
    function_url,
    messages,
    rest_api,
    schedule,
)
from tests.support.servers import DEADLINE

pytestmark = pytest.mark.usefixtures("processes")

ECHO = """
import time
from pathlib import Path
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.context import Context

def wait_for(file):
    deadline = time.monotonic() + 60
    while not Path(file).exists() and time.monotonic() < deadline:
        time.sleep(0.005)

def said(context, idx):
    try:
        return context.get_request_header(idx, "x-said")
    except IndexError:  # of a request that has several
        return None

def handle(data, context):
    if data is None:
        return None
    answers = []
    for idx, row in enumerate(data):
        body = row.get("data") or row.get("body")
        if isinstance(body, (bytes, bytearray)):
            if body == b"large":
                answers.append("x" * 7_000_000)
            else:
                context.set_response_content_type(idx, "application/octet-stream")
                answers.append(bytes(reversed(body)))
            continue
        if body == "fail" or (isinstance(body, dict) and body.get("fail")):
            raise ValueError("no such thing")
        if isinstance(body, dict) and "parts" in body:
            for part in body["parts"]:
                send_intermediate_predict_response([part], {idx: context.get_request_id(idx)}, "", 200, context)
        if isinstance(body, dict) and body.get("wait"):
            wait_for(body["wait"])
        if isinstance(body, dict) and body.get("late"):
            raise ValueError("too late for a status")
        answers.append({"got": body, "together": len(data), "said": said(context, idx)})
    return answers
"""
CONFIG = "batchSize: 8\nbatchPolicy: wait\nmaxBatchDelay: 3600000\n"
KINDS = {"rest_api": rest_api, "function_url": function_url, "balancer": balancer}
JSON = {"content-type": "application/json"}


def lay(directory: Path, handler: str = ECHO, config: str = CONFIG) -> Path:
    (directory / "model").mkdir()
    make_model(directory / "model" / "echo.mar", handler, config=config)
    return directory


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Generator[Host, None, None]:
    """What runs is stopped between two invocations, as Lambda freezes it."""
    with function(lay(tmp_path_factory.mktemp("function"))) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_of_any_service_is_answered_in_its_form(host: Host, kind: str) -> None:
    event = KINDS[kind]("/predictions/echo", '{"a": "ä"}', headers={**JSON, "x-said": "hello"})
    answered = host.invoke(event).json()
    assert answered["statusCode"] == 200
    assert json.loads(answer_of(answered)) == {"got": {"a": "ä"}, "together": 1, "said": "hello"}
    assert answered["headers"]["content-type"] == "application/json"
    assert not answered["isBase64Encoded"]


@pytest.mark.parametrize("kind", KINDS)
def test_binary_comes_and_goes_as_it_is(host: Host, kind: str) -> None:
    answered = host.invoke(
        KINDS[kind](
            "/invocations", bytes(range(256)), headers={"content-type": "application/octet-stream"}
        )
    ).json()
    assert answered["isBase64Encoded"]
    assert answer_of(answered) == bytes(reversed(range(256)))


def test_the_stage_of_an_api_is_no_part_of_the_path(host: Host) -> None:
    assert (
        host.invoke(
            function_url("/v1/models/echo:predict", "{}", headers=JSON, stage="beta")
        ).json()["statusCode"]
        == 200
    )


def test_an_idempotency_key_is_refused_as_no_answer_is_stored(host: Host) -> None:
    refused = host.invoke(
        function_url(
            "/predictions/echo", "{}", headers={**JSON, "idempotency-key": "a"}, stage="beta"
        )
    ).json()
    assert refused["statusCode"] == 400
    assert "takes no Idempotency-Key" in json.loads(answer_of(refused))["message"]


def test_other_routes_are_those_of_the_server(host: Host) -> None:
    assert json.loads(answer_of(host.invoke(function_url("/ping", method="GET")).json())) == {
        "status": "Healthy"
    }
    missing = host.invoke(function_url("/predictions/nobody", "{}")).json()
    assert (missing["statusCode"], json.loads(answer_of(missing))["type"]) == (
        404,
        "ModelNotFoundException",
    )
    assert (
        host.invoke(function_url("/models", method="GET")).json()["statusCode"] == 404
    )  # nobody manages it from outside


def test_an_invocation_is_the_input_of_the_model(host: Host) -> None:
    for event in ({"a": 1}, [1, 2, 3], "text", 5, None):
        assert host.invoke(event).json() == {"got": event, "together": 1, "said": None}
    wrapped = {"body": {"a": 1}, "headers": {"X-Said": "hello"}, "model": "echo"}
    assert host.invoke(wrapped).json() == {"got": {"a": 1}, "together": 1, "said": "hello"}
    assert host.invoke({"body": "AAEC", "isBase64Encoded": True}).json() == {
        "body": "AgEA",
        "isBase64Encoded": True,
        "headers": {"content-type": "application/octet-stream"},
    }
    assert host.invoke(bridge({"a": 1})).json()["got"] == {"a": 1}


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"x-said": "a\r\nx-other: b"}, "HTTP does not allow"),
        ({":x": "a"}, "HTTP does not allow"),
        ({"x_said": "a", "X-Said": "b"}, "differ only in '_' and '-': x-said, x_said"),
    ],
)
def test_headers_of_an_event_that_are_none_are_refused(
    host: Host, headers: dict[str, str], why: str
) -> None:
    failed = host.invoke({"body": {"a": 1}, "headers": headers})
    assert failed.error
    assert why in failed.json()["errorMessage"]


def test_many_requests_of_one_invocation_are_one_batch(host: Host) -> None:
    reported = host.invoke(
        {"requests": [{"a": 1}, {"body": "fail", "headers": {"content-type": "text/plain"}}, 3]}
    ).json()
    assert [each["status"] for each in reported] == [200, 500, 200]
    assert (
        host.invoke({"requests": [{"n": number} for number in range(8)]}).json()[7]["answer"][
            "together"
        ]
        == 8
    )


def test_what_fails_is_a_failed_invocation(host: Host) -> None:
    failed = host.invoke({"fail": True})
    assert failed.error
    assert failed.json()["errorType"] == "HandlerFailed"
    assert failed.json()["errorMessage"].startswith("500: ")
    assert host.invoke({"model": "nobody", "body": "x"}).json()["errorType"] == "ModelNotFound"
    answered = host.invoke(function_url("/predictions/echo", '{"fail": 1}', headers=JSON))
    assert (answered.error, answered.json()["statusCode"]) == (None, 500)


@pytest.mark.parametrize(
    "event", [schedule(), {"warmup": True}, {"source": "serverless-plugin-warmup"}]
)
def test_a_wish_for_warmth_asks_the_model_nothing(host: Host, event: Any) -> None:
    assert host.invoke(event).json() == {"warm": True}


@pytest.mark.parametrize(
    ("event", "what"),
    [
        ({"Records": [{"eventSource": "aws:s3", "s3": {}}]}, "aws:s3"),
        ({"Records": [{"EventSource": "aws:sns", "Sns": {}}]}, "aws:sns"),
        ({"requestContext": {"connectionId": "x", "eventType": "MESSAGE"}}, "a web socket"),
        ({"triggerSource": "PreSignUp_SignUp"}, "Cognito"),
    ],
)
def test_an_event_that_asks_nothing_of_a_model_says_what_does(
    host: Host, event: Any, what: str
) -> None:
    reported = host.invoke(event)
    assert reported.error
    assert reported.json()["errorType"] == "UnknownEvent"
    assert (
        f"not support events of {what}. It takes HTTP requests" in reported.json()["errorMessage"]
    )


def test_half_a_request_is_reported(host: Host) -> None:
    for event in (
        {"version": "2.0", "requestContext": {"http": {"method": "POST"}}},
        {"requestContext": {"elb": {}}},
    ):
        reported = host.invoke(event).json()
        assert reported["errorType"] == "UnknownEvent"
        assert "looks like an HTTP request" in reported["errorMessage"]


def test_messages_of_a_queue_are_one_batch_and_the_bad_ones_come_again(host: Host) -> None:
    assert host.invoke(messages(['{"n": 1}', '{"fail": 1}', "text", '{"n": 2}'])).json() == {
        "batchItemFailures": [{"itemIdentifier": "message-1"}]
    }
    assert host.invoke(messages([f'{{"n": {number}}}' for number in range(150)])).json() == {
        "batchItemFailures": []
    }


def test_of_a_group_of_a_fifo_queue_none_overtakes_one_that_failed(host: Host) -> None:
    event = messages(
        ['{"n": 1}', '{"fail": 1}', '{"n": 2}', '{"n": 3}'], groups=["a", "b", "b", "a"]
    )
    assert host.invoke(event).json() == {
        "batchItemFailures": [{"itemIdentifier": "message-1"}, {"itemIdentifier": "message-2"}]
    }


def test_six_megabytes_go_through_and_more_is_reported(host: Host) -> None:
    largest = b"x" * 4_600_000
    assert len(answer_of(host.invoke(function_url("/invocations", largest)).json())) == len(largest)
    with pytest.raises(RequestTooLarge):
        host.invoke(function_url("/invocations", b"x" * 5_000_000))
    answered = host.invoke(function_url("/invocations", b"large")).json()
    assert answered["statusCode"] == 413
    assert "7000000 bytes" in json.loads(answer_of(answered))["message"]
    assert host.invoke({"body": "large"}).json()["errorType"] == "AnswerTooLarge"
    assert host.started == 1  # none of this has ended the environment


def test_what_runs_too_long_is_reported_and_a_fresh_environment_takes_over(tmp_path: Path) -> None:
    """Requests by HTTP need the token, where there is one."""
    given = {"TSX_INFERENCE_TOKEN": "secret", "TSX_LAMBDA_INIT_WAIT": str(DEADLINE)}
    with function(lay(tmp_path), given, timeout=2.0, freezes=False) as running:
        assert running.invoke({"a": 1}).error is None
        body = json.dumps({"wait": str(tmp_path / "never")})
        assert (
            running.invoke(function_url("/predictions/echo", body, headers=JSON)).json()[
                "statusCode"
            ]
            == 400
        )
        known = {**JSON, "authorization": "Bearer secret"}
        late = running.invoke(function_url("/predictions/echo", body, headers=known)).json()
        assert late["statusCode"] == 504
        assert json.loads(answer_of(late))["message"].endswith("Raise the timeout or the memory.")
        assert running.ended(DEADLINE) == 1
        (tmp_path / "never").touch()
        assert running.invoke({"a": 1}).error is None
        assert running.started == 2
        late = running.invoke(
            messages(['{"n": 1}', json.dumps({"wait": str(tmp_path / "nor this")})])
        ).json()
        assert {"itemIdentifier": "message-1"} in late["batchItemFailures"]
        assert running.ended(DEADLINE) == 1


def test_a_model_runs_in_the_form_that_fits_as_it_does_in_a_server(tmp_path: Path) -> None:
    doubling(tmp_path / "model")
    with function(tmp_path) as running:
        assert (
            answer_of(running.invoke(function_url("/invocations", "21", headers=JSON)).json())
            == b"42 by channels-last"
        )
