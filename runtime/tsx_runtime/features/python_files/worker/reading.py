"""The conversion of requests to the arguments of a predict function, with validation."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tsx_runtime.errors import shortened
from tsx_runtime.features.python_files.worker.annotations import JSON, adapt, codec_of, typed_dict
from tsx_runtime.features.python_files.worker.schemas import resolve
from tsx_runtime.worker.codecs.requests import FORM_TYPE, content_type_of, is_json
from tsx_runtime.worker.codecs.v2_json import MalformedTensors, read_input
from tsx_runtime.worker.exceptions import form_advice

MAX_ERRORS = 100  # the largest number of errors in a response
MAX_INPUT_CHARS = 1000  # Larger values are not repeated in an error.
# The largest number of characters in all errors of a request, before they are shortened.
MAX_ERRORS_SIZE = 250_000_000
BODY = "body"
# Names of the whole input in calls of TorchServe's gRPC API.
WHOLE_NAMES = (BODY, "data")


class InvalidFields(Exception):
    """The request does not have the types of the function; `errors` are as in FastAPI."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__()
        self.errors = errors


class RequestReader:
    """The reader of the requests of a function.

    Attributes:
        has_several: Whether a request is a dict with the values of several parameters.
        schema: The JSON schema of a request.
        upload_types: The content types, besides JSON, of a request.
    """

    def __init__(self, parameters: Sequence[inspect.Parameter], *, is_batched: bool) -> None:
        self.has_several = len(parameters) > 1
        self.upload_types: tuple[str, ...] = ()
        self.schema: dict[str, Any] = {}
        self._name = parameters[0].name
        self._codecs = {
            parameter.name: codec
            for parameter in parameters
            if (codec := codec_of(parameter.annotation)) is not None
        }
        # Its methods take half the time of those of the TypeAdapter.
        self._validator: Any = None
        annotation, codec = _request_type(parameters, is_batched=is_batched)
        if annotation is not None:
            adapter: TypeAdapter[Any] = TypeAdapter(annotation)
            self.schema = adapter.json_schema(mode="validation")
            # The schema is made first, which builds a validator that pydantic has deferred.
            self._validator = adapter.validator
            _add_defaults(self.schema, parameters)
        root = resolve(self.schema, self.schema)
        self._properties = root.get("properties", {})
        self._is_object = root.get("type") == "object"
        self._has_codec = codec is not None
        self._is_text = codec is None and root.get("type") == "string"
        if codec is not None:
            self.upload_types = codec.upload_types
        elif self._is_text:
            self.upload_types = ("text/plain",)
        elif self._is_object:
            self.upload_types = ("multipart/form-data",)
        # Whether the body is JSON in any case.
        self._is_json = annotation is not None and codec is None and not self._is_text

    def read(self, row: Any, meta: str, parts: Mapping[str, Any]) -> Any:
        """Return the value of a request.

        Args:
            row: The row of the request.
            meta: The head of the request, as in `wire.request_meta`.
            parts: The repeated values of fields, as `{"values": [...]}` by the field's name.

        Raises:
            InvalidFields: The request does not have the types of the function.
        """
        try:
            if type(row) is not dict:
                return self._read_whole(row, meta)
            if len(row) == 1 and BODY in row:
                body = row[BODY]
                if self._is_json and type(body) is bytearray:  # a quick path for most requests
                    return self._validator.validate_json(body)
                return self._read_whole(body, meta)
            if self._validator is None:
                return row
            return self._read_fields(row, meta, parts)
        except ValidationError as error:
            raise InvalidFields(_errors(error, _size_of(row))) from error
        except ValueError as error:
            raise InvalidFields([_error("value_error", [], str(error))]) from error

    def read_tensors(self, tensors: Sequence[Any]) -> Any:
        """Return the value of a request of the Open Inference Protocol in JSON.

        Raises:
            InvalidFields: The request does not have the types of the function.
        """
        try:
            row = {str(tensor["name"]): tensor["data"] for tensor in map(read_input, tensors)}
            if len(row) == 1 and not self._is_object:
                row = {BODY: next(iter(row.values()))}
            return self.read(row, "", {})
        except MalformedTensors as error:
            raise InvalidFields([_error("value_error", ["inputs"], str(error))]) from error

    def _read_whole(self, value: Any, meta: str) -> Any:
        validator = self._validator
        if not isinstance(value, bytes | bytearray):
            value = _fit(value, self.schema) if self._is_json or self._is_text else value
            return value if validator is None else validator.validate_python(value)
        if self._is_json:
            return validator.validate_json(value)
        if self._has_codec:
            return validator.validate_python(bytes(value))
        content_type = content_type_of(meta)
        is_json_type = content_type in (JSON, FORM_TYPE)
        if validator is not None:
            return (
                validator.validate_json(value)
                if is_json_type
                else validator.validate_python(_text(value))
            )
        if is_json_type or (content_type is None and is_json(value)):
            return _ANY.validate_json(value)
        return bytes(value)

    def _read_fields(self, row: Mapping[str, Any], meta: str, parts: Mapping[str, Any]) -> Any:
        """Read the fields of a form, of a query string, or of several tensors."""
        if not self._is_object:
            names = [name for name in (self._name, *WHOLE_NAMES) if name in row]
            if not names and len(row) == 1 and not form_advice(dict(row)):
                names = list(row)
            if not names:
                message = f"Field required.{form_advice(dict(row))}"
                raise InvalidFields([_error("missing", [self._name], message)])
            return self._read_whole(row[names[0]], meta if names[0] == BODY else "")
        wholes = [name for name in WHOLE_NAMES if name in row and name not in self._properties]
        if wholes and len(row) == 1:
            return self._read_whole(row[wholes[0]], "")
        fields = dict(row)
        body = fields.pop(BODY) if BODY in row and BODY not in self._properties else None
        # The first of several tensors is also the body.
        is_tensor = any(fields.get(name) is body for name in self._properties)
        if isinstance(body, bytes | bytearray) and body and not is_tensor:
            if not self.has_several:
                return self._read_whole(body, meta)
            fields = _OBJECT.validate_json(body) | fields
        return self._validator.validate_python(
            {name: self._convert(name, value, parts.get(name)) for name, value in fields.items()}
        )

    def _convert(self, name: str, value: Any, part: Any) -> Any:
        """Convert the value of a field to the type that the schema has for it."""
        if name in self._codecs:
            return bytes(value) if isinstance(value, bytearray) else value
        schema = resolve(self._properties.get(name, {}), self.schema)
        if schema.get("type") == "array" and part is not None and "values" in part:
            items = resolve(schema.get("items", {}), self.schema)
            return [_fit(entry, items) for entry in part["values"]]
        return _fit(value, schema)


_ANY = TypeAdapter[Any](Any)
_OBJECT = TypeAdapter[dict[str, Any]](dict[str, Any])


def _request_type(parameters: Sequence[inspect.Parameter], *, is_batched: bool) -> Any:
    """Return the type of a request, or None without an annotation, and the codec of the type."""
    if len(parameters) > 1:
        fields = {
            parameter.name: Any if parameter.annotation is parameter.empty else parameter.annotation
            for parameter in parameters
        }
        optional = [item.name for item in parameters if item.default is not item.empty]
        kind = typed_dict("Request", fields, optional)
        kind.__pydantic_config__ = ConfigDict(extra="forbid")
        return kind, None
    annotation = parameters[0].annotation
    if is_batched and annotation not in (inspect.Parameter.empty, Any):
        if not issubclass(list, typing.get_origin(annotation) or annotation):
            raise TypeError("the type of batch must be a list, such as list[str]")
        annotation = next(iter(typing.get_args(annotation)), Any)
    if annotation in (inspect.Parameter.empty, Any):
        return None, None
    return adapt(annotation), codec_of(annotation)


def _add_defaults(schema: dict[str, Any], parameters: Sequence[inspect.Parameter]) -> None:
    for parameter in parameters if len(parameters) > 1 else ():
        try:
            json.dumps(parameter.default)
        except (TypeError, ValueError):  # There is no default, or JSON cannot represent it.
            continue
        schema["properties"][parameter.name]["default"] = parameter.default


def _fit(value: Any, schema: Mapping[str, Any]) -> Any:
    """Convert text to the type of a schema, and a tensor of one element to this element."""
    if isinstance(value, bytes | bytearray):
        if schema.get("format") == "binary":
            return bytes(value)
        value = _text(value)
    if isinstance(value, str):
        if schema.get("type") == "string":
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    value = value.tolist() if hasattr(value, "tolist") else value
    if schema.get("type") != "array":
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _text(value: Any) -> str:
    return bytes(value).decode(errors="replace")


def _size_of(row: Any) -> int:
    """Return the approximate number of characters in a request."""
    fields = row.items() if isinstance(row, Mapping) else [("", row)]
    return sum(
        len(name) + (len(value) if hasattr(value, "__len__") else 1) for name, value in fields
    )


def _errors(error: ValidationError, size: int) -> list[dict[str, Any]]:
    """Return pydantic's errors in FastAPI's format.

    Each of pydantic's errors may contain the whole request, whose approximate size is `size`.
    """
    count = error.error_count()
    if count * size > MAX_ERRORS_SIZE:
        return [
            _error(
                "too_many_errors", [], f"The request has {count} errors; a shorter one lists them."
            )
        ]
    errors = []
    for fault in error.errors(include_url=False, include_context=False)[:MAX_ERRORS]:
        location = [_short(part) if isinstance(part, str) else part for part in fault["loc"]]
        entry: dict[str, Any] = {**fault, "loc": [BODY, *location], "msg": _short(fault["msg"])}
        try:
            is_short = len(json.dumps(entry["input"], allow_nan=False)) <= MAX_INPUT_CHARS
        # It is not JSON, for example an upload or NaN.
        except (TypeError, ValueError, RecursionError):
            is_short = False
        if not is_short:
            del entry["input"]
        errors.append(entry)
    return errors


def _error(kind: str, location: list[str], message: str) -> dict[str, Any]:
    return {"type": kind, "loc": [BODY, *location], "msg": _short(message), "input": None}


def _short(text: str) -> str:
    return shortened(text, MAX_INPUT_CHARS)
