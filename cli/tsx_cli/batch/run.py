"""A run: rows from the reader through the engine to the writer, committed to the journal on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tsx_cli.batch.engine import Engine
from tsx_cli.batch.journal import Journal
from tsx_cli.batch.readers import Reader
from tsx_cli.batch.writers import Writer


@dataclass(frozen=True)
class MaxErrors:
    """The run ends once more rows than `rows`, or a greater share than `share` of those done, have failed; None: no limit."""

    rows: int | None = None
    share: float | None = None


@dataclass
class Tally:
    """`rows` and `errors` are those of the whole output, `before` the rows of earlier runs of the same command."""

    rows: int = 0
    errors: int = 0
    before: int = 0
    seconds: float = 0.0  # of this run
    finished: bool = False  # otherwise it was stopped


def run_batch(
    engine: Engine,
    reader: Reader,
    writer: Writer,
    journal: Journal,
    *,
    stop: threading.Event,
    max_errors: MaxErrors = MaxErrors(),
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Go on where the journal says, until all rows are written or `stop` is set. Raises CliError for too many errors."""
    raise NotImplementedError
