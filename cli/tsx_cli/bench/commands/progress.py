"""The display of a run's progress on stderr."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.status import Status

from tsx_cli.bench.load.generator import LoadProgress
from tsx_runtime.shared.log_format import escaped


class Progress:
    """The progress of a run on stderr: a changing line on a terminal, and a line for each result.

    `ends` is the end of the run by time.monotonic.
    """

    def __init__(self, ends: float, *, quiet: bool = False) -> None:
        self._end = ends
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._status: Status | None = None
        self._activity = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.quiet:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            with suppress(OSError):  # The terminal is gone.
                self._status.stop()
            self._status = None

    def print_line(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(escaped(text), markup=False, soft_wrap=True)

    def doing(self, text: str, more: str = "") -> None:
        """Show a current activity, on a terminal only."""
        self._activity = text
        if self._status is not None:
            remaining_s = self._end - time.monotonic()
            prefix = "" if math.isinf(remaining_s) else f"{_clock(remaining_s)} left · "
            self._status.update(f"{prefix}{text}{more}".replace("[", r"\["))

    def load(self, progress: LoadProgress) -> None:
        self.doing(self._activity, f" · {progress.answers:,} answers in {progress.seconds:.0f} s")

    def show_round(self, number: int, rounds: int | None, progress: LoadProgress) -> None:
        """Show the load of a round on a running server.

        The number of rounds is None if it is unknown.
        """
        remaining_s = (rounds - number if rounds else 1) * progress.of - progress.seconds
        name = f"round {number + 1} of {rounds}" if rounds else f"load {number + 1}"
        self.doing(name, f" · {progress.answers:,} answers, {max(0.0, remaining_s):.0f} s left")

    def rows(self, count: int) -> None:
        self.doing(self._activity, f" · {count:,} rows")


def _clock(remaining_s: float) -> str:
    minutes, seconds = divmod(max(0, round(remaining_s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
