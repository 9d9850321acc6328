"""The export of spans to a collector by OTLP over HTTP.

OpenTelemetry's exporter (the extra `otel`) sends the spans in a separate thread.
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
from tsx_runtime.features.tracing.settings import TracingSettings
from tsx_runtime.version import __version__

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PATH = "/v1/traces"
FLUSH_TIMEOUT_S = 5.0  # limit for sending the remaining spans when the server stops
INSTALL = "pip install 'tsx-serve[otel]'"

logger = logging.getLogger("tsx.server")


@contextmanager
def tracing(settings: TracingSettings, env: Mapping[str, str]) -> Iterator[Tracer | None]:
    """Yield the tracer, or None if no collector is configured.

    Raises:
        SettingError: The settings name a collector, but the extra is not installed.
    """
    variable = next((name for name in ENDPOINT_VARIABLES if env.get(name)), None)
    if settings.otlp_endpoint is None and (variable is None or _is_off(env)):
        yield None
        return
    try:
        sender = Sender(traces_url(settings.otlp_endpoint))
    except ImportError as error:
        if settings.otlp_endpoint is not None:
            raise SettingError(
                f"otlp_endpoint needs the extra otel, and {error.name} is not installed: {INSTALL}"
            ) from error
        logger.warning("%s is set, but requests are not traced: %s", variable, INSTALL)
        yield None
        return
    collector = settings.otlp_endpoint or env[str(variable)]
    logger.info(
        "requests are traced to %s: %g %% of those whose client has no trace (trace_share)",
        _without_password(collector),
        100 * settings.trace_share,
    )
    try:
        yield Tracer(settings.trace_share, sender.emit)
    finally:
        sender.close()


def traces_url(base: str | None) -> str | None:
    """Return the URL for traces at the collector `base`.

    If that is None, OpenTelemetry's own variables determine the URL.
    """
    if base is None or urlsplit(base).path.endswith(PATH):
        return base
    return base.rstrip("/") + PATH


def _is_off(env: Mapping[str, str]) -> bool:
    """Tell whether OpenTelemetry's own variables turn tracing off."""
    return (
        env.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or env.get("OTEL_TRACES_EXPORTER", "otlp").lower() == "none"
    )


class Sender:
    """A sender that passes spans to OpenTelemetry's SDK.

    Spans wait in the SDK's queue, which drops the oldest ones if it is full. A thread of the SDK
    converts and sends them.
    """

    def __init__(self, endpoint: str | None) -> None:
        """Start the SDK's thread.

        Raises:
            ImportError: The extra is not installed.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = _exporter(OTLPSpanExporter(endpoint))
        self._processor = BatchSpanProcessor(self._exporter)

    def emit(self, make_spans: SpanFactory) -> None:
        """Queue the spans of a request without blocking."""
        self._processor.on_end(cast("Any", QueuedSpans(make_spans)))

    def close(self) -> None:
        """Send the remaining spans, for at most FLUSH_TIMEOUT_S."""
        thread = threading.Thread(
            target=self._processor.shutdown, name="tsx-spans-end", daemon=True
        )
        thread.start()
        thread.join(FLUSH_TIMEOUT_S)
        if thread.is_alive():
            self._exporter.shutdown()  # The exporter stops its retries.


class _SampledContext:
    class trace_flags:  # noqa: N801  # the SDK's name
        sampled = True


class QueuedSpans:
    """An item of the SDK's queue, which the sending thread converts to spans.

    The queue itself reads only whether the item is sampled.
    """

    __slots__ = ("make_spans",)
    context = _SampledContext

    def __init__(self, make_spans: SpanFactory) -> None:
        self.make_spans = make_spans


def _exporter(otlp_exporter: Any) -> Any:
    # The import is deferred, here and below, because the package is optional.
    from opentelemetry.sdk.trace.export import SpanExporter

    convert = make_converter()

    class SpanExportAdapter(SpanExporter):
        def export(self, spans: Sequence[Any]) -> Any:
            offset = time.time() - time.monotonic()
            return otlp_exporter.export(
                [convert(span, offset) for item in spans for span in item.make_spans()]
            )

        def shutdown(self) -> None:
            otlp_exporter.shutdown()

    return SpanExportAdapter()


def make_converter() -> Any:
    """Return a function that converts a span to one of the SDK.

    The function's argument `offset` is time.time() minus time.monotonic().
    """
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

    resource = Resource.create()  # includes OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "tsx"}))
    scope = InstrumentationScope("tsx", __version__)
    sampled_flag = TraceFlags(TraceFlags.SAMPLED)
    kinds = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
    unset_status = Status(StatusCode.UNSET)

    def convert(span: Span, offset: float) -> ReadableSpan:
        state = TraceState.from_header([span.state]) if span.state else None
        is_remote = span.is_remote
        return ReadableSpan(
            span.name,
            SpanContext(span.trace_id, span.span_id, False, sampled_flag, state),
            (
                SpanContext(span.trace_id, span.parent_id, is_remote, sampled_flag, state)
                if span.parent_id
                else None
            ),
            resource,
            span.attributes,
            links=[
                Link(SpanContext(trace, span_id, False, sampled_flag))
                for trace, span_id in span.links
            ],
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else unset_status,
            start_time=int(1e9 * (span.start + offset)),
            end_time=int(1e9 * (span.end + offset)),
            instrumentation_scope=scope,
        )

    return convert


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
