"""Code that the management routes share: parameters from a query string or a JSON body, and JSON
answers.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from tsx_archiver import load_json
from tsx_runtime.api.management.schemas import dump_json
from tsx_runtime.api.management.service import MAX_VALUES
from tsx_runtime.api.messages import read_body
from tsx_runtime.errors import BadRequest, PayloadTooLarge


async def read_given(request: Request, limit: int) -> dict[str, Any]:
    """The query string's parameters, of each its first, and over them the keys of a JSON body.

    Raises BadRequest.
    """
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, value)
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        == "application/json"
    ):
        given |= _json_object(await _read(request, limit), limit)
    return given


async def read_object(request: Request, limit: int, example: str) -> dict[str, Any]:
    """A JSON body, of whatever type it says to be. Raises BadRequest, also where there is none."""
    body = await _read(request, limit)
    if not body.strip():
        raise BadRequest(f"The request has no body. It takes a JSON object such as {example}.")
    return _json_object(body, limit, example)


async def _read(request: Request, limit: int) -> bytes:
    try:
        return await read_body(request.scope, request.receive, limit)
    except PayloadTooLarge as error:
        text = (
            f"A body of the management API may have at most {limit} bytes, the smaller of 1 MiB and"
            " max_request_size. Send less."
        )
        raise PayloadTooLarge(text, more=error.more) from None


def json_answer(model: BaseModel, code: int = 200) -> Response:
    """With a newline at the end, as TorchServe's."""
    return Response(dump_json(model) + "\n", code, media_type="application/json")


def _json_object(body: bytes, limit: int, example: str = '{"url": "digits.mar"}') -> dict[str, Any]:
    try:
        given = load_json(body, most_bytes=limit, most_values=MAX_VALUES) if body.strip() else {}
    except ValueError as error:
        raise BadRequest(f"The request's body is not JSON that can be read: {error}.") from error
    if not isinstance(given, dict):
        raise BadRequest(f"The request's body must be a JSON object such as {example}.")
    return given
