"""Sends spans to a collector by OTLP over HTTP, with OpenTelemetry's exporter (the extra `otel`),
in a separate thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from tsx_runtime.core.telemetry.tracing import Span, SpanFactory, Tracer
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.version import __version__

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PATH = "/v1/traces"
LAST_SPANS = 5.0  # seconds that sending the remaining spans may take at the end
INSTALL = "pip install 'tsx-serve[otel]'"

logger = logging.getLogger("tsx.server")


@contextmanager
def tracing(settings: Settings, env: Mapping[str, str]) -> Iterator[Tracer | None]:
    """None where no collector is named.

    Raises SettingError where one is, in the settings, and the extra is not installed.
    """
    named = next((name for name in VARIABLES if env.get(name)), None)
    if settings.otlp_endpoint is None and (named is None or _is_off(env)):
        yield None
        return
    try:
        sender = Sender(endpoint_of(settings.otlp_endpoint))
    except ImportError as error:
        if settings.otlp_endpoint is not None:
            raise SettingError(
                f"otlp_endpoint needs the extra otel, and {error.name} is not installed: {INSTALL}"
            ) from error
        logger.warning("%s is set, but requests are not traced: %s", named, INSTALL)
        yield None
        return
    where = settings.otlp_endpoint or env[str(named)]
    logger.info(
        "requests are traced to %s: %g %% of those whose client has no trace (trace_share)",
        _without_password(where),
        100 * settings.trace_share,
    )
    try:
        yield Tracer(settings.trace_share, sender.emit)
    finally:
        sender.close()


def endpoint_of(base: str | None) -> str | None:
    """The URL that traces go to, of the collector's; None leaves it to OpenTelemetry's own
    variables.
    """
    if base is None or urlsplit(base).path.endswith(PATH):
        return base
    return base.rstrip("/") + PATH


def _is_off(env: Mapping[str, str]) -> bool:
    """OpenTelemetry's own switches."""
    return (
        env.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or env.get("OTEL_TRACES_EXPORTER", "otlp").lower() == "none"
    )


class Sender:
    """Spans wait in the SDK's queue, which is bounded and drops the oldest; a thread of the SDK
    converts and sends them.
    """

    def __init__(self, endpoint: str | None) -> None:
        """Raises ImportError where the extra is not installed."""
        # Here, because it is an extra.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = _exporter(OTLPSpanExporter(endpoint))
        self._processor = BatchSpanProcessor(self._exporter)

    def emit(self, make: SpanFactory) -> None:
        """Does not block."""
        self._processor.on_end(cast("Any", QueuedSpans(make)))

    def close(self) -> None:
        """Send the remaining spans; a collector that does not answer is waited for LAST_SPANS
        seconds.
        """
        ending = threading.Thread(
            target=self._processor.shutdown, name="tsx-spans-end", daemon=True
        )
        ending.start()
        ending.join(LAST_SPANS)
        if ending.is_alive():
            self._exporter.shutdown()  # no further retries


class _SampledContext:
    class trace_flags:  # noqa: N801  # the SDK's name
        sampled = True


class QueuedSpans:
    """An item of the SDK's queue, which reads only whether it is sampled: the sending thread makes
    spans of it.
    """

    __slots__ = ("make",)
    context = _SampledContext

    def __init__(self, make: SpanFactory) -> None:
        self.make = make


def _exporter(inner: Any) -> Any:
    from opentelemetry.sdk.trace.export import SpanExporter

    make = maker()

    class SpanExportAdapter(SpanExporter):
        def export(self, spans: Sequence[Any]) -> Any:
            offset = time.time() - time.monotonic()
            return inner.export(
                [make(span, offset) for waiting in spans for span in waiting.make()]
            )

        def shutdown(self) -> None:
            inner.shutdown()

    return SpanExportAdapter()


def maker() -> Any:
    """Converts spans into the SDK's; `offset` is time.time() minus time.monotonic()."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import (
        Link,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
        TraceState,
    )

    resource = Resource.create()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are in it
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "tsx"}))
    scope = InstrumentationScope("tsx", __version__)
    sampled = TraceFlags(TraceFlags.SAMPLED)
    kinds = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
    plain = Status(StatusCode.UNSET)

    def make(span: Span, offset: float) -> ReadableSpan:
        state = TraceState.from_header([span.state]) if span.state else None
        remote = span.is_remote
        return ReadableSpan(
            span.name,
            SpanContext(span.trace_id, span.span_id, False, sampled, state),
            (
                SpanContext(span.trace_id, span.parent_id, remote, sampled, state)
                if span.parent_id
                else None
            ),
            resource,
            span.attributes,
            links=[Link(SpanContext(trace, other, False, sampled)) for trace, other in span.links],
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else plain,
            start_time=int(1e9 * (span.start + offset)),
            end_time=int(1e9 * (span.end + offset)),
            instrumentation_scope=scope,
        )

    return make


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
