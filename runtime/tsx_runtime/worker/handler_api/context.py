"""The `context` argument of handlers: the model and the requests of the batch.

Contract section 5.2.

One object lives as long as the worker, and handlers set their own attributes on it. The data of a
request is read from its meta only when it is used. Where a thread prepares the next batch while
this one is answered, the object shows each thread its own batch.
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

SendPiece = Callable[
    [int, Buffer, Buffer], None
]  # position in the handler's data, header block, body

logger = logging.getLogger("tsx.worker")

_NODE = f"\r\n{NODE_HEADER.decode()}: "
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FRAMING = frozenset(
    {"connection", "content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)


class Headers(dict[str, Any]):
    """Finds names whatever their case; iterates over them as the client wrote them.

    Of a repeated name the last value counts.
    """

    def __init__(self, pairs: Mapping[str, Any] | Any = ()) -> None:
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
        return super().get(self._stored(name), default)

    def pop(self, name: str, *default: Any) -> Any:
        value = super().pop(self._stored(name), *default)
        self._names.pop(name.lower(), None)
        return value

    def setdefault(self, name: str, default: Any = None) -> Any:
        return super().setdefault(self._names.setdefault(name.lower(), name), default)

    def update(self, *others: Any, **pairs: Any) -> None:
        for name, value in dict(*others, **pairs).items():
            self[name] = value

    def copy(self) -> Headers:
        return Headers(self)

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        del self._names[name.lower()]
        return name, value

    def clear(self) -> None:
        super().clear()
        self._names.clear()

    def __reduce__(self) -> tuple[type[Headers], tuple[dict[str, Any]]]:
        return Headers, (dict(self),)

    def _stored(self, name: str) -> str:
        return self._names.get(name.lower(), name)


class RequestProcessor:
    """One request's headers, and the status and headers of its answer."""

    __slots__ = (
        "_reason_phrase",
        "_request_header",
        "_response_header",
        "_status_code",
        "parameters",
    )

    def __init__(self, request_header: Mapping[str, Any]) -> None:
        self._request_header = (
            request_header if isinstance(request_header, Headers) else Headers(request_header)
        )
        self._response_header = Headers()
        self._status_code = 200
        self._reason_phrase: str | None = None
        self.parameters: Any = None

    def get_request_property(self, key: str) -> Any:
        return self._request_header.get(key)

    def get_request_properties(self) -> Headers:
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        if not isinstance(code, int) or not 200 <= code <= 599:
            raise ValueError(
                f"{code!r} is not an HTTP status of an answer; use a number from 200 to 599"
            )
        self._status_code = int(code)
        self._reason_phrase = reason_phrase

    def get_response_status_code(self) -> int:
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        return self._reason_phrase

    def add_response_property(self, key: str, value: Any) -> None:
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
        return self._response_header

    def get_response_header(self, key: str) -> Any:
        return self._response_header.get(key)

    def header_block(self) -> bytes:
        """The headers for the wire, without those of framing, which the server decides."""
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
    over: bool = False  # it is answered
    ids: dict[int, str] | None = None
    processors: dict[int, RequestProcessor] = field(default_factory=dict)
    offset: int = 0  # of a micro-batch in its batch

    def local(self, idx: int) -> int:
        """Handlers of micro-batches count from the part's first request or, as they must in
        TorchServe, from the batch's.
        """
        return idx - self.offset if idx >= len(self.metas) and idx >= self.offset else idx


class Context:
    """The second argument of a handler; `idx` is always a request's position in the data, the first
    argument.

    The parameters are those of TorchServe, whose users' tests make contexts themselves.
    """

    envelope = ""  # around requests and answers
    json_nan = "null"  # how NaN and infinities in answers are written as JSON
    guess_content_type = (
        False  # of answers to which neither the handler nor the value's type gives one
    )

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
        self.model_name = model_name
        self.manifest = manifest  # what MAR-INF/MANIFEST.json of the archive says
        self._system_properties = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self._limit_max_image_pixels = limit_max_image_pixels
        self.metrics: Metrics | None = metrics  # where the handler reports its own
        self.model_yaml_config = (
            {} if model_yaml_config is None else model_yaml_config
        )  # the whole of model-config.yaml
        # with continuous batching, a list: whether what was returned for a request ends its answer
        self.stopping_criteria: Any = None
        self.cl_socket: Any = None
        self.header_key_sequence_id = SEQUENCE_ID
        self.header_key_sequence_start = SEQUENCE_START
        self.header_key_sequence_end = SEQUENCE_END
        self._late: str | None = None  # the request whose late part was logged last
        self._elsewhere: dict[
            int, BatchState
        ] = {}  # the state for threads that work on another batch, or on a part of one
        self.begin([])

    # What the worker calls

    def begin(
        self,
        metas: list[str],
        parts: Mapping[int, dict[str, dict[str, str]]] | None = None,
        send_piece: SendPiece | None = None,
    ) -> None:
        """A new batch: the meta of each row, and the part headers of those that are forms."""
        self._batch = BatchState(metas, parts, send_piece)

    def begin_ahead(
        self,
        metas: list[str],
        parts: Mapping[int, dict[str, dict[str, str]]],
        send_piece: SendPiece,
    ) -> BatchState:
        """The next batch, which this thread prepares while another one answers the last: from now
        on each sees its own.
        """
        state = self._elsewhere[threading.get_ident()] = BatchState(metas, parts, send_piece)
        return state

    def resume(self, state: BatchState, send_piece: SendPiece) -> None:
        """The turn of a batch that was prepared ahead."""
        state.send_piece = send_piece
        self._batch = state

    @contextmanager
    def only(self, idx: int) -> Iterator[None]:
        """A batch of this one request: an envelope whose requests do not fit one call makes a call
        for each.
        """
        whole = self._state()
        send, parts = whole.send_piece, whole.parts or {}
        part = BatchState(
            [whole.metas[idx]],
            {0: parts[idx]} if idx in parts else None,
            processors={0: self._processor(idx)},
        )
        if send is not None:
            part.send_piece = lambda _, headers, body: send(idx, headers, body)
        self._batch = part
        try:
            yield
        finally:
            whole.processors[idx] = part.processors[0]
            self._batch = whole

    def end(self) -> None:
        """The batch is answered: parts that a thread of the handler still sends are too late."""
        self._batch.over = True

    @contextmanager
    def part(self, positions: range) -> Iterator[None]:
        """Meanwhile this thread sees only these of the batch, counted from 0: it works on a
        micro-batch.
        """
        whole, start = self._batch, positions.start
        forms = {idx - start: form for idx, form in (whole.parts or {}).items() if idx in positions}
        seen = BatchState(whole.metas[start : positions.stop], forms, offset=start)
        seen.processors = {
            idx - start: whole.processors[idx] for idx in positions if idx in whole.processors
        }
        if (send := whole.send_piece) is not None:
            seen.send_piece = lambda idx, headers, body: send(start + idx, headers, body)
        self._elsewhere[threading.get_ident()] = seen
        try:
            yield
        finally:
            del self._elsewhere[threading.get_ident()]
            whole.processors.update(
                {start + idx: processor for idx, processor in seen.processors.items()}
            )

    @property
    def processors(self) -> Mapping[int, RequestProcessor]:
        """Those that were asked for; the answers of all others are plain."""
        return self._batch.processors

    def workflow_place(self, idx: int) -> str:
        """Return where the request's node stands, or "". Does without parsing the headers."""
        state = self._state()
        return state.metas[state.local(idx)].partition(_NODE)[2].partition("\r\n")[0]

    def keep_parameters(self, idx: int, body: Any) -> None:
        """Keep the `parameters` of a body of which the handler gets only the rows."""
        if isinstance(body, dict) and "parameters" in body:
            self._processor(idx).parameters = body["parameters"]

    def running_ids(self) -> list[str]:
        """Of the requests that this thread works on now; none between two batches."""
        state = self._state()
        return [] if state.over else [meta.partition("\r\n")[0] for meta in state.metas]

    def _state(self) -> BatchState:
        return (
            self._elsewhere.get(threading.get_ident(), self._batch)
            if self._elsewhere
            else self._batch
        )

    def send_piece(self, idx: int, body: Buffer) -> None:
        """Send a part of a streamed answer; what the handler returns is the last part."""
        state = self._state()
        if state.over:
            self.drop_late(state.metas[state.local(idx)].partition("\r\n")[0])
            return
        if state.send_piece is None:
            raise RuntimeError(
                "an answer can be sent in parts only while the handler processes a batch"
            )
        idx = state.local(idx)
        processor = state.processors.get(idx)
        state.send_piece(
            idx, self.typed(processor.header_block() if processor else b"", body, part=True), body
        )

    def typed(self, block: Buffer, body: Buffer, *, part: bool = False) -> Buffer:
        """A header block, with a content type where the setting asks for one and none is given."""
        if not self.guess_content_type or b"\r\ncontent-type:" in b"\r\n" + bytes(block).lower():
            return block
        return bytes(block) + b"content-type: %b\r\n" % looks_like(body, part=part).encode()

    def drop_late(self, request_id: str) -> None:
        """Log, once in a row, that a thread of the handler still sends parts of a complete answer,
        which are dropped.
        """
        if request_id != self._late:
            self._late = request_id
            logger.warning(
                "request %s is already answered, so further parts of its answer are dropped",
                request_id,
            )

    # What handlers use

    @property
    def system_properties(self) -> dict[str, Any]:
        """`model_dir`, `gpu_id` (None on a CPU), `batch_size`, `server_name`, `server_version`,
        `limit_max_image_pixels`; of a worker also `worker`, its id, and `trust_remote_code`:
        whether the operator lets code in a Hugging Face model's directory run.
        """
        return self._system_properties

    @property
    def request_ids(self) -> dict[int, str]:
        """The id of each request of the batch, by its position."""
        state = self._state()
        if state.ids is None:
            state.ids = {idx: meta[: meta.index("\r\n")] for idx, meta in enumerate(state.metas)}
        return state.ids

    @request_ids.setter
    def request_ids(self, ids: dict[int, str]) -> None:
        self._state().ids = ids

    @property
    def request_processor(self) -> list[RequestProcessor]:
        state = self._state()
        return [self._processor(idx) for idx in range(max(len(state.metas), len(state.processors)))]

    @request_processor.setter
    def request_processor(self, processors: list[RequestProcessor]) -> None:
        self._state().processors = dict(enumerate(processors))

    def get_request_id(self, idx: int = 0) -> str | None:
        return self.request_ids.get(self._state().local(idx))

    def get_request_header(self, idx: int, key: str) -> Any:
        """The header's value, whatever the case of its name; None if the request does not have
        it.
        """
        return self._processor(idx).get_request_property(key)

    def get_all_request_header(self, idx: int) -> Headers:
        """All headers, a dict that finds names in any case; of a form also the headers of each
        field, by the field's name.
        """
        return self._processor(idx).get_request_properties()

    def get_request_parameters(self, idx: int) -> Any:
        """Return the `parameters` beside the rows of a request's JSON.

        {}: it has none, or the handler gets the JSON itself.
        """
        return self._processor(idx).parameters or {}

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> Any:
        return self.get_response_headers(idx).get("content-type")

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        processor = self._processor(idx)
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Raises ValueError unless `code` is from 200 to 599."""
        self._processor(idx).report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for processor in self.request_processor:
            processor.report_status(code, phrase)

    def get_response_headers(self, idx: int) -> Headers:
        return self._processor(idx).get_response_headers()

    def set_response_header(self, idx: int, key: str, value: Any) -> None:
        """Raises ValueError for what a header cannot carry: line breaks, characters outside
        latin-1.
        """
        self._processor(idx).add_response_property(key, value)

    def get_sequence_id(self, idx: int) -> Any:
        """The sequence of a stateful model that the request belongs to."""
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
