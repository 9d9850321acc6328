"""The handler of LitServe's classes.

Requests, responses and the order of calls are those of LitServe: `decode_request`, `batch`,
`predict`, `unbatch`, `encode_response`. Each method may have an argument `context`, a dict for the
request, or a list of them for a batch. https://lightning.ai/docs/litserve
"""

from __future__ import annotations

import asyncio
import inspect
import io
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request, UploadFile
from pydantic import JsonValue
from starlette.datastructures import FormData, Headers
from starlette.responses import FileResponse, JSONResponse, Response

from tsx_archiver.python_file import PythonFileFacts
from tsx_runtime.errors import PredictionFailed
from tsx_runtime.features.python_files.worker.handler import PythonFileHandler, RequestBatch
from tsx_runtime.features.python_files.worker.reading import BODY, RequestReader
from tsx_runtime.features.python_files.worker.writing import ResponseWriter
from tsx_runtime.worker.codecs.file_content import FileContent
from tsx_runtime.worker.codecs.json_text import EncodedBody
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context

STEPS = ("decode_request", "predict", "encode_response")
BATCH_STEPS = ("batch", "predict", "unbatch")
DEFAULT_TIMEOUT_S = 30.0  # LitServe's


class LitServeHandler(PythonFileHandler):
    """A handler that calls the methods of a `LitAPI`."""

    def _construct(self, target: type, facts: PythonFileFacts) -> Any:
        """Return an object that is prepared as by `LitServer`.

        Raises:
            LoadError: LitServe refuses the object, or it has its own protocol or loop.
        """
        attributes = {"request_timeout": DEFAULT_TIMEOUT_S, **facts.attributes}
        try:
            api: Any = target(**self._context.model_yaml_config.get("init_args") or {})
            for name, value in attributes.items():
                setattr(api, name, value)
            if api.spec is not None or not type(api.loop).__module__.startswith("litserve."):
                raise LoadError(
                    f"{facts.name} has a spec or a loop of its own, but tsx runs none. Remove it. To"
                    " get the API of OpenAI, serve a model of Hugging Face."
                )
            api.pre_setup()
            api.loop.pre_setup(api)
        except ValueError as error:
            raise LoadError(f"{facts.name} cannot be prepared: {error}") from error
        return api

    def _load(self) -> None:
        self._owner.setup(self.device)
        self._owner.device = self.device

    def _prepare(self, name: str) -> bool:
        api = self._owner
        self._methods = {
            step: _method(getattr(api, step), api.enable_async) for step in (*STEPS, *BATCH_STEPS)
        }
        parameter, *_ = inspect.signature(api.decode_request).parameters.values()
        annotation = typing.get_type_hints(api.decode_request, include_extras=True).get(
            parameter.name, Request
        )
        self._reader = LitServeReader(parameter.replace(annotation=annotation))
        result = typing.get_type_hints(api.encode_response, include_extras=True).get("return", Any)
        is_response = inspect.isclass(result) and issubclass(result, Response)
        result = Any if api.stream or is_response else result
        self._writer = writer = LitServeWriter(result, name, nan=self._context.json_nan)
        writer.format_piece = api.format_encoded_response
        self._is_batched = api.max_batch_size > 1
        self._predict = (
            self._answer_async
            if api.enable_async
            else self._answer_batch
            if self._is_batched
            else self._answer
        )
        return bool(api.stream)

    def _answer(self, value: Any) -> Any:
        context: dict[str, Any] = {}
        try:
            for step in STEPS:
                value = self._methods[step](value, context)
            return value
        except HTTPException as error:
            return _refusal(error)

    async def _answer_async(self, value: Any) -> Any:
        context: dict[str, Any] = {}
        try:
            for step in STEPS:
                value = await self._methods[step](value, context)
            return value
        except HTTPException as error:
            return _refusal(error)

    def _answer_batch(self, requests: list[Any]) -> Any:
        methods, contexts = self._methods, [dict[str, Any]() for _ in requests]
        decode, encode = methods["decode_request"], methods["encode_response"]
        try:
            values: Any = list(map(decode, requests, contexts))
            for step in BATCH_STEPS:
                values = methods[step](values, contexts)
            if self._owner.stream:
                return encode(values, contexts)
            return list(map(encode, self._check_length(values, len(requests)), contexts))
        except HTTPException as error:
            if len(requests) > 1:  # The worker tries each request alone.
                raise
            return [_refusal(error)]

    def _write(self, call: RequestBatch, results: list[Any], context: Context) -> list[Any]:
        """Return the responses of the batch, with the statuses of responses of Starlette."""
        for position, result in zip(call.positions, results, strict=True):
            if isinstance(result, Response):
                context.set_response_status(result.status_code, idx=position)
        return super()._write(call, results, context)


class LitServeReader(RequestReader):
    """The reader of requests as LitServe gives them to `decode_request`.

    They are JSON, a `FormData` or an `UploadFile`, or have the annotated type.
    """

    def __init__(self, parameter: inspect.Parameter) -> None:
        kind = parameter.annotation if inspect.isclass(parameter.annotation) else object
        self._takes_file, self._takes_any = issubclass(kind, UploadFile), issubclass(kind, Request)
        if self._takes_file or self._takes_any:
            parameter = parameter.replace(annotation=bytes if self._takes_file else JsonValue)
        super().__init__([parameter], is_batched=False)

    def read(self, row: Any, meta: str, parts: Mapping[str, Any]) -> Any:
        if type(row) is dict and BODY in row:
            row = {BODY: row[BODY]}  # Parameters of the query are ignored.
        elif type(row) is dict and self._takes_any:
            heads = {name: parts.get(name, {}) for name in row}
            return FormData(
                [
                    (name, _field(value, heads[name]))
                    for name, last in row.items()
                    for value in heads[name].get("values", [last])
                ]
            )
        value = super().read(row, meta, parts)
        if not self._takes_file:
            return value
        contents = (row.get(self._name), *row.values())
        files = (content for content in contents if isinstance(content, FileContent))
        return _file(next(files, value), parts.get(self._name, {}))


class LitServeWriter(ResponseWriter):
    """The writer of responses as LitServe sends them.

    Attributes:
        format_piece: Returns a part of a stream as text or bytes.
    """

    stream_type = "text/plain; charset=utf-8"
    format_piece: Callable[[Any], Any]

    def write(self, value: Any) -> EncodedBody:
        """Return a result as JSON, also if it is a text, or a response of Starlette."""
        if not isinstance(value, Response):
            return EncodedBody(self._to_json(self._check(value)))
        body = (
            Path(value.path).read_bytes() if isinstance(value, FileResponse) else bytes(value.body)
        )
        response = EncodedBody(body)
        response.headers = b"".join(
            b"%b: %b\r\n" % header for header in value.raw_headers if header[0] != b"content-length"
        )
        return response

    def write_event(self, value: Any) -> bytes:
        """Return a part of a stream as it is, or as a line of JSON."""
        piece = self.format_piece(value)
        piece = piece.encode() if isinstance(piece, str) else piece
        if not isinstance(piece, bytes):
            raise PredictionFailed(
                f"encode_response yielded {type(piece).__name__}; yield a dict, a pydantic model,"
                " str or bytes."
            )
        return piece


def _method(method: Any, is_async: bool) -> Callable[[Any, Any], Any]:
    """Return a method as a function of its argument and the context, if necessary a coroutine's."""
    takes_context = "context" in inspect.signature(method).parameters

    def call(argument: Any, context: Any) -> Any:
        return method(argument, context=context) if takes_context else method(argument)

    async def call_async(argument: Any, context: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await call(argument, context)
        if inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method):
            return call(argument, context)
        return await asyncio.to_thread(call, argument, context)

    return call_async if is_async else call


def _refusal(error: HTTPException) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def _field(value: Any, head: Mapping[str, str]) -> Any:
    """Return the value of a field of a form, which is a file or a text."""
    return _file(value, head) if isinstance(value, FileContent) else bytes(value).decode()


def _file(content: bytes | bytearray, head: Mapping[str, str]) -> UploadFile:
    return UploadFile(
        io.BytesIO(content),
        size=len(content),
        filename=content.file_name if isinstance(content, FileContent) else None,
        headers=Headers({"content-type": head.get("content-type", "")}),
    )
