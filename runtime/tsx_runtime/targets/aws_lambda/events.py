"""The kinds of Lambda events and the model requests in them: pure functions.

| event                                                   | is                                             |
|---------------------------------------------------------|------------------------------------------------|
| of API Gateway (1.0, 2.0), a function URL, an ALB       | an HTTP request                                |
| `Records` of SQS                                        | a batch of requests                            |
| EventBridge's schedule, or `{"warmup": ...}`            | a warm-up: the model is loaded                 |
| any other event of EventBridge                          | one request, its `detail`                      |
| `{"requests": [...]}`                                   | a batch of requests, each as the next two      |
| `{"body": ..., "headers": {}, "model": ...}`            | one request                                    |
| any other JSON                                          | one request, all of it                         |
| of S3, SNS, Kinesis, DynamoDB, Cognito, a web socket ...| an error that says what to do                  |
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tsx_runtime.errors import BadRequest

JSON = "application/json"
# The keys of a request that is more than its input.
WRAPPING = {"body", "headers", "model", "isBase64Encoded"}
WARMERS = {"serverless-plugin-warmup"}


class ModelRequest(NamedTuple):
    """A request from an event other than HTTP."""

    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    model: str | None = None  # the only one there is


class EventRequest(NamedTuple):
    requests: list[ModelRequest]
    together: bool  # whether a list is to be answered


class UnknownEvent(BadRequest):
    """An event of a service that sends no model requests."""


def is_http(event: Any) -> bool:
    """https://docs.aws.amazon.com/lambda/latest/dg/urls-invocation.html, services-apigateway.html,
    services-alb.html
    """
    context = event.get("requestContext") if isinstance(event, dict) else None
    if not isinstance(context, dict) or "connectionId" in context:
        return False
    return "elb" in context or "http" in context or "httpMethod" in event


def is_sqs(event: Any) -> bool:
    """https://docs.aws.amazon.com/lambda/latest/dg/with-sqs.html"""
    return _source(event) == "aws:sqs"


def is_warm_up(event: Any) -> bool:
    if not isinstance(event, dict):
        return False
    scheduled = (
        event.get("source") == "aws.events" and event.get("detail-type") == "Scheduled Event"
    )
    return scheduled or event.get("source") in WARMERS or bool(event.get("warmup"))


def parse_event(event: Any) -> EventRequest:
    """Of an event that is none of the above.

    Raises UnknownEvent, and BadRequest for one whose parts are not as they should be.
    """
    if isinstance(event, dict):
        _refuse_foreign(event)
        if "detail-type" in event and "detail" in event:
            return EventRequest(
                [ModelRequest(_json(event["detail"]), (("content-type", JSON),))], together=False
            )
        if set(event) == {"requests"} and isinstance(event["requests"], list):
            return EventRequest([_model_request(each) for each in event["requests"]], together=True)
    return EventRequest([_model_request(event)], together=False)


def _model_request(value: Any) -> ModelRequest:
    if not isinstance(value, dict) or "body" not in value or not set(value) <= WRAPPING:
        return ModelRequest(_json(value), (("content-type", JSON),))
    headers = value.get("headers") or {}
    model = value.get("model")
    if not isinstance(headers, dict) or not all(isinstance(text, str) for text in headers.values()):
        raise BadRequest('"headers" of the event must be an object of strings')
    if model is not None and not isinstance(model, str):
        raise BadRequest('"model" of the event must be the name of a model')
    pairs = tuple((name.lower(), text) for name, text in headers.items())
    body, typed = value["body"], any(name == "content-type" for name, _ in pairs)
    if not isinstance(body, str):
        return ModelRequest(
            _json(body), pairs if typed else (*pairs, ("content-type", JSON)), model
        )
    return ModelRequest(
        from_base64(body) if value.get("isBase64Encoded") else body.encode(), pairs, model
    )


def from_base64(text: str) -> bytes:
    """Raises BadRequest."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"the body is marked as base64, but is not: {error}") from error


def message(record: Mapping[str, Any]) -> ModelRequest:
    """A request from an SQS message.

    Attributes are headers; `content-transfer-encoding: base64` marks a binary one. Raises
    BadRequest.
    """
    given = record.get("messageAttributes") or {}
    headers = {
        name.lower(): each["stringValue"]
        for name, each in given.items()
        if isinstance(each.get("stringValue"), str)
    }
    model = headers.pop("tsx-model", None)
    text = record.get("body") or ""
    if headers.pop("content-transfer-encoding", "").lower() == "base64":
        return ModelRequest(from_base64(text), tuple(headers.items()), model)
    headers.setdefault("content-type", JSON if _is_json(text) else "text/plain")
    return ModelRequest(text.encode(), tuple(headers.items()), model)


def result_place(record: Mapping[str, Any]) -> str:
    """Where the message asks for its answer to be sent; empty where it does not say."""
    attribute = (record.get("messageAttributes") or {}).get("tsx-results") or {}
    return str(attribute.get("stringValue") or "").strip()


def ordered_failures(records: Sequence[Mapping[str, Any]], failed: set[str]) -> list[str]:
    """The messages that are to be delivered again.

    In a group of a FIFO queue none may overtake one that failed.
    """
    groups: set[str] = set()
    again = []
    for record in records:
        group = group_of(record)
        if record["messageId"] in failed or group in groups:
            again.append(record["messageId"])
            groups |= {group} - {""}
    return again


def group_of(record: Mapping[str, Any]) -> str:
    """Of a message of a FIFO queue; else empty. (A standard queue may have groups too, without an
    order.)
    """
    is_fifo = str(record.get("eventSourceARN", "")).endswith(".fifo")
    return str((record.get("attributes") or {}).get("MessageGroupId", "")) if is_fifo else ""


def _source(event: Any) -> str:
    records = event.get("Records") if isinstance(event, dict) else None
    if not isinstance(records, list) or not records or not isinstance(records[0], dict):
        return ""
    first = records[0]
    return str(
        first.get("eventSource")
        or first.get("EventSource")
        or ("aws:cloudfront" if "cf" in first else "")
    )


def _refuse_foreign(event: Mapping[str, Any]) -> None:
    what = _source(event)
    if not what and isinstance(event.get("requestContext"), dict):
        what = (
            "a web socket"
            if "connectionId" in event["requestContext"]
            else "a request in an unknown format"
        )
    elif "triggerSource" in event:
        what = "Cognito"
    elif "awslogs" in event:
        what = "CloudWatch Logs"
    if what:
        raise UnknownEvent(
            f"This function does not support events of {what}. It takes HTTP requests (API Gateway,"
            " function URL, ALB), messages of SQS, events of EventBridge, and direct invocations"
            " with a model's input. Send other events through SQS or EventBridge."
        )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
