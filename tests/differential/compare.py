"""The comparison of two answers, without what differs between runs of one server."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.differential.pair import Seen

OF_THE_CONNECTION = {"date", "server", "connection", "keep-alive", "transfer-encoding"}
# Headers that are compared if there is no body.
OF_THE_BODY = {"content-length"}
OF_ONE_WORKER = {"id", "startTime", "memoryUsage", "pid", "gpuUsage"}
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def differences(theirs: Seen, ours: Seen) -> dict[str, tuple[Any, Any]]:
    """Return both values of each part that differs.

    The parts are `status`, `body`, `body.FIELD` of JSON objects, and `header NAME`.
    """
    different: dict[str, tuple[Any, Any]] = {}
    if theirs.status != ours.status:
        different["status"] = (theirs.status, ours.status)
    their_body, our_body = steady_body(theirs.body), steady_body(ours.body)
    if isinstance(their_body, dict) and isinstance(our_body, dict):
        for key in sorted({*their_body, *our_body}):
            if their_body.get(key) != our_body.get(key):
                different[f"body.{key}"] = (their_body.get(key), our_body.get(key))
    elif their_body != our_body:
        different["body"] = (their_body, our_body)
    their_headers, our_headers = steady_headers(theirs), steady_headers(ours)
    for name in sorted({*their_headers, *our_headers}):
        if their_headers.get(name) != our_headers.get(name):
            different[f"header {name}"] = (their_headers.get(name), our_headers.get(name))
    return different


def steady_headers(seen: Seen) -> dict[str, str]:
    headers = {
        name: value
        for name, value in seen.headers.items()
        if name not in OF_THE_CONNECTION | OF_THE_BODY
    }
    if UUID.fullmatch(headers.get("x-request-id", "")):
        headers["x-request-id"] = "a uuid"
    return headers


def steady_body(body: bytes) -> Any:
    """Parse JSON, since its spaces and the order of its keys do not matter."""
    try:
        return steady(json.loads(body))
    except ValueError:
        return body


def steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: type(item).__name__ if key in OF_ONE_WORKER else steady(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [steady(item) for item in value]
    return value
