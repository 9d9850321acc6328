"""The ingress with lost or busy replicas; a script stands in for Ray Serve's handle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

from tsx_runtime.api.messages import Message
from tsx_runtime.targets.ray.grpc_bridge import GrpcAnswer
from tsx_runtime.targets.ray.ingress import Handle, Ingress

WHOLE_ANSWER: list[Message] = [
    {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"own")]},
    {"type": "http.response.body", "body": b"answer"},
]
UNAVAILABLE = DeploymentUnavailableError(cast("Any", None))
HALF_ANSWER: list[Message] = [
    WHOLE_ANSWER[0],
    {"type": "http.response.body", "body": b"half", "more_body": True},
]


class ScriptedHandle:
    """A handle whose calls play the next script: messages, optionally followed by an error."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.models: list[str] = []

    def options(self, *, multiplexed_model_id: str = "", **_: Any) -> ScriptedHandle:
        if multiplexed_model_id:
            self.models.append(multiplexed_model_id)
        return self

    def remote(self, *_: Any) -> ScriptedAnswers:
        return ScriptedAnswers(self.scripts.pop(0))


class ScriptedAnswers:
    def __init__(self, script: list[Any]) -> None:
        self._script = script

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in self._script:
            if isinstance(message, BaseException):
                raise message
            yield message

    def cancel(self) -> None: ...


class Context:
    """A fake of Ray Serve's context of a gRPC call."""

    def __init__(self) -> None:
        self.trailing: Any = []
        self.status, self.text = None, ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def set_trailing_metadata(self, pairs: Any) -> None:
        self.trailing = pairs

    def set_code(self, code: Any) -> None:
        self.status = code.name

    def set_details(self, text: str) -> None:
        self.text = text

    def code(self) -> Any:
        return self.status


def ingress(handle: ScriptedHandle, models: tuple[str, ...] = (), **user_config: Any) -> Ingress:
    ingress = Ingress(1 << 20, 1 << 30, list(models), cast("Handle", handle))
    ingress.reconfigure(user_config)
    return ingress


def ask(
    target: Ingress, method: str = "POST", path: str = "/app/predictions/m", **headers: str
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send a request and return the status, headers and body of its answer."""
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "/app",
        "query_string": b"",
        "headers": pairs,
    }
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"model": "b:1.0/ada"}'}

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(target.answer(scope, receive, send))
    return (
        messages[0]["status"],
        dict(messages[0]["headers"]),
        b"".join(message.get("body", b"") for message in messages),
    )


@pytest.mark.parametrize(
    ("method", "user_config"),
    [("GET", {}), ("PUT", {}), ("POST", {"repeat": "all"})],
)
def test_a_repeatable_request_is_retried_on_another_replica(
    method: str, user_config: dict[str, str]
) -> None:
    handle = ScriptedHandle([ActorDiedError()], [ActorDiedError()], [WHOLE_ANSWER])
    assert ask(ingress(handle, **user_config), method)[::2] == (200, b"answer")


def test_an_unrepeatable_request_fails() -> None:
    status, headers, body = ask(ingress(ScriptedHandle([ActorDiedError()])))
    assert (status, headers[b"content-type"]) == (503, b"application/json")
    # With retry-after, a client would repeat a request that may already have run.
    assert b"retry-after" not in headers
    assert "may have run" in json.loads(body)["message"]


def test_a_request_that_loses_several_replicas_is_given_up() -> None:
    status, headers, body = ask(
        ingress(ScriptedHandle(*[[ActorDiedError()] for _ in range(4)])), "GET"
    )
    assert (status, headers[b"retry-after"]) == (503, b"1")
    assert "3 others" in json.loads(body)["message"]


def test_a_partial_answer_is_not_retried_and_closes_the_connection() -> None:
    with pytest.raises(RuntimeError, match="was lost"):
        ask(ingress(ScriptedHandle([HALF_ANSWER, ActorDiedError()])), "GET")


def test_an_event_stream_without_its_replica_ends_with_an_error_event() -> None:
    started_stream = [
        HALF_ANSWER[0] | {"headers": [(b"content-type", b"text/event-stream")]},
        HALF_ANSWER[1],
    ]
    status, _, body = ask(
        ingress(ScriptedHandle([started_stream, ActorDiedError()])), path="/app/v1/chat/completions"
    )
    partial_body, event = body.split(b"\n\ndata: ")
    assert (status, partial_body) == (200, b"half")
    assert "was lost" in json.loads(event)["error"]["message"]


def test_the_error_without_a_replica_has_the_servers_form() -> None:
    status, _, body = ask(ingress(ScriptedHandle([UNAVAILABLE])), path="/app/v2/models/m/infer")
    # The protocol has the field `error`.
    assert (status, "do not start" in json.loads(body)["error"]) == (503, True)


def test_a_canary_without_replicas_gets_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *_: ScriptedHandle([UNAVAILABLE]))
    target = ingress(ScriptedHandle([WHOLE_ANSWER]), canary={"app": "m-canary", "percent": 100})
    assert ask(target)[::2] == (200, b"answer")


def test_the_answer_omits_the_request_id_that_the_proxy_adds() -> None:
    assert b"x-request-id" not in ask(ingress(ScriptedHandle([WHOLE_ANSWER])), x_request_id="1")[1]
    assert b"x-request-id" in ask(ingress(ScriptedHandle([WHOLE_ANSWER])), x_request_id="no id")[1]


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/app/predictions/a", ["a"]),
        ("/app/predictions/b/1.0", ["b"]),
        ("/app/v1/models/a:predict", ["a"]),
        ("/app/v2/models/b/infer", ["b"]),
        ("/app/v2/models/b/ready", ["b"]),
        ("/app/v1/models/a", ["a"]),
        ("/app/v1/models/a:1.0/ada", ["a"]),
        ("/app/v1/embeddings", ["b"]),
        ("/app/a/predict", ["a"]),
        ("/app/predictions/c", []),
        ("/app/predictions/", []),
        ("/app/ping", []),
        ("/app/", []),
        ("/app", []),
    ],
)
def test_a_request_goes_to_the_replica_of_its_model(path: str, model: list[str]) -> None:
    handle = ScriptedHandle([WHOLE_ANSWER])
    ask(ingress(handle, ("a", "b")), path=path)
    assert handle.models == model


def test_the_status_of_a_lost_call_says_if_it_may_be_retried() -> None:
    first_context, second_context = Context(), Context()
    asyncio.run(ingress(ScriptedHandle([ActorDiedError()])).Predictions(b"", first_context))
    assert (first_context.status, "may have run" in first_context.text) == ("UNAVAILABLE", True)
    grpc_answers = [GrpcAnswer(b"answer"), GrpcAnswer(None, metadata=[("x-request-id", "1")])]
    answer = asyncio.run(
        ingress(ScriptedHandle([ActorDiedError()], grpc_answers), repeat="all").Predictions(
            b"", second_context
        )
    )
    assert (answer.SerializeToString(), second_context.status) == (b"answer", None)
    assert second_context.trailing == [("x-request-id", "1")]
