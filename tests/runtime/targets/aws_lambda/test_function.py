"""A model as a Lambda function, with AWS's own runtime client and with tsx's.

`tests/runtime/test_conformance.py` tests the answers that all targets have in common.
"""

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

def note(context, idx):
    try:
        return context.get_request_header(idx, "x-note")
    except IndexError:  # a request that has several
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
        answers.append({"got": body, "together": len(data), "note": note(context, idx)})
    return answers
"""
CONFIG = "batchSize: 8\nbatchPolicy: wait\nmaxBatchDelay: 3600000\n"
EVENT_TYPES = {"rest_api": rest_api, "function_url": function_url, "balancer": balancer}
JSON = {"content-type": "application/json"}


def with_model(directory: Path, handler: str = ECHO, config: str = CONFIG) -> Path:
    """Make a model in a directory and return the directory."""
    (directory / "model").mkdir()
    make_model(directory / "model" / "echo.mar", handler, config=config)
    return directory


@pytest.fixture(scope="module", params=["awslambdaric", "tsx"])
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Host, None, None]:
    """Run a function behind each client; as in Lambda, it is frozen between invocations."""
    with function(
        with_model(tmp_path_factory.mktemp(request.param)), {"TSX_LAMBDA_RUNTIME": request.param}
    ) as function_host:
        yield function_host


def post(
    host: Host, body: str | bytes = "{}", path: str = "/predictions/echo", **extra_fields: Any
) -> Any:
    """Return the answer to a POST to the function URL, with a JSON content type by default."""
    return host.invoke(function_url(path, body, **{"headers": JSON, **extra_fields})).json()


def body_of(payload: Any) -> Any:
    return json.loads(answer_of(payload))


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_requests_of_every_service_are_answered_in_its_form(host: Host, kind: str) -> None:
    event = EVENT_TYPES[kind](
        "/predictions/echo", '{"a": "ä"}', headers={**JSON, "x-note": "hello"}
    )
    payload = host.invoke(event).json()
    assert payload["statusCode"] == 200
    assert body_of(payload) == {"got": {"a": "ä"}, "together": 1, "note": "hello"}
    assert payload["headers"]["content-type"] == "application/json"
    assert not payload["isBase64Encoded"]


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_binary_bodies_and_answers_are_unchanged(host: Host, kind: str) -> None:
    headers = {"content-type": "application/octet-stream"}
    event = EVENT_TYPES[kind]("/invocations", bytes(range(256)), headers=headers)
    payload = host.invoke(event).json()
    assert payload["isBase64Encoded"]
    assert answer_of(payload) == bytes(reversed(range(256)))


def test_a_request_does_not_wait_for_a_batch(host: Host) -> None:
    """Serve an archive whose batch delay is an hour; one invocation cannot fill its batch of 8."""
    assert post(host, '"a"')["statusCode"] == 200


def test_the_api_stage_is_removed_from_the_path(host: Host) -> None:
    assert post(host, path="/v1/models/echo:predict", stage="beta")["statusCode"] == 200


def test_an_idempotency_key_is_refused_without_a_store(host: Host) -> None:
    refusal = post(host, headers={**JSON, "idempotency-key": "a"})
    assert refusal["statusCode"] == 400
    assert "takes no Idempotency-Key" in body_of(refusal)["message"]


def test_the_function_url_has_no_management_api(host: Host) -> None:
    assert post(host, path="/models", method="GET")["statusCode"] == 404


def test_an_invocation_is_the_input_of_the_model(host: Host) -> None:
    for event in ({"a": 1}, [1, 2, 3], "text", 5, None):
        assert host.invoke(event).json() == {"got": event, "together": 1, "note": None}
    wrapped = {"body": {"a": 1}, "headers": {"X-Note": "hello"}, "model": "echo"}
    assert host.invoke(wrapped).json() == {"got": {"a": 1}, "together": 1, "note": "hello"}
    assert host.invoke({"body": "AAEC", "isBase64Encoded": True}).json() == {
        "body": "AgEA",
        "isBase64Encoded": True,
        "headers": {"content-type": "application/octet-stream"},
    }
    assert host.invoke(bridge({"a": 1})).json()["got"] == {"a": 1}


@pytest.mark.parametrize("headers", [{"x-note": "a\r\nx-other: b"}, {":x": "a"}])
def test_invalid_http_headers_in_an_event_are_refused(host: Host, headers: dict[str, str]) -> None:
    failed_invocation = host.invoke({"body": {"a": 1}, "headers": headers})
    assert failed_invocation.error
    assert "HTTP does not allow" in failed_invocation.json()["errorMessage"]


def test_headers_that_differ_only_in_underscores_are_refused(host: Host) -> None:
    failed_invocation = host.invoke({"body": {"a": 1}, "headers": {"x_note": "a", "X-Note": "b"}})
    assert failed_invocation.error
    assert "differ only in '_' and '-': x-note, x_note" in failed_invocation.json()["errorMessage"]


def test_requests_of_one_invocation_form_one_batch(host: Host) -> None:
    failing_request = {"body": "fail", "headers": {"content-type": "text/plain"}}
    answers = host.invoke({"requests": [{"a": 1}, failing_request, 3]}).json()
    assert [answer["status"] for answer in answers] == [200, 500, 200]
    *_, last = host.invoke({"requests": [{"n": number} for number in range(8)]}).json()
    assert last["answer"]["together"] == 8


def test_a_handler_failure_fails_the_invocation(host: Host) -> None:
    failed_invocation = host.invoke({"fail": True})
    assert failed_invocation.error
    assert failed_invocation.json()["errorType"] == "HandlerFailed"
    assert failed_invocation.json()["errorMessage"].startswith("500: ")
    assert host.invoke({"model": "nobody", "body": "x"}).json()["errorType"] == "ModelNotFound"
    payload = host.invoke(function_url("/predictions/echo", '{"fail": 1}', headers=JSON))
    assert (payload.error, payload.json()["statusCode"]) == (None, 500)


@pytest.mark.parametrize(
    "event", [schedule(), {"warmup": True}, {"source": "serverless-plugin-warmup"}]
)
def test_a_warm_up_event_does_not_run_the_model(host: Host, event: Any) -> None:
    assert host.invoke(event).json() == {"warm": True}


@pytest.mark.parametrize(
    ("event", "service"),
    [
        ({"Records": [{"eventSource": "aws:s3", "s3": {}}]}, "aws:s3"),
        ({"Records": [{"EventSource": "aws:sns", "Sns": {}}]}, "aws:sns"),
        ({"requestContext": {"connectionId": "x", "eventType": "MESSAGE"}}, "a web socket"),
        ({"triggerSource": "PreSignUp_SignUp"}, "Cognito"),
    ],
)
def test_events_of_other_services_are_refused_by_name(host: Host, event: Any, service: str) -> None:
    refusal = host.invoke(event)
    assert refusal.error
    assert refusal.json()["errorType"] == "UnknownEvent"
    assert f"events of {service}. It takes HTTP requests" in refusal.json()["errorMessage"]


def test_an_incomplete_http_event_is_refused(host: Host) -> None:
    for event in (
        {"version": "2.0", "requestContext": {"http": {"method": "POST"}}},
        {"requestContext": {"elb": {}}},
    ):
        refusal = host.invoke(event).json()
        assert refusal["errorType"] == "UnknownEvent"
        assert "looks like an HTTP request" in refusal["errorMessage"]


def test_queue_messages_form_one_batch_and_failures_are_listed(host: Host) -> None:
    assert host.invoke(messages(['{"n": 1}', '{"fail": 1}', "text", '{"n": 2}'])).json() == {
        "batchItemFailures": [{"itemIdentifier": "message-1"}]
    }
    assert host.invoke(messages([f'{{"n": {number}}}' for number in range(150)])).json() == {
        "batchItemFailures": []
    }


def test_no_message_of_a_fifo_group_overtakes_one_that_failed(host: Host) -> None:
    event = messages(
        ['{"n": 1}', '{"fail": 1}', '{"n": 2}', '{"n": 3}'], groups=["a", "b", "b", "a"]
    )
    assert host.invoke(event).json() == {
        "batchItemFailures": [{"itemIdentifier": "message-1"}, {"itemIdentifier": "message-2"}]
    }


def test_answers_up_to_six_megabytes_pass_and_larger_ones_are_errors(host: Host) -> None:
    largest_body = b"x" * 4_600_000
    payload = post(host, largest_body, "/invocations", headers={})
    assert len(answer_of(payload)) == len(largest_body)
    with pytest.raises(RequestTooLarge):
        host.invoke(function_url("/invocations", b"x" * 5_000_000))
    payload = post(host, b"large", "/invocations", headers={})
    assert payload["statusCode"] == 413
    assert "7000000 bytes" in body_of(payload)["message"]
    assert host.invoke({"body": "large"}).json()["errorType"] == "AnswerTooLarge"
    # The refusals have not ended the environment.
    assert host.start_count == 1


def test_a_late_answer_is_an_error_and_restarts_the_environment(tmp_path: Path) -> None:
    """Send the token where one is required."""
    variables = {"TSX_INFERENCE_TOKEN": "secret", "TSX_LAMBDA_INIT_WAIT": str(DEADLINE)}
    with function(with_model(tmp_path), variables, timeout=2.0, freezes=False) as function_host:
        assert function_host.invoke({"a": 1}).error is None
        body = json.dumps({"wait": str(tmp_path / "never")})
        assert post(function_host, body)["statusCode"] == 400
        late_answer = post(function_host, body, headers={**JSON, "authorization": "Bearer secret"})
        assert late_answer["statusCode"] == 504
        assert body_of(late_answer)["message"].endswith("Raise the timeout or the memory.")
        assert function_host.wait_for_exit(DEADLINE) == 1
        (tmp_path / "never").touch()
        assert function_host.invoke({"a": 1}).error is None
        assert function_host.start_count == 2
        waiting_body = json.dumps({"wait": str(tmp_path / "absent")})
        late_answer = function_host.invoke(messages(['{"n": 1}', waiting_body])).json()
        assert {"itemIdentifier": "message-1"} in late_answer["batchItemFailures"]
        assert function_host.wait_for_exit(DEADLINE) == 1


def test_a_model_runs_in_the_suitable_form_as_in_a_server(tmp_path: Path) -> None:
    doubling(tmp_path / "model")
    with function(tmp_path) as function_host:
        payload = post(function_host, "21", "/invocations")
        assert answer_of(payload) == b"42 by channels-last"
