"""The display of a run's progress on stderr."""

from __future__ import annotations

import math
import time
from contextlib import suppress

from tsx_cli.bench.load.generator import LoadProgress
from tsx_cli.common.status_line import StatusLine
from tsx_runtime.shared.log_format import escaped


class Progress(StatusLine):
    """The progress of a run on stderr: a changing line on a terminal, and a line for each result.

    `end_time` is the end of the run, a value of time.monotonic.
    """

    def __init__(self, end_time: float, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._end_time = end_time
        self._activity = ""

    def print_line(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(escaped(text), markup=False, soft_wrap=True)

    def show_activity(self, text: str, suffix: str = "") -> None:
        """Show the current activity and its progress, `suffix`; nothing is shown without a terminal."""
        self._activity = text
        if self._status is not None:
            remaining_s = self._end_time - time.monotonic()
            prefix = "" if math.isinf(remaining_s) else f"{_clock(remaining_s)} left · "
            self._status.update(f"{prefix}{text}{suffix}".replace("[", r"\["))

    def show_load(self, progress: LoadProgress) -> None:
        self.show_activity(
            self._activity, f" · {progress.answers:,} answers in {progress.seconds:.0f} s"
        )

    def show_round(self, number: int, rounds: int | None, progress: LoadProgress) -> None:
        """Show the progress of a round on a running server.

        `rounds` is None if their number is unknown.
        """
        remaining_s = (rounds - number if rounds else 1) * progress.of - progress.seconds
        name = f"round {number + 1} of {rounds}" if rounds else f"load {number + 1}"
        self.show_activity(
            name, f" · {progress.answers:,} answers, {max(0.0, remaining_s):.0f} s left"
        )

    def show_rows(self, count: int) -> None:
        self.show_activity(self._activity, f" · {count:,} rows")


def _clock(remaining_s: float) -> str:
    minutes, seconds = divmod(max(0, round(remaining_s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
