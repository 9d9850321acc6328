"""The settings of tracing."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from tsx_runtime.settings.fields import FeatureSettings
from tsx_runtime.settings.model_limits import Accepts


def _check_collector(value: str) -> str:
    url = urlsplit(value)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise ValueError("it must be an http or https URL")
    return value


Collector = Annotated[
    str, AfterValidator(_check_collector), Accepts("a URL such as http://127.0.0.1:4318")
]


class TracingSettings(FeatureSettings):
    otlp_endpoint: Collector | None = None
    """collector that traces are sent to, such as http://127.0.0.1:4318 (OTLP over HTTP); see
    observability.md"""
    trace_share: float = Field(0.01, ge=0, le=1)
    """share of the requests without a client's trace that start a new trace"""
