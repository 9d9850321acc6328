"""Plugins: entry points of installed packages that the server loads by name.

docs/guides/plugins.md shows how to write a plugin.
"""

from tsx_runtime.plugins.api import (
    Authenticate,
    BatchPolicy,
    ComparedAnswer,
    Comparison,
    Endpoint,
    EndpointRequest,
    EndpointResponse,
    MetricsSink,
    ModelFacts,
    Refused,
    Sample,
    ServerView,
    Source,
    Waiting,
)
from tsx_runtime.plugins.loading import Plugins, load_plugins

__all__ = [
    "Authenticate",
    "BatchPolicy",
    "ComparedAnswer",
    "Comparison",
    "Endpoint",
    "EndpointRequest",
    "EndpointResponse",
    "MetricsSink",
    "ModelFacts",
    "Plugins",
    "Refused",
    "Sample",
    "ServerView",
    "Source",
    "Waiting",
    "load_plugins",
]
