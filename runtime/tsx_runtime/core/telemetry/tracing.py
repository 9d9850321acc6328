"""Spans of traced requests (W3C Trace Context), made after the answer.

    server span            a request of HTTP, a call of gRPC
      +-- node NAME        in a workflow: one attempt or several
      +-- queue            from the times of the batch, see `batch_times.py`
      +-- batch wait
      +-- handler          in the worker; the handler's `traceparent`, so its own spans are below
            +-- preprocess, inference, postprocess

Tracing is cheap: an untraced request costs one check, and the spans of a traced one are made in the
thread that sends them. `features/tracing/otlp.py` sends them; this module does not import it.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tsx_runtime.core.telemetry.batch_times import Batch, BatchTimes
from tsx_runtime.errors import TsxError, is_failure
from tsx_runtime.wire import SPAN_HEADER, Buffer

MAX_STATE_CHARS = 512  # A longer tracestate is not passed on.
MAX_LINKS = 32

_PARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_TRACEPARENT_LINE = re.compile(rb"(?im)^traceparent: [^\r\n]*\r\n")
_SPAN_LINE = re.compile(rb"(?m)^%b: (.*)\r\n" % SPAN_HEADER.encode())

SpanFactory = Callable[[], list["Span"]]  # It is called once, in any thread.
Links = tuple[tuple[int, int], ...]  # pairs of a trace id and a span id


class Parent(NamedTuple):
    """The client's span for a request, from `traceparent` and `tracestate`."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str


class Span(NamedTuple):
    """A finished span; its times are time.monotonic()."""

    trace_id: int
    span_id: int
    parent_id: int  # 0: no parent
    is_remote: bool  # whether the parent is the client's span
    name: str
    kind: str  # server or internal
    start: float
    end: float
    attributes: dict[str, Any]
    error: str  # empty without an error
    state: str
    links: Links = ()


def parent_of(headers: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """Return the client's span, or None without a valid `traceparent`.

    Header names are in lower case.
    """
    traceparent, states = None, []
    for name, value in headers:
        if name == b"traceparent":
            if traceparent is not None:
                return None  # Two headers are ambiguous.
            traceparent = value.strip()
        elif name == b"tracestate":
            states.append(value)
    match = _PARENT.fullmatch(traceparent) if traceparent else None
    if match is None or (match[1] == b"00" and match[5]):
        return None
    state = b",".join(states).decode("latin-1")
    return Parent(
        int(match[2], 16),
        int(match[3], 16),
        bool(int(match[4], 16) & 1),
        state if len(state) <= MAX_STATE_CHARS else "",
    )


class Tracer:
    """Decides which requests are traced.

    A request's `traceparent` decides for it. Of the requests without one, a fraction is traced.
    """

    def __init__(
        self,
        sampling_rate: float,
        emit: Callable[[SpanFactory], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.sampling_rate = sampling_rate
        self.emit = emit
        self._draw = draw
        # The newest batch with a traced request, and the handler spans of such requests in it.
        self._batch: Batch | None = None
        self._members: list[tuple[int, int]] = []

    def should_trace(self, parent: Parent | None) -> bool:
        return self._draw() < self.sampling_rate if parent is None else parent.sampled

    def begin(self, parent: Parent | None, started: float) -> OpenSpan:
        """Start the span of a request for which `should_trace` returned True."""
        if parent is None:
            return OpenSpan(self, new_id(128), 0, "", "server", started)
        return OpenSpan(
            self,
            parent.trace_id,
            parent.span_id,
            "",
            "server",
            started,
            parent.state,
            is_remote=True,
        )

    def batch_links(self, batch: Batch, trace_id: int, span_id: int) -> Links:
        """Return links to those handler spans of the same batch that were made before."""
        if self._batch is not batch:
            self._batch, self._members = batch, []
        links = tuple(self._members[:MAX_LINKS])
        self._members.append((trace_id, span_id))
        return links


@dataclass(eq=False)
class OpenSpan:
    """A span that has not ended: a request, or a node of a workflow."""

    tracer: Tracer
    trace_id: int
    parent_id: int
    name: str
    kind: str
    started: float
    state: str = ""
    is_remote: bool = False
    span_id: int = field(default_factory=lambda: new_id(64))
    attributes: dict[str, Any] = field(default_factory=dict)

    def child(self, name: str, started: float) -> OpenSpan:
        return OpenSpan(
            self.tracer, self.trace_id, self.span_id, name, "internal", started, self.state
        )

    def finish(
        self, end: float, error: str = "", describe: Callable[[], None] | None = None
    ) -> None:
        """End the span; `describe` adds attributes later, in another thread."""
        self.tracer.emit(partial(self._make, end, error, describe))

    def _make(self, end: float, error: str, describe: Callable[[], None] | None) -> list[Span]:
        if describe is not None:
            describe()
        return [
            Span(
                self.trace_id,
                self.span_id,
                self.parent_id,
                self.is_remote,
                self.name,
                self.kind,
                self.started,
                end,
                self.attributes,
                error,
                self.state,
            )
        ]


class JobTrace:
    """The spans of a job in the queue, in its batch and in the worker.

    Their parent is the span of a request, or of a workflow's node.
    """

    __slots__ = ("_handler", "_parent")

    def __init__(self, parent: OpenSpan) -> None:
        self._parent = parent
        self._handler = new_id(64)

    def with_traceparent(self, meta: bytes) -> bytes:
        """Return a request's meta (see `wire`) with the handler's span as `traceparent`."""
        headers_start = meta.find(b"\r\n", meta.find(b"\r\n") + 2) + 2
        return b"%b%b%b: 1\r\ntraceparent: 00-%032x-%016x-01\r\n" % (
            meta[:headers_start],
            _TRACEPARENT_LINE.sub(b"", meta[headers_start:]),
            SPAN_HEADER.encode(),
            self._parent.trace_id,
            self._handler,
        )

    def on_answer(
        self, version: Any, arrived: float, status: int, headers: Buffer, batch: Batch
    ) -> None:
        self._name_version(version)
        parent = self._parent
        links = parent.tracer.batch_links(batch, parent.trace_id, self._handler)
        times = version.stats.times(batch)
        version.stats.add_exemplar(f"{parent.trace_id:032x}", arrived, times)
        span_line = _SPAN_LINE.search(headers)
        parent.tracer.emit(
            partial(
                self._make_spans,
                times,
                arrived,
                f"status {status}" if is_failure(status) else "",
                links,
                span_line[1] if span_line else b"{}",
            )
        )

    def _make_spans(
        self, times: BatchTimes, arrived: float, error: str, links: Links, attributes: bytes
    ) -> list[Span]:
        free = max(times.free, arrived)
        spans = [
            self._span("queue", arrived, free),
            self._span("batch wait", free, times.began),
            self._span(
                "handler",
                times.began,
                times.done,
                {"tsx.batch.size": times.size, **_parse_attributes(attributes)},
                error,
                links,
            ),
        ]
        start = times.began
        for name, seconds in (("preprocess", times.preprocess), ("inference", times.inference)):
            if seconds >= 0.0:  # A missing step is NaN.
                spans.append(self._span(name, start, start + seconds, parent_id=self._handler))
                start += seconds
        if times.postprocess >= 0.0:
            spans.append(
                self._span(
                    "postprocess",
                    times.done - times.postprocess,
                    times.done,
                    parent_id=self._handler,
                )
            )
        return spans

    def on_refusal(self, version: Any, arrived: float, error: TsxError) -> None:
        """Emit the span of a refusal; `version` may be a splitter that has picked none yet."""
        self._name_version(version)
        now, name = time.monotonic(), type(error).__name__
        self._parent.tracer.emit(lambda: [self._span("queue", arrived, now, error=name)])

    def _name_version(self, version: Any) -> None:
        self._parent.attributes["tsx.model.name"] = version.name
        if hasattr(version, "version"):  # A splitter has none before it picks one.
            self._parent.attributes["tsx.model.version"] = version.version

    def _span(
        self,
        name: str,
        start: float,
        end: float,
        attributes: dict[str, Any] | None = None,
        error: str = "",
        links: Links = (),
        parent_id: int = 0,
    ) -> Span:
        parent = self._parent
        span_id = self._handler if name == "handler" else new_id(64)
        return Span(
            parent.trace_id,
            span_id,
            parent_id or parent.span_id,
            False,
            name,
            "internal",
            start,
            end,
            attributes or {},
            error,
            parent.state,
            links,
        )


def _parse_attributes(text: bytes) -> dict[str, Any]:
    """Return the attributes that a worker has sent; it runs a user's code, so they may be wrong."""
    try:
        attributes = json.loads(text)
    except ValueError:
        return {}
    return attributes if isinstance(attributes, dict) else {}


# The parent of spans that this asyncio task starts. Some servers run a task per request.
current: ContextVar[OpenSpan | None] = ContextVar("tsx_span", default=None)


def new_id(bits: int) -> int:
    return random.getrandbits(bits) or 1
