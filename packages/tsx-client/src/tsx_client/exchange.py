"""The decisions of a call, without I/O: when it is sent, when it is repeated, and how long anything may take.

A call is a generator. It yields `Send` and gets a response, or the error of httpx; it yields `Wait`, and continues after that time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import httpx

from tsx_client.errors import ClientError, ConnectionFailed, DeadlineExceeded, Overloaded, failure

LONGEST = 86_400_000  # ms that a server takes
ResultT = TypeVar("ResultT")


class Send(NamedTuple):
    """Send it, and read the whole answer unless it `streams`. The answer to an error is always read."""

    request: httpx.Request
    streams: bool
    deadline: Deadline


class Wait(NamedTuple):
    seconds: float


Steps: TypeAlias = Generator[Send | Wait, Any, ResultT]


@dataclass(frozen=True)
class Retry:
    """Repeats what the server has refused (429 and 503 with Retry-After) or has never seen, and nothing that may have run."""

    attempts: int = 4
    backoff: float = 0.1  # seconds before the second attempt; twice as long before each further one, and as much again by chance
    longest: float = 30.0  # seconds of a Retry-After that are waited for

    def wait(self, error: ClientError, attempt: int, draw: Callable[[], float] = random.random) -> float | None:
        """Seconds before the next attempt, behind so many; None: there is none."""
        asked = 0.0 if isinstance(error, ConnectionFailed) and error.before_request else None
        if isinstance(error, Overloaded):
            asked = error.retry_after  # which is not there where the request may have run, as of a handler's own 503
        if asked is None or attempt >= self.attempts or asked > self.longest:
            return None
        return asked + self.backoff * 2.0 ** (attempt - 1) * (1 + draw())


class Deadline:
    """`seconds` for a whole call, its retries included; None: any time."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._end = None if seconds is None else clock() + seconds

    def left(self) -> float | None:
        """Raises DeadlineExceeded."""
        if self._end is None:
            return None
        left = self._end - self._clock()
        if left <= 0:
            raise self.exceeded()
        return left

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"The answer did not come within {self._seconds} s (timeout).")


def exchange(new_request: Callable[[], httpx.Request], retry: Retry, deadline: Deadline, *, streams: bool = False) -> Steps[httpx.Response]:
    attempt = 0
    while True:
        request, left = new_request(), deadline.left()
        attempt += 1
        if left is not None:
            request.headers["x-tsx-timeout-ms"] = str(min(max(1, int(left * 1000)), LONGEST))
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), left)
        result = yield Send(request, streams, deadline)
        error = _error(result, request, deadline)
        if error is None:
            response: httpx.Response = result
            return response
        wait = retry.wait(error, attempt)
        left = deadline.left() if wait is not None else None
        if wait is None or (left is not None and wait >= left):
            raise error from (result if isinstance(result, Exception) else None)
        yield Wait(wait)


def _error(result: httpx.Response | Exception, request: httpx.Request, deadline: Deadline) -> ClientError | None:
    if isinstance(result, httpx.Response):
        return failure(result.status_code, result.headers, result.content) if not result.is_success else None
    if isinstance(result, ClientError):
        return result
    where = f"{request.url.scheme}://{request.url.netloc.decode()}"
    if isinstance(result, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return ConnectionFailed(f"No server answers at {where}: {result}", before_request=True)
    if isinstance(result, httpx.TimeoutException):
        return deadline.exceeded()
    return ConnectionFailed(f"{where} ended the connection before its answer: {result}")
