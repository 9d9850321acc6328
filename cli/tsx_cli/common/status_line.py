"""The line on stderr that shows what a command does."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from rich.console import Console
from rich.status import Status

Self = TypeVar("Self", bound="StatusLine")


class StatusLine:
    """A line that changes on a terminal. Where there is no terminal, `_status` is None."""

    def __init__(self, text: str = "", *, quiet: bool = False) -> None:
        self._text = text
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._status: Status | None = None

    def __enter__(self: Self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            self._status = self._console.status(self._text)
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            with suppress(OSError):  # The terminal may be gone.
                self._status.stop()
            self._status = None

    def update(self, text: str) -> None:
        """Change the text of the line."""
        if self._status is not None:
            self._status.update(text)
