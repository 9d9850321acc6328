"""The kinds of plugins: plain functions and plain values, which can be tested without a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias


@dataclass(frozen=True)
class EndpointRequest:
    method: str
    path: str
    query: Mapping[str, str]  # of each parameter its first value
    headers: Mapping[str, str]  # names in lower case
    body: bytes


@dataclass(frozen=True)
class EndpointResponse:
    """A body that is neither bytes nor text is sent as JSON."""

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class ModelFacts(NamedTuple):
    """One version of a model, as it is now."""

    name: str
    version: str
    url: str
    default: bool  # of the versions of its name
    workers: int  # that are ready
    batch_size: int
    waiting: int  # requests


class ServerView(Protocol):
    """The part of the server that an endpoint can see."""

    def setting(self, name: str) -> Any:
        """Its value. Raises KeyError for what is no setting, and for tokens and passwords."""

    def models(self) -> list[ModelFacts]: ...


@dataclass(frozen=True)
class Endpoint:
    """Group `tsx.endpoints`: a path of its own, on the listener of its role and behind that
    listener's token.

    `answer` runs in a thread, unless it is a coroutine function: that one shares the event loop
    with every request, and must not block.
    """

    path: str
    answer: Callable[[EndpointRequest, ServerView], EndpointResponse | Awaitable[EndpointResponse]]
    role: Literal["inference", "management"] = "inference"
    methods: tuple[str, ...] = ("GET",)


class Refused(Exception):
    """Raised by an `Authenticate` to refuse the request. The text goes to the client."""

    def __init__(self, message: str, *, status: Literal[401, 403] = 401) -> None:
        super().__init__(message)
        self.status = status


# Group `tsx.authentication`: (role, headers by their names in lower case) -> None, or raises
# Refused. It runs on the event loop, for every request to that role (inference, management or
# metrics), after the server's own tokens were right: it must not block.
# it must not block.
Authenticate: TypeAlias = Callable[[str, Mapping[str, str]], None]


@dataclass(frozen=True)
class Waiting:
    """The requests that a worker could take now, fewer than a full batch."""

    count: int
    size: int  # bytes of their bodies
    oldest: float  # seconds that the first of them has waited
    max_count: int  # of a full batch
    # Seconds, the model's maxBatchDelay: none waits longer, whatever the policy says.
    max_delay: float


# Group `tsx.batch_policies`, by the name that a model-config.yaml has as its batchPolicy: the
# seconds for which the batch may wait for more; 0 sends it now. Asked at each arrival and each
# answer: it must be quick, and depend on nothing but what it is given.
# nothing but what it is given.
BatchPolicy: TypeAlias = Callable[[Waiting], float]


class Sample(NamedTuple):
    """One number of `/metrics`."""

    name: str
    kind: str  # counter, gauge or histogram
    labels: Mapping[str, str]
    value: float


PUSH_INTERVAL_S = 10

# Group `tsx.metrics_sinks`: called in a thread of its own with all samples, every PUSH_INTERVAL_S
# seconds.
MetricsSink: TypeAlias = Callable[[list[Sample]], None]

# Group `tsx.sources`, by the scheme of the URLs: writes the archive at the URL to the path, of at
# most so many bytes; raises OSError or ValueError with the reason. Runs in a thread. `allowed_urls`
# was checked before.
Source: TypeAlias = Callable[[str, Path, int], None]


class ComparedAnswer(NamedTuple):
    """The answer of a version; of a streamed answer, all parts."""

    status: int
    headers: Mapping[str, str]  # those that the handler set, names in lower case
    body: bytes


# Group `tsx.comparisons`, by the name that a shadow has as its compare.name: (body of the request,
# the client's answer, the shadow's) -> True where they agree; else False, or a text that says why
# not. Runs in a thread, and may take `compare.timeout` seconds. Answers whose statuses differ never
# get here.
Comparison: TypeAlias = Callable[[bytes, ComparedAnswer, ComparedAnswer], bool | str]
