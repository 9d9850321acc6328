"""The progress of a run, on stderr: one changing line on a terminal, else a line per result."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.status import Status

from tsx_runtime.shared.log_format import escaped


class Progress:
    """`ends` is the moment, by time.monotonic, at which the run is to be over."""

    def __init__(self, ends: float, *, quiet: bool = False) -> None:
        self._ends = ends
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._status: Status | None = None
        self._doing = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.quiet:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._status is not None:
            with suppress(OSError):  # the terminal is gone
                self._status.stop()
            self._status = None

    def found(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(escaped(text), markup=False, soft_wrap=True)

    def doing(self, text: str, more: str = "") -> None:
        """What lasts for a while: only a terminal shows it."""
        self._doing = text
        if self._status is not None:
            self._status.update(f"{_clock(self._ends - time.monotonic())} left · {text}{more}".replace("[", r"\["))

    def load(self, progress: Progress) -> None:
        self.doing(self._doing, f" · {progress.answers:,} answers in {progress.seconds:.0f} s")


def _clock(left: float) -> str:
    if math.isinf(left):
        return "any time"
    minutes, seconds = divmod(max(0, round(left)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
