"""Pure functions that classify Lambda events and parse the model requests in them.

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
# keys of a request that has more than a body
REQUEST_KEYS = {"body", "headers", "model", "isBase64Encoded"}
WARM_UP_SOURCES = {"serverless-plugin-warmup"}


class ModelRequest(NamedTuple):
    """A request for a model, from an event that is not an HTTP request."""

    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    model: str | None = None  # None means the only model


class EventRequest(NamedTuple):
    requests: list[ModelRequest]
    is_list: bool  # whether the answers are returned as a list


class UnknownEvent(BadRequest):
    """An event of a service that does not send requests for models."""


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
    is_scheduled = (
        event.get("source") == "aws.events" and event.get("detail-type") == "Scheduled Event"
    )
    return is_scheduled or event.get("source") in WARM_UP_SOURCES or bool(event.get("warmup"))


def parse_event(event: Any) -> EventRequest:
    """Return the requests in an event that is not HTTP, SQS or a warm-up.

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
    body, has_content_type = value["body"], any(name == "content-type" for name, _ in pairs)
    if not isinstance(body, str):
        return ModelRequest(
            _json(body), pairs if has_content_type else (*pairs, ("content-type", JSON)), model
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


def parse_message(record: Mapping[str, Any]) -> ModelRequest:
    """Return the request in an SQS message.

    The message's attributes become headers. The attribute `content-transfer-encoding: base64` marks
    a binary body.

    Raises:
        BadRequest: The body is marked as base64, but is not.
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
    """Return the destination in a message's attribute, or an empty string without it."""
    attribute = (record.get("messageAttributes") or {}).get("tsx-results") or {}
    return str(attribute.get("stringValue") or "").strip()


def ordered_failures(records: Sequence[Mapping[str, Any]], failed_ids: set[str]) -> list[str]:
    """Return the ids of all messages that must be delivered again.

    In a FIFO queue, these include the later messages of a failed message's group.
    """
    groups: set[str] = set()
    redelivered_ids = []
    for record in records:
        group = group_of(record)
        if record["messageId"] in failed_ids or group in groups:
            redelivered_ids.append(record["messageId"])
            groups |= {group} - {""}
    return redelivered_ids


def group_of(record: Mapping[str, Any]) -> str:
    """Return the group of a FIFO queue's message; for a standard queue an empty string.

    A standard queue may have groups too, but they have no order.
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
