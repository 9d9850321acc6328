"""The kinds of plugins.

They are plain functions and values, so that they can be tested without a server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias


@dataclass(frozen=True)
class EndpointRequest:
    """A request to an endpoint.

    Attributes:
        method: The HTTP method.
        path: The path, without the query.
        query: The first value of each query parameter.
        headers: The headers by their names in lower case.
        body: The bytes of the body.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class EndpointResponse:
    """A response of an endpoint.

    Attributes:
        body: Bytes, text, or a value that is sent as JSON.
        status: The HTTP status.
        headers: Further headers.
    """

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class ModelFacts(NamedTuple):
    """The present state of one version of a model.

    Attributes:
        name: The name of the model.
        version: The version.
        url: The path or URL from which it was registered.
        default: Whether it is the default version of its name.
        workers: The number of workers that are ready.
        batch_size: The largest number of requests in a batch.
        waiting: The number of requests in the queue.
    """

    name: str
    version: str
    url: str
    default: bool
    workers: int
    batch_size: int
    waiting: int


class ServerView(Protocol):
    """The part of the server that an endpoint can see."""

    def setting(self, name: str) -> Any:
        """Return the value of a setting.

        Raises:
            KeyError: There is no such setting, or it is a token or a password.
        """

    def models(self) -> list[ModelFacts]:
        """Return all versions of all models."""


@dataclass(frozen=True)
class Endpoint:
    """A plugin of the group `tsx.endpoints`: a further path of the server.

    Attributes:
        path: The path, such as `/health/details`.
        answer: Answers a request. A function runs in a thread. A coroutine function runs on the
            event loop and must not block.
        role: The listener of the path, whose token protects it.
        methods: The HTTP methods.

    Examples:
        >>> def answer(request, server):
        ...     return EndpointResponse({"models": len(server.models())})
        >>> Endpoint("/count", answer).methods
        ('GET',)
    """

    path: str
    answer: Callable[[EndpointRequest, ServerView], EndpointResponse | Awaitable[EndpointResponse]]
    role: Literal["inference", "management"] = "inference"
    methods: tuple[str, ...] = ("GET",)


class Refused(Exception):
    """An error that an `Authenticate` raises to refuse a request.

    Attributes:
        status: The HTTP status, 401 or 403.
    """

    def __init__(self, message: str, *, status: Literal[401, 403] = 401) -> None:
        """Refuse the request with a text for the client."""
        super().__init__(message)
        self.status = status


Authenticate: TypeAlias = Callable[[str, Mapping[str, str]], None]
"""A plugin of the group `tsx.authentication`, called with a role and the headers of a request.

It raises `Refused` to refuse the request. The role is inference, management or metrics; header
names are in lower case. The plugin runs on the event loop for each request with a valid token, so
it must not block.
"""


@dataclass(frozen=True)
class Waiting:
    """The waiting requests of an incomplete batch that a worker could take now.

    Attributes:
        count: The number of requests.
        size: The bytes of their bodies.
        oldest: The seconds for which the first request has waited.
        max_count: The number of requests in a full batch.
        max_delay: The model's maxBatchDelay in seconds, the limit for every policy.
    """

    count: int
    size: int
    oldest: float
    max_count: int
    max_delay: float


BatchPolicy: TypeAlias = Callable[[Waiting], float]
"""A plugin of the group `tsx.batch_policies`, which model-config.yaml names as `batchPolicy`.

It returns the seconds for which the batch waits for more requests; 0 sends it now. The server calls
it for each request and each response, so it must be fast, and use only its argument.
"""


class Sample(NamedTuple):
    """One number of `/metrics`.

    Attributes:
        name: The name of the metric.
        kind: counter, gauge or histogram.
        labels: The labels.
        value: The value.
    """

    name: str
    kind: str
    labels: Mapping[str, str]
    value: float


PUSH_INTERVAL_S = 10

MetricsSink: TypeAlias = Callable[[list[Sample]], None]
"""A plugin of the group `tsx.metrics_sinks`, called with all samples every PUSH_INTERVAL_S seconds.

It runs in a thread.
"""

Source: TypeAlias = Callable[[str, Path, int], None]
"""A plugin of the group `tsx.sources`, named like the scheme of its URLs.

It is called with a URL that `allowed_urls` permits, a path and a number of bytes. It writes the
archive, of at most so many bytes, to the path, and raises OSError or ValueError with the reason if
it cannot. It runs in a thread.
"""


class ComparedAnswer(NamedTuple):
    """The response of a version, with all pieces of a stream.

    Attributes:
        status: The HTTP status.
        headers: The headers that the handler set, by their names in lower case.
        body: The bytes of the body.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


Comparison: TypeAlias = Callable[[bytes, ComparedAnswer, ComparedAnswer], bool | str]
"""A plugin of the group `tsx.comparisons`, which a shadow names as `compare.name`.

It is called with the body of a request, the client's response and the shadow's, both of the same
status. It returns True if they agree, and False or the reason if not. It runs in a thread, for at
most `compare.timeout` seconds.
"""
