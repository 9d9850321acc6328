"""The kinds of Lambda events and the model requests in them: pure functions.

| event                                                 | meaning                                  |
|-------------------------------------------------------|------------------------------------------|
| API Gateway (1.0, 2.0), function URL, ALB             | an HTTP request                          |
| `Records` of SQS                                      | a batch of requests                      |
| EventBridge's schedule, or `{"warmup": ...}`          | a warm-up: the model is loaded           |
| any other event of EventBridge                        | one request, its `detail`                |
| `{"requests": [...]}`                                 | a batch of requests, as in the next rows |
| `{"body": ..., "headers": {}, "model": ...}`          | one request                              |
| any other JSON                                        | one request, all of it                   |
| S3, SNS, Kinesis, DynamoDB, Cognito, a web socket ... | an error that says what to do            |
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
REQUEST_KEYS = {"body", "headers", "model", "isBase64Encoded"}
WARMERS = {"serverless-plugin-warmup"}


class ModelRequest(NamedTuple):
    """A request from an event other than HTTP."""

    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    model: str | None = None  # None for the only model


class EventRequest(NamedTuple):
    requests: list[ModelRequest]
    is_list: bool  # whether the answer is a list


class UnknownEvent(BadRequest):
    """An event of a service that sends no model requests."""


def is_http(event: Any) -> bool:
    """Tell whether an event is an HTTP request.

    https://docs.aws.amazon.com/lambda/latest/dg/urls-invocation.html, services-apigateway.html,
    services-alb.html
    """
    context = event.get("requestContext") if isinstance(event, dict) else None
    if not isinstance(context, dict) or "connectionId" in context:
        return False
    return "elb" in context or "http" in context or "httpMethod" in event


def is_sqs(event: Any) -> bool:
    """Tell whether an event comes from SQS.

    https://docs.aws.amazon.com/lambda/latest/dg/with-sqs.html
    """
    return _source(event) == "aws:sqs"


def is_warm_up(event: Any) -> bool:
    if not isinstance(event, dict):
        return False
    scheduled = (
        event.get("source") == "aws.events" and event.get("detail-type") == "Scheduled Event"
    )
    return scheduled or event.get("source") in WARMERS or bool(event.get("warmup"))


def parse_event(event: Any) -> EventRequest:
    """Return the requests of an event that is none of the above.

    Raises:
        UnknownEvent: The event comes from another service.
        BadRequest: A part of the event is invalid.
    """
    if isinstance(event, dict):
        _refuse_foreign(event)
        if "detail-type" in event and "detail" in event:
            return EventRequest(
                [ModelRequest(_json(event["detail"]), (("content-type", JSON),))], is_list=False
            )
        if set(event) == {"requests"} and isinstance(event["requests"], list):
            return EventRequest([_model_request(item) for item in event["requests"]], is_list=True)
    return EventRequest([_model_request(event)], is_list=False)


def _model_request(value: Any) -> ModelRequest:
    if not isinstance(value, dict) or "body" not in value or not set(value) <= REQUEST_KEYS:
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
    """Decode base64.

    Raises:
        BadRequest: The text is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"the body is marked as base64, but is not: {error}") from error


def message(record: Mapping[str, Any]) -> ModelRequest:
    """Return the request in an SQS message.

    Attributes are headers; `content-transfer-encoding: base64` marks a binary body.

    Raises:
        BadRequest: The body is marked as base64 and is not.
    """
    attributes = record.get("messageAttributes") or {}
    headers = {
        name.lower(): attribute["stringValue"]
        for name, attribute in attributes.items()
        if isinstance(attribute.get("stringValue"), str)
    }
    model = headers.pop("tsx-model", None)
    text = record.get("body") or ""
    if headers.pop("content-transfer-encoding", "").lower() == "base64":
        return ModelRequest(from_base64(text), tuple(headers.items()), model)
    headers.setdefault("content-type", JSON if _is_json(text) else "text/plain")
    return ModelRequest(text.encode(), tuple(headers.items()), model)


def result_destination(record: Mapping[str, Any]) -> str:
    """Return the destination that the message names for its answer; empty if it names none."""
    attribute = (record.get("messageAttributes") or {}).get("tsx-results") or {}
    return str(attribute.get("stringValue") or "").strip()


def ordered_failures(records: Sequence[Mapping[str, Any]], failed: set[str]) -> list[str]:
    """Return the messages that must be delivered again.

    In a group of a FIFO queue no message may overtake one that failed.
    """
    groups: set[str] = set()
    redelivered = []
    for record in records:
        group = group_of(record)
        if record["messageId"] in failed or group in groups:
            redelivered.append(record["messageId"])
            groups |= {group} - {""}
    return redelivered


def group_of(record: Mapping[str, Any]) -> str:
    """Return the group of a message in a FIFO queue, or an empty text.

    A standard queue may have groups too, which have no order.
    """
    is_fifo = str(record.get("eventSourceARN", "")).endswith(".fifo")
    return str((record.get("attributes") or {}).get("MessageGroupId", "")) if is_fifo else ""


def _source(event: Any) -> str:
    records = event.get("Records") if isinstance(event, dict) else None
    if not isinstance(records, list) or not records or not isinstance(records[0], dict):
        return ""
    record = records[0]
    return str(
        record.get("eventSource")
        or record.get("EventSource")
        or ("aws:cloudfront" if "cf" in record else "")
    )


def _refuse_foreign(event: Mapping[str, Any]) -> None:
    service = _source(event)
    if not service and isinstance(event.get("requestContext"), dict):
        service = (
            "a web socket"
            if "connectionId" in event["requestContext"]
            else "a request in an unknown format"
        )
    elif "triggerSource" in event:
        service = "Cognito"
    elif "awslogs" in event:
        service = "CloudWatch Logs"
    if service:
        raise UnknownEvent(
            f"This function does not support events of {service}. It takes HTTP requests (API"
            " Gateway, function URL, ALB), messages of SQS, events of EventBridge, and direct"
            " invocations with a model's input. Send other events through SQS or EventBridge."
        )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
