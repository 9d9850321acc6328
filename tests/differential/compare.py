"""The comparison of two responses, without values that differ in every run."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.differential.pair import ServerResponse

CONNECTION_HEADERS = {"date", "server", "connection", "keep-alive", "transfer-encoding"}
# Headers that are compared if there is no body.
BODY_HEADERS = {"content-length"}
VARYING_WORKER_FIELDS = {"id", "startTime", "memoryUsage", "pid", "gpuUsage"}
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def differences(theirs: ServerResponse, ours: ServerResponse) -> dict[str, tuple[Any, Any]]:
    """Return both values of each part that differs.

    The parts are `status`, `body`, `body.FIELD` of JSON objects, and `header NAME`.
    """
    differing_parts: dict[str, tuple[Any, Any]] = {}
    if theirs.status != ours.status:
        differing_parts["status"] = (theirs.status, ours.status)
    their_body, our_body = stable_body(theirs.body), stable_body(ours.body)
    if isinstance(their_body, dict) and isinstance(our_body, dict):
        for key in sorted({*their_body, *our_body}):
            if their_body.get(key) != our_body.get(key):
                differing_parts[f"body.{key}"] = (their_body.get(key), our_body.get(key))
    elif their_body != our_body:
        differing_parts["body"] = (their_body, our_body)
    their_headers, our_headers = stable_headers(theirs), stable_headers(ours)
    for name in sorted({*their_headers, *our_headers}):
        if their_headers.get(name) != our_headers.get(name):
            differing_parts[f"header {name}"] = (their_headers.get(name), our_headers.get(name))
    return differing_parts


def stable_headers(response: ServerResponse) -> dict[str, str]:
    headers = {
        name: value
        for name, value in response.headers.items()
        if name not in CONNECTION_HEADERS | BODY_HEADERS
    }
    if UUID.fullmatch(headers.get("x-request-id", "")):
        headers["x-request-id"] = "a uuid"
    return headers


def stable_body(body: bytes) -> Any:
    """Parse JSON, since its spaces and the order of its keys do not matter."""
    try:
        return stable_value(json.loads(body))
    except ValueError:
        return body


def stable_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: type(item).__name__ if key in VARYING_WORKER_FIELDS else stable_value(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [stable_value(item) for item in value]
    return value
