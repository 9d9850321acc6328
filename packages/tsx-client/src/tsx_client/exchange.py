"""The sending of a request, with its retries and its deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import ceil

import httpx

from tsx_client.errors import ClientError, ConnectionFailed, DeadlineExceeded, Overloaded, failure

MAX_TIMEOUT_MS = 86_400_000  # the longest timeout that a server accepts


@dataclass(frozen=True)
class Retry:
    """The rule for the repetition of requests.

    A request is repeated if the server refused it (429 or 503 with Retry-After) or never received
    it. A request that may have run is never repeated.

    Attributes:
        attempts: The largest number of attempts.
        backoff: Seconds before the second attempt. They double for each further attempt, and a
            random part of up to 100 % is added.
        longest: The longest Retry-After, in seconds, for which the client waits.
    """

    attempts: int = 4
    backoff: float = 0.1
    longest: float = 30.0

    def wait(self, error: ClientError, attempt: int) -> float | None:
        """Return the seconds before the next attempt, or None if there is none.

        Args:
            error: The error of the last attempt.
            attempt: The number of attempts so far.
        """
        seconds = None
        if isinstance(error, ConnectionFailed) and error.before_request:
            seconds = 0.0
        elif isinstance(error, Overloaded):
            # A 503 from the handler itself has no Retry-After, and is not repeated.
            seconds = error.retry_after
        if seconds is None or attempt >= self.attempts or seconds > self.longest:
            return None
        return seconds + self.backoff * 2.0 ** (attempt - 1) * (1 + random.random())


class Deadline:
    """The end of a call with all its retries; without `seconds`, a call has no end."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._end = None if seconds is None else clock() + seconds

    def remaining(self) -> float | None:
        """Return the remaining seconds, or None if there is no end.

        Raises:
            DeadlineExceeded: No time remains.
        """
        if self._end is None:
            return None
        remaining = self._end - self._clock()
        if remaining <= 0:
            raise self.exceeded()
        return remaining

    def exceeded(self) -> DeadlineExceeded:
        """Return the error for a call that took too long."""
        return DeadlineExceeded(f"The answer did not come within {self._seconds} s (timeout).")


async def exchange(
    new_request: Callable[[], httpx.Request],
    retry: Retry,
    deadline: Deadline,
    send: Callable[[httpx.Request], Awaitable[httpx.Response]],
    sleep: Callable[[float], Awaitable[None]],
) -> httpx.Response:
    """Send a request until it succeeds, and return the response before its body is read.

    Raises:
        ClientError: The last attempt failed.
    """
    attempt = 0
    while True:
        attempt += 1
        request, remaining, cause = new_request(), deadline.remaining(), None
        if remaining is not None:
            # Rounded up, so that the server does not give up before the client.
            timeout_ms = min(ceil(remaining * 1000), MAX_TIMEOUT_MS)
            request.headers["x-tsx-timeout-ms"] = str(timeout_ms)
            phases = ("connect", "read", "write", "pool")
            request.extensions["timeout"] = dict.fromkeys(phases, remaining)
        try:
            response = await send(request)
            if response.is_success:
                return response
            body = await response.aread()
            if response.status_code in (503, 504):
                # The server may have refused the request because the deadline has passed.
                deadline.remaining()
            error: ClientError = failure(response.status_code, response.headers, body)
        except httpx.HTTPError as http_error:
            error, cause = _error(http_error, request, deadline), http_error
        wait = retry.wait(error, attempt)
        remaining = deadline.remaining() if wait is not None else None
        if wait is None or (remaining is not None and wait >= remaining):
            raise error from cause
        await sleep(wait)


def _error(error: httpx.HTTPError, request: httpx.Request, deadline: Deadline) -> ClientError:
    address = f"{request.url.scheme}://{request.url.netloc.decode()}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return ConnectionFailed(f"No server answers at {address}: {error}", before_request=True)
    if isinstance(error, httpx.TimeoutException):
        return deadline.exceeded()
    return ConnectionFailed(f"{address} ended the connection before its answer: {error}")
