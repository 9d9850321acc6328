"""The results of a shadow: counts, latencies of both versions, and examples of different
answers.
"""

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

NEWEST = 2000  # comparisons whose latencies are kept
CUT = 2048  # bytes of each body of an example
EXAMPLES = 20


class Excerpt(NamedTuple):
    """The beginning of a body."""

    start: bytes
    size: int  # of the whole


@dataclass(frozen=True)
class Side:
    """One of the two answers."""

    version: str
    status: int
    seconds: float
    headers: Mapping[str, str]
    body: Excerpt


@dataclass(frozen=True)
class Example:
    at: datetime
    why: str
    request_id: str
    headers: Mapping[str, str]
    body: Excerpt
    primary: Side
    shadow: Side


@dataclass
class ShadowReport:
    """Not thread safe.

    Of each copy, one of `agreed`, `disagreed` and `uncompared` is counted, or that it was shed by
    the shadow.
    """

    most_examples: int = EXAMPLES
    since: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    copied: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    agreed: int = 0
    disagreed: int = 0
    uncompared: int = 0
    primary_errors: int = 0  # answers that are failures, of the requests that were compared
    shadow_errors: int = 0
    largest_difference: float = 0.0  # of two numbers of all answers that were compared
    last_problem: str = ""  # why an answer was not compared
    pairs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NEWEST))
    examples: deque[Example] = field(default_factory=deque)

    def add_pair(self, primary: Side, shadow: Side, largest: float = 0.0) -> None:
        self.largest_difference = max(self.largest_difference, largest)
        self.pairs.append((primary.seconds, shadow.seconds))
        self.primary_errors += is_failure(primary.status)
        self.shadow_errors += is_failure(shadow.status)

    def add_example(self, example: Example) -> None:
        self.examples.append(example)
        self.keep_examples(self.most_examples)

    def keep_examples(self, most: int) -> None:
        self.most_examples = most
        while len(self.examples) > most:
            self.examples.popleft()

    def latencies(self) -> list[tuple[float, float]]:
        """p50 and p99 in seconds, the client's and the shadow's, of the newest requests that were
        compared; empty where there are none.
        """
        ordered = [sorted(seconds) for seconds in zip(*self.pairs, strict=True)]
        return [(nearest_rank(seconds, 0.5), nearest_rank(seconds, 0.99)) for seconds in ordered]


def without_secrets(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: redacted(value)[:CUT] for name, value in headers.items() if not is_secret_header(name)
    }


def excerpt_of(body: Body) -> Excerpt:
    if not isinstance(body, Parts):
        return Excerpt(bytes(body[:CUT]), len(body))
    start = b""
    for piece in body.pieces:
        start += bytes(piece[: CUT - len(start)])
        if len(start) == CUT:
            break
    return Excerpt(start, body.size)


def side_of(version: str, answer: ComparedAnswer, seconds: float) -> Side:
    return Side(
        version, answer.status, seconds, without_secrets(answer.headers), excerpt_of(answer.body)
    )
