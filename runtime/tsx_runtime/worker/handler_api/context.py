"""The `context` argument of handlers: the model and the requests of the batch.

A worker has one context all the time, and handlers may set attributes on it. The headers of a
request are parsed when they are first used. If one thread prepares the next batch while another one
answers, the context shows each thread its own batch.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tsx_runtime.shared.content_types import looks_like
from tsx_runtime.wire import (
    NODE_HEADER,
    SEQUENCE_END,
    SEQUENCE_ID,
    SEQUENCE_START,
    Buffer,
    parse_header_block,
    parse_request_meta,
)
from tsx_runtime.worker.handler_api.metrics import Metrics

# Arguments: the position in the handler's data, the header block and the body.
SendPiece = Callable[[int, Buffer, Buffer], None]

logger = logging.getLogger("tsx.worker")

_NODE = f"\r\n{NODE_HEADER.decode()}: "
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FRAMING = frozenset(
    {"connection", "content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)


class Headers(dict[str, Any]):
    """A dict of headers that ignores the case of names, but keeps it for iteration.

    If a name is repeated, its last value is kept.
    """

    def __init__(self, pairs: Mapping[str, Any] | Any = ()) -> None:
        """Copy the headers of a mapping or of pairs."""
        super().__init__()
        self._names: dict[str, str] = {}
        for name, value in pairs.items() if isinstance(pairs, Mapping) else pairs:
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(self._names.setdefault(name.lower(), name), value)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._stored(name))

    def __delitem__(self, name: str) -> None:
        super().__delitem__(self._stored(name))
        del self._names[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._names

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a header, or `default`."""
        return super().get(self._stored(name), default)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a header and return its value."""
        value = super().pop(self._stored(name), *default)
        self._names.pop(name.lower(), None)
        return value

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return the value of a header, after setting it if it is missing."""
        return super().setdefault(self._names.setdefault(name.lower(), name), default)

    def update(self, *others: Any, **pairs: Any) -> None:
        """Set several headers."""
        for name, value in dict(*others, **pairs).items():
            self[name] = value

    def copy(self) -> Headers:
        """Return a copy."""
        return Headers(self)

    def popitem(self) -> tuple[str, Any]:
        """Remove the last header and return its name and value."""
        name, value = super().popitem()
        del self._names[name.lower()]
        return name, value

    def clear(self) -> None:
        """Remove all headers."""
        super().clear()
        self._names.clear()

    def __reduce__(self) -> tuple[type[Headers], tuple[dict[str, Any]]]:
        return Headers, (dict(self),)

    def _stored(self, name: str) -> str:
        return self._names.get(name.lower(), name)


class RequestProcessor:
    """The headers of one request, and the status and headers of its response."""

    __slots__ = (
        "_reason_phrase",
        "_request_header",
        "_response_header",
        "_status_code",
        "parameters",
    )

    def __init__(self, request_header: Mapping[str, Any]) -> None:
        """Create a response with status 200 and without headers."""
        self._request_header = (
            request_header if isinstance(request_header, Headers) else Headers(request_header)
        )
        self._response_header = Headers()
        self._status_code = 200
        self._reason_phrase: str | None = None
        self.parameters: Any = None

    def get_request_property(self, key: str) -> Any:
        """Return a header of the request, or None."""
        return self._request_header.get(key)

    def get_request_properties(self) -> Headers:
        """Return all headers of the request."""
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the status of the response.

        Raises:
            ValueError: `code` is not between 200 and 599.
        """
        if not isinstance(code, int) or not 200 <= code <= 599:
            raise ValueError(
                f"{code!r} is not an HTTP status of an answer; use a number from 200 to 599"
            )
        self._status_code = int(code)
        self._reason_phrase = reason_phrase

    def get_response_status_code(self) -> int:
        """Return the HTTP status of the response."""
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        """Return the reason phrase of the response, or None for the usual one."""
        return self._reason_phrase

    def add_response_property(self, key: str, value: Any) -> None:
        """Set a header of the response.

        Raises:
            ValueError: The name or the value cannot be sent: a line break, or a character outside
                latin-1.
        """
        name, text = str(key), str(value)
        if not _TOKEN.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of a header")
        if any(character in text for character in "\r\n\0"):
            raise ValueError(
                f"the value of header {name} holds a line break, which would add further headers:"
                f" {text!r}"
            )
        try:
            text.encode("latin-1")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the value of header {name} cannot be sent: HTTP headers are latin-1, and it holds"
                f" {text!r}"
            ) from error
        self._response_header[name] = text

    def get_response_headers(self) -> Headers:
        """Return the headers of the response."""
        return self._response_header

    def get_response_header(self, key: str) -> Any:
        """Return a header of the response, or None."""
        return self._response_header.get(key)

    def header_block(self) -> bytes:
        """Return the encoded headers of the response. The server adds the framing headers."""
        lines = [
            f"{name}: {value}\r\n"
            for name, value in self._response_header.items()
            if name.lower() not in _FRAMING
        ]
        return "".join(lines).encode("latin-1")


@dataclass(slots=True)
class BatchState:
    """The state of one batch in a context."""

    metas: list[str]
    parts: Mapping[int, dict[str, dict[str, str]]] | None = None
    send_piece: SendPiece | None = None
    is_over: bool = False  # The batch is answered.
    ids: dict[int, str] | None = None
    processors: dict[int, RequestProcessor] = field(default_factory=dict)
    offset: int = 0  # the position of a micro-batch's first request in the batch

    def local(self, idx: int) -> int:
        """Convert a position that a handler uses to a position in this state.

        Handlers of micro-batches may count from the first request of the micro-batch or, as in
        TorchServe, of the whole batch.
        """
        return idx - self.offset if idx >= len(self.metas) and idx >= self.offset else idx


class Context:
    """The second argument of a handler.

    In all methods, `idx` is the position of a request in the data, the handler's first argument.

    Attributes:
        manifest: The content of the archive's MANIFEST.json.
        metrics: The metrics that the handler reports.
        model_name: The name under which the model is registered.
        model_yaml_config: The content of model-config.yaml.
        stopping_criteria: With continuous batching, a list of functions. Each tells whether the
            value returned for its request ends the response.

    Examples:
        >>> from tsx_runtime.worker.handler_api.testing import MockContext
        >>> context = MockContext(model_name="digits")
        >>> context.set_response_header(0, "x-model", context.model_name)
        >>> context.get_response_headers(0)["X-Model"]
        'digits'
    """

    envelope = ""  # the service envelope of requests and responses
    json_nan = "null"  # how NaN and infinities are written in JSON
    guess_content_type = False  # whether to guess the content type of a response that has none

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any],
        batch_size: int,
        gpu: int | None,
        mms_version: str,
        limit_max_image_pixels: bool = True,
        metrics: Metrics | None = None,
        model_yaml_config: dict[str, Any] | None = None,
    ) -> None:
        """Make a context without requests; the parameters are those of TorchServe.

        Args:
            model_name: The name of the model.
            model_dir: The directory of the unpacked archive.
            manifest: The content of MANIFEST.json.
            batch_size: The largest number of requests in a batch.
            gpu: The number of the GPU, or None for a CPU.
            mms_version: The version of the server.
            limit_max_image_pixels: Whether Pillow's limit of pixels applies.
            metrics: The object by which the handler reports metrics.
            model_yaml_config: The content of model-config.yaml.
        """
        self.model_name = model_name
        self.manifest = manifest
        self._system_properties = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self._limit_max_image_pixels = limit_max_image_pixels
        self.metrics: Metrics | None = metrics
        self.model_yaml_config = {} if model_yaml_config is None else model_yaml_config
        self.stopping_criteria: Any = None
        self.cl_socket: Any = None
        self.header_key_sequence_id = SEQUENCE_ID
        self.header_key_sequence_start = SEQUENCE_START
        self.header_key_sequence_end = SEQUENCE_END
        self._last_dropped_id: str | None = None  # the last request whose dropped piece was logged
        # The state of threads that work on another batch or on a micro-batch.
        self._thread_states: dict[int, BatchState] = {}
        self.begin([])

    # The worker calls the following methods.

    def begin(
        self,
        metas: list[str],
        parts: Mapping[int, dict[str, dict[str, str]]] | None = None,
        send_piece: SendPiece | None = None,
    ) -> None:
        """Begin a batch.

        Args:
            metas: The meta of each request.
            parts: The headers of each form's fields, by the position of the request.
            send_piece: Sends a piece of a streamed response.
        """
        self._batch = BatchState(metas, parts, send_piece)

    def begin_ahead(
        self,
        metas: list[str],
        parts: Mapping[int, dict[str, dict[str, str]]],
        send_piece: SendPiece,
    ) -> BatchState:
        """Begin the next batch for this thread, while another thread answers the current one."""
        state = self._thread_states[threading.get_ident()] = BatchState(metas, parts, send_piece)
        return state

    def resume(self, state: BatchState, send_piece: SendPiece) -> None:
        """Make a batch that was prepared ahead the current batch of the main thread."""
        state.send_piece = send_piece
        self._batch = state

    @contextmanager
    def single_request(self, idx: int) -> Iterator[None]:
        """Show a batch of only this request, for an envelope that calls the handler per request."""
        batch = self._state()
        send, parts = batch.send_piece, batch.parts or {}
        single_batch = BatchState(
            [batch.metas[idx]],
            {0: parts[idx]} if idx in parts else None,
            processors={0: self._processor(idx)},
        )
        if send is not None:
            single_batch.send_piece = lambda _, headers, body: send(idx, headers, body)
        self._batch = single_batch
        try:
            yield
        finally:
            batch.processors[idx] = single_batch.processors[0]
            self._batch = batch

    def end(self) -> None:
        """End the batch; pieces that a thread of the handler still sends are dropped."""
        self._batch.is_over = True

    @contextmanager
    def micro_batch(self, positions: range) -> Iterator[None]:
        """Show this thread a micro-batch: the requests at these positions, counted from 0."""
        batch, start = self._batch, positions.start
        parts = {
            idx - start: parts_of_request
            for idx, parts_of_request in (batch.parts or {}).items()
            if idx in positions
        }
        micro_batch = BatchState(batch.metas[start : positions.stop], parts, offset=start)
        micro_batch.processors = {
            idx - start: batch.processors[idx] for idx in positions if idx in batch.processors
        }
        if (send := batch.send_piece) is not None:
            micro_batch.send_piece = lambda idx, headers, body: send(start + idx, headers, body)
        self._thread_states[threading.get_ident()] = micro_batch
        try:
            yield
        finally:
            del self._thread_states[threading.get_ident()]
            batch.processors.update(
                {start + idx: processor for idx, processor in micro_batch.processors.items()}
            )

    @property
    def processors(self) -> Mapping[int, RequestProcessor]:
        """The processors that were used. Other responses have the status 200 and no headers."""
        return self._batch.processors

    def workflow_place(self, idx: int) -> str:
        """Return the position of the request's workflow node, or "", without parsing headers."""
        state = self._state()
        return state.metas[state.local(idx)].partition(_NODE)[2].partition("\r\n")[0]

    def state(self) -> BatchState:
        """Return the state of this thread's batch."""
        return self._state()

    def keep_parameters(self, idx: int, body: Any) -> None:
        """Store the `parameters` of a body, since the handler gets only its rows."""
        if isinstance(body, dict) and "parameters" in body:
            self._processor(idx).parameters = body["parameters"]

    def running_ids(self) -> list[str]:
        """Return the ids of the requests that this thread is processing."""
        state = self._state()
        return [] if state.is_over else [meta.partition("\r\n")[0] for meta in state.metas]

    def _state(self) -> BatchState:
        return (
            self._thread_states.get(threading.get_ident(), self._batch)
            if self._thread_states
            else self._batch
        )

    def send_piece(self, idx: int, body: Buffer) -> None:
        """Send a piece of a streamed response; the returned value is the last piece."""
        state = self._state()
        if state.is_over:
            self.log_dropped_piece(state.metas[state.local(idx)].partition("\r\n")[0])
            return
        if state.send_piece is None:
            raise RuntimeError(
                "an answer can be sent in parts only while the handler processes a batch"
            )
        idx = state.local(idx)
        processor = state.processors.get(idx)
        state.send_piece(
            idx,
            self.add_content_type(processor.header_block() if processor else b"", body, part=True),
            body,
        )

    def add_content_type(self, block: Buffer, body: Buffer, *, part: bool = False) -> Buffer:
        """Add a guessed content type to a header block, if the setting asks for one."""
        if not self.guess_content_type or b"\r\ncontent-type:" in b"\r\n" + bytes(block).lower():
            return block
        return bytes(block) + b"content-type: %b\r\n" % looks_like(body, part=part).encode()

    def log_dropped_piece(self, request_id: str) -> None:
        """Log that a piece was dropped, since it was sent after the end of its response."""
        if request_id != self._last_dropped_id:
            self._last_dropped_id = request_id
            logger.warning(
                "request %s is already answered, so further parts of its answer are dropped",
                request_id,
            )

    # Handlers call the following methods.

    @property
    def system_properties(self) -> dict[str, Any]:
        """The properties of the worker.

        They are `model_dir`, `gpu_id` (None on a CPU), `batch_size`, `server_name`,
        `server_version` and `limit_max_image_pixels`. In a worker process they also hold `worker`,
        its id, and `trust_remote_code`, which allows code in a Hugging Face model's directory.
        """
        return self._system_properties

    @property
    def request_ids(self) -> dict[int, str]:
        """The ids of the requests, by position."""
        state = self._state()
        if state.ids is None:
            state.ids = {idx: meta[: meta.index("\r\n")] for idx, meta in enumerate(state.metas)}
        return state.ids

    @request_ids.setter
    def request_ids(self, ids: dict[int, str]) -> None:
        self._state().ids = ids

    @property
    def request_processor(self) -> list[RequestProcessor]:
        """The processors of all requests, by position."""
        state = self._state()
        return [self._processor(idx) for idx in range(max(len(state.metas), len(state.processors)))]

    @request_processor.setter
    def request_processor(self, processors: list[RequestProcessor]) -> None:
        self._state().processors = dict(enumerate(processors))

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of a request, or None for a position outside the batch."""
        return self.request_ids.get(self._state().local(idx))

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a header of a request, or None; the case of the name is ignored.

        Raises:
            IndexError: The batch has no request at `idx`.
        """
        return self._processor(idx).get_request_property(key)

    def get_all_request_header(self, idx: int) -> Headers:
        """Return all headers of a request, as a dict that ignores the case of names.

        For a form, it also holds the headers of each field by the field's name.
        """
        return self._processor(idx).get_request_properties()

    def get_request_parameters(self, idx: int) -> Any:
        """Return the `parameters` that a request's JSON has next to its rows, or an empty dict.

        They are stored only if the handler does not get the whole JSON.
        """
        return self._processor(idx).parameters or {}

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the content type of a response."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> Any:
        """Return the content type of a response, or None."""
        return self.get_response_headers(idx).get("content-type")

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        """Return the HTTP status and the reason phrase of a response."""
        processor = self._processor(idx)
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the HTTP status of a response.

        Raises:
            ValueError: `code` is not between 200 and 599.
        """
        self._processor(idx).report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set the HTTP status of all responses of the batch."""
        for processor in self.request_processor:
            processor.report_status(code, phrase)

    def get_response_headers(self, idx: int) -> Headers:
        """Return the headers of a response."""
        return self._processor(idx).get_response_headers()

    def set_response_header(self, idx: int, key: str, value: Any) -> None:
        """Set a header of a response.

        Raises:
            ValueError: The name or the value cannot be sent: a line break, or a character outside
                latin-1.
        """
        self._processor(idx).add_response_property(key, value)

    def get_sequence_id(self, idx: int) -> Any:
        """Return the id of the sequence to which a request of a stateful model belongs."""
        return self.get_request_header(idx, self.header_key_sequence_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.__dict__ == other.__dict__

    __hash__ = object.__hash__

    def _processor(self, idx: int) -> RequestProcessor:
        state = self._state()
        idx = state.local(idx)
        processor = state.processors.get(idx)
        if processor is None:
            if not 0 <= idx < len(state.metas):
                raise IndexError(f"there is no request {idx} in a batch of {len(state.metas)}")
            headers = Headers(
                parse_header_block(parse_request_meta(state.metas[idx].encode("latin-1"))[2])
            )
            parts = (state.parts or {}).get(idx, {})
            headers.update(parts)
            processor = state.processors[idx] = RequestProcessor(headers)
            processor.parameters = getattr(parts, "parameters", None)
        return processor
