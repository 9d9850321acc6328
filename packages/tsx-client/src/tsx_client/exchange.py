"""When a request is sent, when it is repeated, and how long anything may take."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import ceil

import httpx

from tsx_client.errors import ClientError, ConnectionFailed, DeadlineExceeded, Overloaded, failure

LONGEST = 86_400_000  # ms that a server takes


@dataclass(frozen=True)
class Retry:
    """Repeats what the server has refused (429 and 503 with Retry-After) or has never seen, and
    nothing that may have run.
    """

    attempts: int = 4
    # seconds before the second attempt; twice as long before each further one, and as much again by
    # chance
    backoff: float = 0.1
    longest: float = 30.0  # seconds of a Retry-After that are waited for

    def wait(self, error: ClientError, attempt: int) -> float | None:
        """Seconds before the next attempt, behind so many; None: there is none."""
        asked = 0.0 if isinstance(error, ConnectionFailed) and error.before_request else None
        if isinstance(error, Overloaded):
            asked = (
                error.retry_after
            )  # which is not there where the request may have run, as of a handler's own 503
        if asked is None or attempt >= self.attempts or asked > self.longest:
            return None
        return asked + self.backoff * 2.0 ** (attempt - 1) * (1 + random.random())


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


async def exchange(
    new_request: Callable[[], httpx.Request],
    retry: Retry,
    deadline: Deadline,
    send: Callable[[httpx.Request], Awaitable[httpx.Response]],
    sleep: Callable[[float], Awaitable[None]],
) -> httpx.Response:
    """An answer without an error, whose body is still to be read."""
    attempt = 0
    while True:
        attempt += 1
        request, left, cause = new_request(), deadline.left(), None
        if left is not None:
            request.headers["x-tsx-timeout-ms"] = str(
                min(ceil(left * 1000), LONGEST)
            )  # not before `deadline` has passed
            request.extensions["timeout"] = dict.fromkeys(
                ("connect", "read", "write", "pool"), left
            )
        try:
            response = await send(request)
            if response.is_success:
                return response
            body = await response.aread()
            if response.status_code in (503, 504):
                deadline.left()  # maybe these are the server's words for that
            error: ClientError = failure(response.status_code, response.headers, body)
        except httpx.HTTPError as failed:
            error, cause = _error(failed, request, deadline), failed
        wait = retry.wait(error, attempt)
        left = deadline.left() if wait is not None else None
        if wait is None or (left is not None and wait >= left):
            raise error from cause
        await sleep(wait)


def _error(error: httpx.HTTPError, request: httpx.Request, deadline: Deadline) -> ClientError:
    where = f"{request.url.scheme}://{request.url.netloc.decode()}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return ConnectionFailed(f"No server answers at {where}: {error}", before_request=True)
    if isinstance(error, httpx.TimeoutException):
        return deadline.exceeded()
    return ConnectionFailed(f"{where} ended the connection before its answer: {error}")
