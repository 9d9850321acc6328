"""The handler that calls the function or class of a Python file."""

from __future__ import annotations

import inspect
import json
import logging
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
)
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import PydanticSchemaGenerationError, PydanticUserError

from tsx_archiver.metadata.manifest import Manifest
from tsx_archiver.python_file import BATCH, METHOD, PythonFileFacts, read_facts
from tsx_runtime.errors import PredictionFailed
from tsx_runtime.features.python_files.worker.examples import example_of
from tsx_runtime.features.python_files.worker.reading import InvalidFields, RequestReader
from tsx_runtime.features.python_files.worker.writing import ResponseWriter, item_type
from tsx_runtime.worker.codecs.json_text import EncodedBody, JsonText
from tsx_runtime.worker.codecs.v2_binary import OutputRequest
from tsx_runtime.worker.exceptions import (
    BadRows,
    InvalidInput,
    LoadError,
    PredictionException,
    describe_error,
)
from tsx_runtime.worker.handler_api.context import BatchState, Context
from tsx_runtime.worker.handler_api.loader import import_file, own_file

UNPROCESSABLE = 422
_ITERATORS = (Iterator, Generator, AsyncIterator, AsyncGenerator)

logger = logging.getLogger("tsx.worker")

NO_PARTS: Mapping[str, Any] = {}
STREAMED = object()  # the result of a request whose response was streamed


class RequestBatch(NamedTuple):
    """The valid requests of a batch.

    Attributes:
        positions: Their positions in the batch.
        values: Their values.
        responses: The responses of the batch so far, which are those of invalid requests.
        tensor_ids: The ids of requests of the Open Inference Protocol in JSON, by position.
        parts: The headers of forms' fields, or the requested tensors, by position.
    """

    positions: list[int]
    values: list[Any]
    responses: list[Any]
    tensor_ids: dict[int, str | None]
    parts: Mapping[int, Any]


class PythonFileHandler:
    """A handler whose requests and responses have the types of a function in a Python file.

    The file has a function `predict`, or a class with a method `predict`. The function takes one
    request, or a list of requests if its parameter is called `batch`. It returns a value for each
    request, or yields the parts of a stream. `load(device)`, next to it, loads the model.

    Attributes:
        device: The device for the model, such as `cuda:0`.
        signature: The types of requests and responses, as `ModelSignature`.
    """

    takes_raw_bodies = takes_repeated_fields = True
    own_envelopes = ("body", "kservev2")  # They change nothing.

    def __init__(self) -> None:
        self.device = "cpu"
        self.form: str | None = None
        self.forms_passed_over: tuple[str, ...] = ()
        self.precision: str | None = None
        self.signature: dict[str, Any] | None = None
        self._context: Context
        self._owner: Any = None  # the object, or the module of a function
        self._predict: Callable[..., Any]
        self._reader: RequestReader
        self._writer: ResponseWriter
        self._is_batched = self._is_async = False

    @property
    def model(self) -> Any:
        """The model that `load` has stored as `self.model`, or as a global variable `model`."""
        return getattr(self._owner, "model", None)

    @model.setter
    def model(self, model: Any) -> None:
        self._owner.model = model

    def initialize(self, context: Context) -> Any:
        """Import the file and load the model; return a coroutine if `load` is one.

        Raises:
            LoadError: The file has no such class or function, or its types cannot be used.
        """
        self._context = context
        properties = context.system_properties
        directory, gpu = Path(properties["model_dir"]), properties.get("gpu_id")
        if gpu is not None:
            from tsx_runtime.worker.handlers.base import choose_device  # It imports torch.

            self.device = str(choose_device(gpu))
        facts = read_facts(Manifest(context.manifest))
        module = import_file(own_file(directory / facts.file, directory), "File")
        target = getattr(module, facts.name, None)
        if target is None:
            raise LoadError(f"{facts.file} has no {facts.name}. Pack it again.")
        if inspect.isclass(target):
            self._owner = self._construct(target, facts)
            self._predict, name = getattr(self._owner, METHOD), f"{facts.name}.{METHOD}"
        else:
            self._owner, self._predict, name = module, target, facts.name
        self._read_types(name)
        self._is_async = inspect.isasyncgenfunction(self._predict) or inspect.iscoroutinefunction(
            self._predict
        )
        loading = self._load()
        if inspect.isawaitable(loading):
            return self._finish_loading(loading)
        self._apply_config()
        return None

    def _construct(self, target: type, facts: PythonFileFacts) -> Any:
        """Return an object of the class."""
        return target()

    def _load(self) -> Any:
        """Load the model; return a coroutine if `load` is one."""
        load = getattr(self._owner, "load", None)
        if load is None:
            return None
        return load(self.device) if inspect.signature(load).parameters else load()

    async def _finish_loading(self, loading: Any) -> None:
        await loading
        self._apply_config()

    def _read_types(self, name: str) -> None:
        """Prepare the reading of requests and the writing of results, and describe them."""
        try:
            streams = self._prepare(name)
        except (NameError, TypeError, PydanticSchemaGenerationError, PydanticUserError) as error:
            raise LoadError(f"The annotations of {name} cannot be used: {error}") from error
        documentation = inspect.getdoc(self._predict) or inspect.getdoc(self._owner) or ""
        self.signature = self._describe(documentation, streams=streams)

    def _describe(self, documentation: str, *, streams: bool = False) -> dict[str, Any]:
        """Return the signature."""
        return {
            "input": self._reader.schema,
            "output": self._writer.schema,
            "description": documentation,
            "content_types": ["application/json", *self._reader.upload_types],
            "output_type": self._writer.stream_type if streams else self._writer.content_type,
            "streams": streams,
            "example": example_of(self._reader.schema),
        }

    def _prepare(self, name: str) -> bool:
        """Prepare the reading of requests and the writing of results.

        Returns:
            Whether a response is a stream.
        """
        hints = typing.get_type_hints(self._predict, include_extras=True)
        signature = inspect.signature(self._predict)
        parameters = [
            parameter.replace(annotation=hints.get(parameter.name, parameter.empty))
            for parameter in signature.parameters.values()
        ]
        kinds = inspect.Parameter
        refused = kinds.POSITIONAL_ONLY if len(parameters) > 1 else kinds.KEYWORD_ONLY
        if not parameters or any(
            parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD, refused)
            for parameter in parameters
        ):
            raise LoadError(
                f"{name} must have one parameter for a request, or several with names;"
                f" it is {name}{signature}."
            )
        self._is_batched = [parameter.name for parameter in parameters] == [BATCH]
        result = hints.get("return", inspect.Signature.empty)
        streams = (
            inspect.isgeneratorfunction(self._predict)
            or inspect.isasyncgenfunction(self._predict)
            or typing.get_origin(result) in _ITERATORS
        )
        self._reader = RequestReader(parameters, is_batched=self._is_batched)
        result = item_type(result, is_batched=self._is_batched, streams=streams)
        self._writer = ResponseWriter(result, name, nan=self._context.json_nan)
        return streams

    def _apply_config(self) -> None:
        """Apply `precision`, `forms` and `pt2` of the configuration to the model."""
        config = self._context.model_yaml_config
        model = self.model
        if model is None or not any(config.get(key) for key in ("precision", "forms", "pt2")):
            return
        from tsx_runtime.worker.handlers.base import BaseHandler  # It imports torch.

        base = BaseHandler()
        base.context, base.device = self._context, self.device
        self.model = base.in_form(lambda: model)
        self.form, self.precision = base.form, base.precision
        self.forms_passed_over = base.forms_passed_over

    def handle(self, data: list[Any], context: Context) -> Any:
        """Return the responses to a batch; for an asynchronous function, a coroutine."""
        state = context.state()
        # A quick check before the headers are parsed.
        if len(data) == 1 and ": True\r\n" in state.metas[0]:
            if context.get_request_header(0, "describe") == "True":
                return [self.signature]
            if context.get_request_header(0, "explain") == "True":
                raise InvalidInput(f"{context.model_name} has no explanations, only predictions.")
        call = self._read(data, state, context)
        if self._is_async:
            return self._handle_async(call, context)
        return self._write(call, self._run(call, context), context)

    async def _handle_async(self, call: RequestBatch, context: Context) -> list[Any]:
        return self._write(call, await self._run_async(call, context), context)

    def _read(self, data: list[Any], state: BatchState, context: Context) -> RequestBatch:
        """Read the requests, and make the responses to invalid ones."""
        positions: list[int] = []
        values: list[Any] = []
        responses: list[Any] = [None] * len(data)
        faults: dict[int, str] = {}
        metas, parts = state.metas, state.parts or {}
        if context.envelope:  # A request may have any number of rows in it.
            metas, parts = [""] * len(data), {}
        call = RequestBatch(positions, values, responses, {}, parts)
        read = self._reader.read
        for position, row in enumerate(data):
            try:
                body = row.get("body") if type(row) is dict else None
                if type(body) is bytearray and b'"datatype"' in body:
                    value = self._read_tensors(row, metas[position], position, call)
                else:
                    value = read(row, metas[position], parts.get(position, NO_PARTS))
            except InvalidFields as error:
                faults[position] = json.dumps({"detail": error.errors})
                continue
            # The file's own validators may raise anything.
            except Exception as error:
                if context.envelope:
                    raise
                responses[position] = _failed(error)
                continue
            positions.append(position)
            values.append(value)
        if faults and context.envelope:
            raise BadRows(faults, UNPROCESSABLE)
        for position, fault in faults.items():
            context.set_response_status(UNPROCESSABLE, idx=position)
            responses[position] = EncodedBody(fault.encode())
        return call

    def _read_tensors(self, row: Any, head: str, position: int, call: RequestBatch) -> Any:
        """Read a request that is probably one of the Open Inference Protocol in JSON."""
        try:
            document = json.loads(row["body"])
            tensors, request_id = document["inputs"], document.get("id")
            is_protocol = all("datatype" in tensor and "shape" in tensor for tensor in tensors)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_protocol = False
        if not is_protocol:
            return self._reader.read(row, head, {})
        call.tensor_ids[position] = request_id if isinstance(request_id, str) else None
        return self._reader.read_tensors(tensors)

    def _run(self, call: RequestBatch, context: Context) -> list[Any]:
        """Return the results of the valid requests; STREAMED for a response that was streamed."""
        try:
            if not self._is_batched:
                return [
                    self._stream(result, [position], context)
                    if inspect.isgenerator(result)
                    else result
                    for position, value in zip(call.positions, call.values, strict=True)
                    for result in (self._call(value),)
                ]
            results = self._predict(call.values) if call.values else []
            if inspect.isgenerator(results):
                return [self._stream(results, call.positions, context)] * len(call.values)
            return self._check_length(results, len(call.values))
        except Exception as error:
            _raise_status(error)
            raise

    async def _run_async(self, call: RequestBatch, context: Context) -> list[Any]:
        try:
            if not self._is_batched:
                return [
                    await self._result(self._call(value), [position], context)
                    for position, value in zip(call.positions, call.values, strict=True)
                ]
            if not call.values:
                return []
            results = await self._result(self._predict(call.values), call.positions, context)
            if results is STREAMED:
                return [STREAMED] * len(call.values)
            return self._check_length(results, len(call.values))
        except Exception as error:
            _raise_status(error)
            raise

    def _call(self, value: Any) -> Any:
        return self._predict(**value) if self._reader.has_several else self._predict(value)

    async def _result(self, result: Any, positions: list[int], context: Context) -> Any:
        if inspect.isawaitable(result):
            result = await result
        if inspect.isgenerator(result):
            return self._stream(result, positions, context)
        if not inspect.isasyncgen(result):
            return result
        send = self._begin_events(positions, context)
        async with aclosing(result):
            async for part in result:
                send(part)
        return STREAMED

    def _stream(self, result: Any, positions: list[int], context: Context) -> Any:
        send = self._begin_events(positions, context)
        with closing(result):
            for part in result:
                send(part)
        return STREAMED

    def _begin_events(self, positions: list[int], context: Context) -> Callable[[Any], None]:
        """Return a function that sends a part of a stream; of a batch, a list of parts."""
        write = self._writer.write_event
        for position in positions:
            context.set_response_content_type(position, self._writer.stream_type)

        def send(part: Any) -> None:
            parts = part if self._is_batched else [part]
            for position, value in zip(positions, parts, strict=True):
                context.send_piece(position, write(value))

        return send

    def _write(self, call: RequestBatch, results: list[Any], context: Context) -> list[Any]:
        """Return the responses of the batch."""
        write, has_tensors = self._writer.write, call.tensor_ids or call.parts
        for position, result in zip(call.positions, results, strict=True):
            try:
                if result is STREAMED:
                    response: Any = b""
                elif context.envelope:
                    response = JsonText(self._writer.write_json(result).decode())
                elif has_tensors and position in call.tensor_ids:
                    request_id = call.tensor_ids[position]
                    response = self._writer.write_tensors(result, context, request_id)
                elif has_tensors and isinstance(call.parts.get(position), OutputRequest):
                    response = self._writer.as_arrays(result)
                else:
                    response = write(result)
            # The methods of a result may raise anything.
            except Exception as error:
                response = _failed(error)
            call.responses[position] = response
        return call.responses

    def _check_length(self, results: Any, expected: int) -> list[Any]:
        """Return the results of a batch as a list.

        Raises:
            PredictionFailed: There is not one result for each request.
        """
        if type(results) is list and len(results) == expected:
            return results
        is_sequence = hasattr(results, "__len__") and not isinstance(results, str | bytes | dict)
        if not is_sequence or len(results) != expected:
            length = f" of length {len(results)}" if is_sequence else ""
            raise PredictionFailed(
                f"{METHOD} must return a list with a result for each of the {expected} requests of"
                f" its batch; it returned {type(results).__name__}{length}."
            )
        return list(results)


def _failed(error: Exception) -> PredictionFailed:
    """Return the error for a single request, so that the others of its batch do not fail.

    Raises:
        MemoryError, RuntimeError: The machine or the device has failed, not only the request. An
            error of CUDA often appears when a result is read from the device.
    """
    text = describe_error(error)
    if isinstance(error, MemoryError):
        raise error
    if "CUDA" in text:  # pydantic wraps the original error.
        raise RuntimeError(text) from error
    if isinstance(error, PredictionFailed):
        return error
    logger.error("a request or its result has failed", exc_info=error)
    return PredictionFailed(f"Prediction failed: {text}")


def _raise_status(error: Exception) -> None:
    """Raise a `PredictionException` for an exception of another framework with a status code.

    HTTPException of FastAPI, Starlette and LitServe has the attributes `status_code` and `detail`.
    """
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and hasattr(error, "detail"):
        raise PredictionException(str(error.detail), status) from error
