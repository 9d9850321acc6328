"""Shows on stderr how far a run is."""

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
    """How far a run is, on stderr: one line that changes on a terminal, a line for each thing that
    was found elsewhere.

    `ends` is the moment, by time.monotonic, at which the run is to be over.
    """

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            left = self._ends - time.monotonic()
            before = "" if math.isinf(left) else f"{_clock(left)} left · "
            self._status.update(f"{before}{text}{more}".replace("[", r"\["))

    def load(self, progress: LoadProgress) -> None:
        self.doing(self._doing, f" · {progress.answers:,} answers in {progress.seconds:.0f} s")

    def load_of(self, number: int, rounds: int | None, progress: LoadProgress) -> None:
        """Show a load on a running server, of so many rounds; None where their number is not
        known.
        """
        left = (rounds - number if rounds else 1) * progress.of - progress.seconds
        name = f"round {number + 1} of {rounds}" if rounds else f"load {number + 1}"
        self.doing(name, f" · {progress.answers:,} answers, {max(0.0, left):.0f} s left")

    def rows(self, count: int) -> None:
        self.doing(self._doing, f" · {count:,} rows")


def _clock(left: float) -> str:
    minutes, seconds = divmod(max(0, round(left)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
