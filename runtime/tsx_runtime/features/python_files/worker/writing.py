"""The conversion of a predict function's results to responses."""

from __future__ import annotations

import inspect
import json
import typing
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from tsx_runtime.errors import PredictionFailed
from tsx_runtime.features.python_files.worker.annotations import JSON, adapt, codec_of
from tsx_runtime.worker.codecs.json_text import LITERAL, NULL, STRING, EncodedBody
from tsx_runtime.worker.codecs.v2_json import output_tensor
from tsx_runtime.worker.handler_api.context import Context

EVENTS = "text/event-stream"
OUTPUT = "output"  # the name of a result without names, as a tensor
_INF_NAN_MODES: Any = {NULL: "null", STRING: "strings", LITERAL: "constants"}


class ResponseWriter:
    """The writer of the results of a function.

    Attributes:
        schema: The JSON schema of a result, or of a part of a stream.
        content_type: The content type of a response.
        stream_type: The content type of a stream.
    """

    stream_type = EVENTS

    def __init__(self, annotation: Any, name: str, *, nan: str) -> None:
        """Prepare the writing of results of a type.

        Args:
            annotation: The type; `inspect.Signature.empty` if it is not annotated.
            name: The name of the function, for messages.
            nan: How NaN is written, as in the setting `json_nan`.
        """
        self.schema: dict[str, Any] = {}
        self.content_type = JSON
        self._name, self._nan = name, nan
        self._codec = codec_of(annotation)
        # Their methods take half the time of those of the TypeAdapter.
        self._validator: Any = None
        self._serializer: Any = None
        if annotation not in (inspect.Signature.empty, Any):
            adapter: TypeAdapter[Any] = TypeAdapter(adapt(annotation))
            self.schema = adapter.json_schema(mode="serialization")
            # The schema is made first, which builds a validator that pydantic has deferred.
            self._validator, self._serializer = adapter.validator, adapter.serializer
        if self._codec is not None and self._codec.encode is not None:
            self.content_type = self._codec.upload_types[0].replace("*", "png")
        elif annotation is str:
            self.content_type = "text/plain; charset=utf-8"
        kinds = ("object", "array", "number", "integer", "boolean")
        self._is_json = self.content_type == JSON and self.schema.get("type") in kinds

    def write(self, value: Any) -> Any:
        """Return a result as a response.

        Raises:
            PredictionFailed: The value does not have the annotated type.
        """
        if self._is_json:  # a quick path for most results
            return EncodedBody(self._to_json(self._check(value)))
        value = self._check(value)
        if isinstance(value, str):
            return EncodedBody.of(value.encode(), "text/plain; charset=utf-8")
        if self._codec is not None and self._codec.encode is not None:
            return self._codec.encode(value)
        if self._validator is None and isinstance(value, bytes | bytearray):
            return value
        return EncodedBody(self._to_json(value))

    def write_json(self, value: Any) -> bytes:
        """Return a result as JSON, also text and images."""
        return self._to_json(self._check(value))

    def write_event(self, value: Any) -> bytes:
        """Return a part of a stream as a server-sent event.

        https://html.spec.whatwg.org/multipage/server-sent-events.html
        """
        value = self._check(value)
        text = value if isinstance(value, str) else self._to_json(value).decode()
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return "".join([*(f"data: {line}\n" for line in lines), "\n"]).encode()

    def write_tensors(self, value: Any, context: Context, request_id: str | None) -> EncodedBody:
        """Return a result as a response of the Open Inference Protocol in JSON."""
        outputs = [output_tensor(name, field) for name, field in self._fields(value).items()]
        response = {
            "model_name": context.model_name,
            "model_version": (context.manifest.get("model") or {}).get("modelVersion"),
            "id": request_id,
            "outputs": outputs,
        }
        body = {name: field for name, field in response.items() if field is not None}
        return EncodedBody(to_json(body, inf_nan_mode=_INF_NAN_MODES[self._nan]))

    def as_arrays(self, value: Any) -> dict[str, Any]:
        """Return a result as the arrays of a response of the protocol's binary form."""
        import numpy as np  # Only requests in this form need it.

        return {name: np.atleast_1d(field) for name, field in self._fields(value).items()}

    def _fields(self, value: Any) -> dict[str, Any]:
        """Return the fields of an object, or the only output; nested values become JSON."""
        value = self._check(value)
        if not hasattr(value, "dtype"):
            value = json.loads(self._to_json(value))
        fields = value if isinstance(value, dict) else {OUTPUT: value}
        return {
            name: json.dumps(field) if _has_dict(field) else field
            for name, field in fields.items()
            if field is not None
        }

    def _check(self, value: Any) -> Any:
        if self._validator is None:
            return value
        try:
            return self._validator.validate_python(value)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            location = ".".join(map(str, fault["loc"]))
            raise PredictionFailed(
                f"{self._name} returned {type(value).__name__}, which does not have the annotated"
                f" type: {location + ': ' if location else ''}{fault['msg']}."
            ) from error

    def _to_json(self, value: Any) -> bytes:
        try:
            if self._serializer is not None and self._nan == NULL:
                json_body: bytes = self._serializer.to_json(value, by_alias=True, fallback=_plain)
                return json_body
            if self._serializer is not None:
                value = self._serializer.to_python(
                    value, mode="json", by_alias=True, fallback=_plain
                )
            return to_json(value, inf_nan_mode=_INF_NAN_MODES[self._nan], fallback=_plain)
        except (ValueError, TypeError, RecursionError) as error:
            raise PredictionFailed(f"The result of {self._name} is not JSON: {error}") from error


def item_type(annotation: Any, *, is_batched: bool, streams: bool) -> Any:
    """Return the type of one result from the annotation of a function's results.

    Args:
        annotation: The annotation.
        is_batched: Whether the function returns a list with a result for each request.
        streams: Whether the function returns an iterator of such results.
    """
    for _ in range(streams + is_batched):
        arguments = typing.get_args(annotation)
        annotation = arguments[0] if arguments else inspect.Signature.empty
    return annotation


def _has_dict(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_dict, value)))


def _plain(value: Any) -> Any:
    """Return a value that pydantic does not know as JSON; arrays and tensors become lists."""
    codec = codec_of(type(value))
    if codec is not None:
        return codec.write(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
