"""Tracing: the spans of requests are sent to a collector (the extra `otel`).

`otlp_endpoint`, or a variable of OpenTelemetry, turns it on (docs/guides/observability.md).
"""
