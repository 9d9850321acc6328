"""The results of a shadow: counts, latencies of both versions, and examples of differences."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from tsx_runtime.errors import is_failure
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.shared.quantiles import nearest_rank
from tsx_runtime.shared.redaction import is_secret_header, redacted
from tsx_runtime.wire import Body, Parts

MAX_PAIRS = 2000  # newest comparisons whose latencies are kept
MAX_EXCERPT_BYTES = 2048  # length of a body's excerpt in an example
DEFAULT_EXAMPLES = 20


class Excerpt(NamedTuple):
    """The beginning of a body."""

    start: bytes
    size: int  # bytes of the whole body


@dataclass(frozen=True)
class Side:
    """One of the two responses to a request."""

    version: str
    status: int
    seconds: float
    headers: Mapping[str, str]
    body: Excerpt


@dataclass(frozen=True)
class Example:
    at: datetime
    reason: str
    request_id: str
    headers: Mapping[str, str]
    body: Excerpt
    primary: Side
    shadow: Side


@dataclass
class ShadowReport:
    """The counts of a shadow, used only in the event loop.

    Each compared copy counts as `agreed` or `disagreed`. Others count as `uncompared`, or by reason
    in `shed`, as do requests that were not copied.
    """

    max_examples: int = DEFAULT_EXAMPLES
    since: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    copied: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    agreed: int = 0
    disagreed: int = 0
    uncompared: int = 0
    primary_errors: int = 0  # failures of the primary version among compared requests
    shadow_errors: int = 0
    largest_difference: float = 0.0  # largest difference between two compared numbers
    last_problem: str = ""  # why an answer was not compared
    pairs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_PAIRS))
    examples: deque[Example] = field(default_factory=deque)

    def add_pair(self, primary: Side, shadow: Side, largest: float = 0.0) -> None:
        self.largest_difference = max(self.largest_difference, largest)
        self.pairs.append((primary.seconds, shadow.seconds))
        self.primary_errors += is_failure(primary.status)
        self.shadow_errors += is_failure(shadow.status)

    def add_example(self, example: Example) -> None:
        self.examples.append(example)
        self.limit_examples(self.max_examples)

    def limit_examples(self, limit: int) -> None:
        self.max_examples = limit
        while len(self.examples) > limit:
            self.examples.popleft()

    def latencies(self) -> list[tuple[float, float]]:
        """Return p50 and p99 in seconds, first of the primary version, then of the shadow."""
        ordered = [sorted(seconds) for seconds in zip(*self.pairs, strict=True)]
        return [(nearest_rank(seconds, 0.5), nearest_rank(seconds, 0.99)) for seconds in ordered]


def without_secrets(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: redacted(value)[:MAX_EXCERPT_BYTES]
        for name, value in headers.items()
        if not is_secret_header(name)
    }


def excerpt_of(body: Body) -> Excerpt:
    if not isinstance(body, Parts):
        return Excerpt(bytes(body[:MAX_EXCERPT_BYTES]), len(body))
    start = b""
    for piece in body.pieces:
        start += bytes(piece[: MAX_EXCERPT_BYTES - len(start)])
        if len(start) == MAX_EXCERPT_BYTES:
            break
    return Excerpt(start, body.size)


def side_of(version: str, answer: ComparedAnswer, seconds: float) -> Side:
    return Side(
        version, answer.status, seconds, without_secrets(answer.headers), excerpt_of(answer.body)
    )
