"""Tracing, which sends the spans of requests to a collector (the extra `otel`).

The setting `otlp_endpoint`, or a variable of OpenTelemetry, turns it on
(docs/guides/observability.md).
"""
