"""The log of handlers' errors: each one once, followed by the number of its repeats."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tsx_runtime.worker.diagnostics.tracebacks import outline
from tsx_runtime.worker.exceptions import InvalidInput

REPEATS_INTERVAL_S = 10.0  # the time between two reports of repeats
MAX_FAILURES = 50  # failures whose repeats are counted; others are logged each time
MAX_NAMED_REQUESTS = 8  # requests of which a report gives the ids

logger = logging.getLogger("tsx.worker")


def log_failure(
    request_ids: Sequence[str], error: BaseException, subject: str = "the handler"
) -> None:
    """Log a failure, unless the handler has refused invalid input.

    Only the client can correct such input.
    """
    if isinstance(error, InvalidInput):
        return
    logger.error(
        "%s failed for %s",
        subject,
        _format_requests(request_ids),
        exc_info=error,
        extra={"request_ids": list(request_ids)},
    )


def _format_requests(request_ids: Sequence[str], total: int = 0) -> str:
    remainder = f" and {total - len(request_ids)} more" if total > len(request_ids) else ""
    plural = "s" if len(request_ids) > 1 or remainder else ""
    return f"the request{plural} {', '.join(request_ids)}{remainder}"


@dataclass
class _FailureRecord:
    logged_at: float  # the time of the log record
    repeats: int = 0  # requests not reported yet
    request_ids: list[str] = field(default_factory=list)  # the first ids of these requests
    text: str = ""  # the message of the newest repeat


class RepeatFilter:
    """A filter that holds back repeats of a handler's recent errors, and reports their number."""

    def __init__(
        self,
        write: Callable[[logging.LogRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._clock = clock
        self._failures: dict[str, _FailureRecord] = {}  # keys: the type and the frames of the error
        self._lock = threading.Lock()
        # In a process that the handler has forked, the timer does not run, and the lock may stay
        # locked. There, every error is logged.
        self._pid = os.getpid()
        self._has_timer = False  # A timer is running that will report repeats.

    def hold(self, record: logging.LogRecord) -> bool:
        """Tell whether to hold the record back; if so, count it as a repeat."""
        error, request_ids = (
            record.exc_info[1] if record.exc_info else None,
            getattr(record, "request_ids", None),
        )
        if error is None or request_ids is None or os.getpid() != self._pid:
            return False
        text, _, frames = outline(error).partition("\n")
        now, key = self._clock(), f"{type(error).__name__}\n{frames}"
        with self._lock:
            failure = self._failures.get(key)
            if failure is None or (
                not failure.repeats and now - failure.logged_at >= REPEATS_INTERVAL_S
            ):
                if failure is not None or len(self._failures) < MAX_FAILURES:
                    self._failures[key] = _FailureRecord(now)
                return False
            failure.repeats += len(request_ids)
            failure.request_ids += request_ids[: MAX_NAMED_REQUESTS - len(failure.request_ids)]
            failure.text = text
            if not self._has_timer:
                self._has_timer = True
                timer = threading.Timer(REPEATS_INTERVAL_S, self.flush)
                timer.daemon = True
                timer.start()
        return True

    def flush(self) -> None:
        """Report the repeats so far."""
        if os.getpid() != self._pid:
            return
        now = self._clock()
        with self._lock:
            self._has_timer = False
            repeated_failures = [
                (key, failure) for key, failure in self._failures.items() if failure.repeats
            ]
            recent_failures = {
                key: failure
                for key, failure in self._failures.items()
                if now - failure.logged_at < REPEATS_INTERVAL_S
            }
            self._failures = recent_failures | {
                key: _FailureRecord(now) for key, _ in repeated_failures
            }
        for key, failure in repeated_failures:
            location = key.rpartition("\n  ")[2].partition(": ")[0]
            text = "the same failure %s more, for %s: %s (%s)"
            count = "once" if failure.repeats == 1 else f"{failure.repeats} times"
            arguments = (
                count,
                _format_requests(failure.request_ids, failure.repeats),
                failure.text,
                location,
            )
            record = logging.LogRecord(
                logger.name, logging.ERROR, __file__, 0, text, arguments, None
            )
            record.request_ids = failure.request_ids
            self._write(record)
