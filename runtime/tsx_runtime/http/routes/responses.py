"""Functions for management routes that read parameters and build JSON responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from tsx_archiver import load_json
from tsx_runtime.api.management.schemas import dump_json
from tsx_runtime.api.management.service import MAX_VALUES
from tsx_runtime.api.messages import read_body
from tsx_runtime.errors import BadRequest, PayloadTooLarge
from tsx_runtime.settings.traffic_policy import Traffic


async def read_parameters(request: Request, limit: int) -> dict[str, Any]:
    """Read parameters from the query string and from a JSON body, which has precedence.

    If a query parameter is repeated, its first value counts.

    Raises:
        BadRequest: The body is not a JSON object.
    """
    parameters: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        parameters.setdefault(name, value)
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        == "application/json"
    ):
        parameters |= _json_object(await read_limited(request, limit), limit)
    return parameters


async def read_object(request: Request, limit: int, example: str) -> dict[str, Any]:
    """Read a JSON body, whatever its content type is.

    Raises:
        BadRequest: The body is empty or not a JSON object; the message shows `example`.
    """
    body = await read_limited(request, limit)
    if not body.strip():
        raise BadRequest(f"The request has no body. It takes a JSON object such as {example}.")
    return _json_object(body, limit, example)


async def read_limited(
    request: Request, limit: int, kind: str = "A body of the management API", cap: str = "1 MiB"
) -> bytes:
    """Read a body of at most `limit` bytes, the smaller of `cap` and max_request_size.

    Raises:
        PayloadTooLarge: It is larger; `kind` names it in the message.
    """
    try:
        return await read_body(request.scope, request.receive, limit)
    except PayloadTooLarge as error:
        text = (
            f"{kind} may have at most {limit} bytes, the smaller of {cap} and max_request_size."
            " Send less."
        )
        raise PayloadTooLarge(text, more=error.more) from None


def json_answer(model: BaseModel, status: int = 200) -> Response:
    """Return a JSON response that ends with a newline, as in TorchServe."""
    return Response(dump_json(model) + "\n", status, media_type="application/json")


def parse_policy(parse: Callable[[], Traffic]) -> Traffic:
    """Return the policy that `parse` returns.

    Raises:
        BadRequest: The policy is invalid.
    """
    try:
        return parse()
    except ValueError as error:
        text = str(error)
        raise BadRequest(text if text.endswith("?") else f"{text}.") from error


def _json_object(body: bytes, limit: int, example: str = '{"url": "digits.mar"}') -> dict[str, Any]:
    try:
        value = load_json(body, most_bytes=limit, most_values=MAX_VALUES) if body.strip() else {}
    except ValueError as error:
        raise BadRequest(f"The request's body is not JSON that can be read: {error}.") from error
    if not isinstance(value, dict):
        raise BadRequest(f"The request's body must be a JSON object such as {example}.")
    return value
