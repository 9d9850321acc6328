"""Pydantic models of JSON bodies.

The module validates bodies, declares field types that several formats share, and words the error
for an invalid field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tsx_runtime.worker.exceptions import InvalidInput

JsonObject: TypeAlias = dict[str, Any]

MAX_STOPS = 16
MAX_TOKENS = 1 << 31

StringT = TypeVar("StringT", bound=str)

wrap_text_in_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Seed: TypeAlias = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None
Stops: TypeAlias = Annotated[list[StringT], wrap_text_in_list, Field(max_length=MAX_STOPS)]
TokenCount: TypeAlias = Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None


class RefusedField(InvalidInput):
    """The error for a field of a request that is invalid or not supported."""

    def __init__(
        self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.error_code = status


class BodyObject(BaseModel):
    """A JSON object in a body. A field that is null counts as missing, as in OpenAI's API."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, body: Any) -> Any:
        return (
            {name: value for name, value in body.items() if value is not None}
            if isinstance(body, dict)
            else body
        )


BodyT = TypeVar("BodyT", bound=BodyObject)


def validate_body(kind: type[BodyT], body: Any) -> BodyT:
    """Validate a body.

    Args:
        kind: The class of the object.
        body: The body as a handler gets it: bytes, text or parsed JSON.

    Raises:
        RefusedField: A field is wrong.
    """
    try:
        if isinstance(body, bytes | bytearray | memoryview | str):
            return kind.model_validate_json(body if isinstance(body, str) else bytes(body))
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RefusedField:
    detail = error.errors(include_url=False)[0]
    reason, path = describe_requirement(detail), ""
    for step in detail["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    if not path:
        return RefusedField(
            f"The body cannot be read: {reason}. Send a JSON object with the header Content-Type:"
            " application/json."
        )
    if detail["type"] == "extra_forbidden":
        return unsupported_field_error(path)
    if detail["type"] == "missing":
        return RefusedField(
            f"The field '{path}' is missing. Send it.", path, code="missing_required_parameter"
        )
    return RefusedField(
        f"The field '{path}' is {quote_value(detail['input'])}: {reason}.",
        path,
        code="invalid_value",
    )


def unsupported_field_error(path: str) -> RefusedField:
    """Return the error for a field that exists in the API but is not supported here."""
    return RefusedField(
        f"The field '{path}' is not supported here. Send the request without it.",
        path,
        code="unsupported_parameter",
    )


def describe_requirement(error: Mapping[str, Any]) -> str:
    """Return the requirement of a pydantic error, to be put after the quoted value."""
    return re.sub(r"^[A-Z]\w+ should", "it must", error["msg"].removeprefix("Value error, "))


def quote_value(value: Any) -> str:
    """Return a value as JSON for an error message, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."
