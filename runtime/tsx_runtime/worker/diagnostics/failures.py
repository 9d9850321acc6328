"""Logs what handlers raise: an error once, and how often it was repeated."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tsx_runtime.worker.diagnostics.tracebacks import outline
from tsx_runtime.worker.exceptions import InvalidInput

EVERY = 10.0  # seconds between two reports of repeats
MOST = 50  # different errors that are followed; others are logged each time
NAMED = 8  # requests that a report names

logger = logging.getLogger("tsx.worker")


def log_failure(
    request_ids: Sequence[str], error: BaseException, what: str = "the handler"
) -> None:
    """But for input that the handler has refused: that is for the client to correct."""
    if isinstance(error, InvalidInput):
        return
    logger.error(
        "%s failed for %s",
        what,
        _requests(request_ids),
        exc_info=error,
        extra={"request_ids": list(request_ids)},
    )


def _requests(ids: Sequence[str], total: int = 0) -> str:
    more = f" and {total - len(ids)} more" if total > len(ids) else ""
    return f"the request{'s' if len(ids) > 1 or more else ''} {', '.join(ids)}{more}"


@dataclass
class _Failure:
    logged: float  # when it was
    repeats: int = 0  # that are not reported yet: requests
    request_ids: list[str] = field(default_factory=list)  # of the first of these
    words: str = ""  # of the last


class Repeats:
    """Holds back an error of the handler that was logged a moment ago, and reports how often it
    came again.
    """

    def __init__(
        self,
        write: Callable[[logging.LogRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._clock = clock
        self._failures: dict[str, _Failure] = {}  # by kind and place
        self._lock = threading.Lock()
        self._pid = (
            os.getpid()
        )  # a process that the handler forked has no timer, and maybe a lock that is never released
        self._is_due = False  # whether a timer will report repeats

    def hold(self, record: logging.LogRecord) -> bool:
        """Whether the record is not to be written: it repeats one that was, and is counted."""
        error, ids = (
            record.exc_info[1] if record.exc_info else None,
            getattr(record, "request_ids", None),
        )
        if error is None or ids is None or os.getpid() != self._pid:
            return False
        words, _, frames = outline(error).partition("\n")
        now, key = self._clock(), f"{type(error).__name__}\n{frames}"
        with self._lock:
            known = self._failures.get(key)
            if known is None or (not known.repeats and now - known.logged >= EVERY):
                if known is not None or len(self._failures) < MOST:
                    self._failures[key] = _Failure(now)
                return False
            known.repeats += len(ids)
            known.request_ids += ids[: NAMED - len(known.request_ids)]
            known.words = words
            if not self._is_due:
                self._is_due = True
                timer = threading.Timer(EVERY, self.flush)
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
            kept = {
                key: failure
                for key, failure in self._failures.items()
                if now - failure.logged < EVERY
            }
            self._failures = kept | {key: _Failure(now) for key, _ in repeated}
        for key, failure in repeated:
            place = key.rpartition("\n  ")[2].partition(": ")[0]
            text = "the same failure %s more, for %s: %s (%s)"
            times = "once" if failure.repeats == 1 else f"{failure.repeats} times"
            arguments = (
                times,
                _requests(failure.request_ids, failure.repeats),
                failure.words,
                place,
            )
            record = logging.LogRecord(
                logger.name, logging.ERROR, __file__, 0, text, arguments, None
            )
            record.request_ids = failure.request_ids
            self._write(record)
