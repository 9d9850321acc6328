"""Spans of traced requests: which requests are traced (W3C Trace Context), and the stages of each,
emitted after the answer.

    server span                                   a request of HTTP, a call of gRPC
      +-- node NAME                               of a workflow, an attempt or several
      +-- queue                                   as in `batch_times.py`, made afterwards of what is known of its batch
      +-- batch wait
      +-- handler                                 in the worker; the handler gets it as `traceparent`, so that its own spans are below
            +-- preprocess, inference, postprocess

A request that is not traced pays for one question, and one that is for little more: its spans are
made where they are sent. `targets/observability/otlp.py` sends them; nothing here depends on it.
"""

from __future__ import annotations

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

LONGEST_STATE = 512  # characters of a tracestate; a longer one is not passed on
MAX_LINKS = 32  # of one batch

_PARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_OLD = re.compile(rb"(?im)^traceparent: [^\r\n]*\r\n")

Make = Callable[[], list["Span"]]  # may be called in any thread, and once
Links = tuple[tuple[int, int], ...]  # trace and span


class Parent(NamedTuple):
    """The trace that a request belongs to, from its `traceparent` and `tracestate`."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str


class Span(NamedTuple):
    """A finished span. Times are of time.monotonic()."""

    trace_id: int
    span_id: int
    parent_id: int  # 0: none
    is_remote: bool  # the parent is a client's
    name: str
    kind: str  # server, internal
    start: float
    end: float
    attributes: dict[str, Any]
    error: str  # empty where there is none
    state: str
    links: Links = ()


def parent_of(headers: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """None where there is no `traceparent`, or none that W3C's form allows.

    Names are in lower case.
    """
    found, states = None, []
    for name, value in headers:
        if name == b"traceparent":
            if found is not None:
                return None  # ambiguous
            found = value.strip()
        elif name == b"tracestate":
            states.append(value)
    match = _PARENT.fullmatch(found) if found else None
    if match is None or (match[1] == b"00" and match[5]):
        return None
    state = b",".join(states).decode("latin-1")
    return Parent(
        int(match[2], 16),
        int(match[3], 16),
        bool(int(match[4], 16) & 1),
        state if len(state) <= LONGEST_STATE else "",
    )


class Tracer:
    """Decides which requests are traced: those whose `traceparent` is sampled, and a share of those
    without one.
    """

    def __init__(
        self, share: float, emit: Callable[[Make], None], draw: Callable[[], float] = random.random
    ) -> None:
        self.share = share
        self.emit = emit
        self._draw = draw
        self._batch: Batch | None = (
            None  # the newest that a traced request was in, and the traced requests in it:
        )
        self._members: list[tuple[int, int]] = []

    def wants(self, parent: Parent | None) -> bool:
        return self._draw() < self.share if parent is None else parent.sampled

    def begin(self, parent: Parent | None, started: float) -> OpenSpan:
        """The span of a request that `wants` has let through."""
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
        """Links to the handler spans of the same batch that were made before this one."""
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
        """`describe` adds attributes, later and in another thread."""
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
    """The spans of one job in the queue, its batch and the worker, below the span of a request or a
    node.
    """

    __slots__ = ("_above", "_handler")

    def __init__(self, above: OpenSpan) -> None:
        self._above = above
        self._handler = new_id(64)

    def with_traceparent(self, meta: bytes) -> bytes:
        """A request's meta (see `wire`) whose `traceparent` is this, in place of the client's."""
        at = meta.find(b"\r\n", meta.find(b"\r\n") + 2) + 2
        return b"%b%btraceparent: 00-%032x-%016x-01\r\n" % (
            meta[:at],
            _OLD.sub(b"", meta[at:]),
            self._above.trace_id,
            self._handler,
        )

    def answered(self, version: Any, arrived: float, status: int, batch: Batch) -> None:
        self._name(version)
        above = self._above
        links = above.tracer.batch_links(batch, above.trace_id, self._handler)
        times = version.stats.times(batch)
        version.stats.point_out(f"{above.trace_id:032x}", arrived, times)
        above.tracer.emit(
            partial(
                self._parts, times, arrived, f"status {status}" if is_failure(status) else "", links
            )
        )

    def _parts(self, times: BatchTimes, arrived: float, error: str, links: Links) -> list[Span]:
        free = max(times.free, arrived)
        spans = [
            self._span("queue", arrived, free),
            self._span("batch wait", free, times.began),
            self._span(
                "handler", times.began, times.done, {"tsx.batch.size": times.size}, error, links
            ),
        ]
        start = times.began
        for name, took in (("preprocess", times.preprocess), ("inference", times.inference)):
            if took >= 0.0:  # NaN is not
                spans.append(self._span(name, start, start + took, below=self._handler))
                start += took
        if times.postprocess >= 0.0:
            spans.append(
                self._span(
                    "postprocess", times.done - times.postprocess, times.done, below=self._handler
                )
            )
        return spans

    def refused(self, version: Any, arrived: float, error: TsxError) -> None:
        """`version`: or a split that has picked none."""
        self._name(version)
        now, name = time.monotonic(), type(error).__name__
        self._above.tracer.emit(lambda: [self._span("queue", arrived, now, error=name)])

    def _name(self, version: Any) -> None:
        self._above.attributes["tsx.model.name"] = version.name
        if hasattr(version, "version"):  # a split that has picked none has none
            self._above.attributes["tsx.model.version"] = version.version

    def _span(
        self,
        name: str,
        start: float,
        end: float,
        attributes: dict[str, Any] | None = None,
        error: str = "",
        links: Links = (),
        below: int = 0,
    ) -> Span:
        above = self._above
        span_id = self._handler if name == "handler" else new_id(64)
        return Span(
            above.trace_id,
            span_id,
            below or above.span_id,
            False,
            name,
            "internal",
            start,
            end,
            attributes or {},
            error,
            above.state,
            links,
        )


# The span that what runs in this task is below, for lanes where a request is a task.
current: ContextVar[OpenSpan | None] = ContextVar("tsx_span", default=None)


def new_id(bits: int) -> int:
    return random.getrandbits(bits) or 1
