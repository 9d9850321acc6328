"""The log of what handlers raise: an error once, and how often it was repeated."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tsx_runtime.worker.diagnostics.tracebacks import outline
from tsx_runtime.worker.exceptions import InvalidInput

REPEATS_INTERVAL_S = 10.0  # between two reports of repeats
MAX_FAILURES = 50  # followed; other failures are logged each time
MAX_NAMED_REQUESTS = 8  # the first requests of a report

logger = logging.getLogger("tsx.worker")


def log_failure(
    request_ids: Sequence[str], error: BaseException, subject: str = "the handler"
) -> None:
    """Log a failure, except for input that the handler has refused.

    The client must correct such input.
    """
    if isinstance(error, InvalidInput):
        return
    logger.error(
        "%s failed for %s",
        subject,
        _requests(request_ids),
        exc_info=error,
        extra={"request_ids": list(request_ids)},
    )


def _requests(ids: Sequence[str], total: int = 0) -> str:
    more = f" and {total - len(ids)} more" if total > len(ids) else ""
    return f"the request{'s' if len(ids) > 1 or more else ''} {', '.join(ids)}{more}"


@dataclass
class _Failure:
    logged: float  # the time of the log record
    repeats: int = 0  # requests not reported yet
    request_ids: list[str] = field(default_factory=list)  # the first ones not reported yet
    text: str = ""  # the newest one


class Repeats:
    """The recent errors of a handler, which holds back their repeats and reports the count."""

    def __init__(
        self,
        write: Callable[[logging.LogRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._clock = clock
        self._failures: dict[str, _Failure] = {}  # keys: type and frames
        self._lock = threading.Lock()
        # A process that the handler forked has no timer, and maybe a lock that is never released.
        self._pid = os.getpid()
        self._is_due = False  # A timer will report repeats.

    def hold(self, record: logging.LogRecord) -> bool:
        """Tell whether to hold the record back; if so, count it as a repeat."""
        error, ids = (
            record.exc_info[1] if record.exc_info else None,
            getattr(record, "request_ids", None),
        )
        if error is None or ids is None or os.getpid() != self._pid:
            return False
        text, _, frames = outline(error).partition("\n")
        now, key = self._clock(), f"{type(error).__name__}\n{frames}"
        with self._lock:
            known = self._failures.get(key)
            if known is None or (not known.repeats and now - known.logged >= REPEATS_INTERVAL_S):
                if known is not None or len(self._failures) < MAX_FAILURES:
                    self._failures[key] = _Failure(now)
                return False
            known.repeats += len(ids)
            known.request_ids += ids[: MAX_NAMED_REQUESTS - len(known.request_ids)]
            known.text = text
            if not self._is_due:
                self._is_due = True
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
            self._is_due = False
            repeated = [
                (key, failure) for key, failure in self._failures.items() if failure.repeats
            ]
            recent = {
                key: failure
                for key, failure in self._failures.items()
                if now - failure.logged < REPEATS_INTERVAL_S
            }
            self._failures = recent | {key: _Failure(now) for key, _ in repeated}
        for key, failure in repeated:
            location = key.rpartition("\n  ")[2].partition(": ")[0]
            text = "the same failure %s more, for %s: %s (%s)"
            count = "once" if failure.repeats == 1 else f"{failure.repeats} times"
            arguments = (
                count,
                _requests(failure.request_ids, failure.repeats),
                failure.text,
                location,
            )
            record = logging.LogRecord(
                logger.name, logging.ERROR, __file__, 0, text, arguments, None
            )
            record.request_ids = failure.request_ids
            self._write(record)
