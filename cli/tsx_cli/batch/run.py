"""A batch run: it passes rows from the reader through the engine to the writer.

After each part of the output it commits its progress to the journal.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from tsx_archiver.quantities import parse_share
from tsx_cli.batch.journal import BatchJournal, Checkpoint
from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.rows import BatchEngine, Position, Row, RowResult
from tsx_cli.batch.writers import Writer
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import read_option

MAX_PART_BYTES = 32 << 20
MAX_PART_ROWS = 100_000
MIN_FRACTION_ROWS = 100  # Before, a fraction of errors means little.
PROGRESS_INTERVAL_S = 0.2


class MaxErrors(NamedTuple):
    """The errors that a run allows: a number, or a fraction of the finished rows.

    None means that there is no limit.
    """

    rows: int | None = None
    share: float | None = None

    def exceeded(self, errors: int, rows: int, *, is_finished: bool) -> bool:
        exceeds_number = self.rows is not None and errors > self.rows
        return exceeds_number or (
            self.share is not None
            and (is_finished or rows >= MIN_FRACTION_ROWS)
            and errors > self.share * rows
        )


NO_LIMIT = MaxErrors()


def parse_max_errors(text: str | None) -> MaxErrors:
    """Parse --max-errors.

    Raises:
        UsageError: The text is neither a number nor a percentage.
    """
    if text is None:
        return NO_LIMIT
    usage = "a number of rows such as 100, or a share of them such as 1%"
    if text.strip().isdecimal():
        return MaxErrors(rows=int(text))
    share = read_option(parse_share, text, "--max-errors", usage)
    if not (text.strip().endswith("%") and 0 <= share <= 1):
        raise UsageError(f"--max-errors takes {usage}, not {text!r}")
    return MaxErrors(share=share)


class BatchRun:
    """A run over all rows.

    `before` is the progress at its start. `done` is the current progress, including rows that are
    not committed yet.
    """

    def __init__(
        self,
        engine: BatchEngine,
        reader: InputReader,
        writer: Writer,
        journal: BatchJournal,
        *,
        stop: threading.Event,
        max_errors: MaxErrors = NO_LIMIT,
        progress: Callable[[BatchRun], None] = lambda run: None,
        commit_every: float = 5.0,
    ) -> None:
        self._engine, self._reader, self._writer, self._journal = engine, reader, writer, journal
        self._stop, self._max_errors, self._on_progress = stop, max_errors, progress
        self._commit_interval_s = commit_every
        self.before, self.done = journal.progress, replace(journal.progress)
        self.first_error = ""
        self._start_time = self._commit_time = self._show_time = time.monotonic()
        self._is_exhausted = False  # whether all rows were taken
        self._positions: deque[Position] = deque()  # next positions of rows without results
        self._results: list[RowResult] = []  # results of the next part
        self._size_bytes = 0
        self._writer_thread = ThreadPoolExecutor(1, "writer")
        self._pending_write: Future[None] | None = None

    @property
    def seconds(self) -> float:
        return self.done.seconds - self.before.seconds

    def run(self) -> None:
        """Run until the output is complete (`done.complete`) or `stop` is set.

        Rows that the engine has taken are finished and committed. Errors of the reader, the engine
        and the writer pass through.

        Raises:
            CliError: Too many rows failed; they are committed.
        """
        done = self.done
        with self._writer_thread:
            if not done.complete:
                with (
                    closing(self._reader.rows(done.position, done.rows)) as rows,
                    closing(self._engine.run(self._take_rows(rows))) as results,
                ):
                    for result in results:
                        self._add(result)
                self._check_errors(is_finished=self._is_exhausted)
                done.complete = self._is_exhausted
                self._commit()
                self._wait()
            if done.complete:
                self._writer.finish(done.parts)
        self._show()

    def _take_rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            if self._stop.is_set():  # `Sources.end_stdin` may have cut the row off.
                return
            self._positions.append(row.next_position)
            yield row
        self._is_exhausted = not self._stop.is_set()

    def _add(self, result: RowResult) -> None:
        done = self.done
        assert result.index == done.rows, "the engine's promise"
        self._results.append(result)
        self._size_bytes += len(result.body)
        done.rows, done.position = done.rows + 1, self._positions.popleft()
        if result.error is not None:
            done.errors += 1
            self.first_error = self.first_error or f"{result.id}: {result.error}"
            self._check_errors(is_finished=False)
        now = time.monotonic()
        if now - self._show_time >= PROGRESS_INTERVAL_S:
            self._show()
        if (
            self._size_bytes >= MAX_PART_BYTES
            or len(self._results) >= MAX_PART_ROWS
            or now - self._commit_time >= self._commit_interval_s
        ):
            self._commit()

    def _check_errors(self, *, is_finished: bool) -> None:
        done = self.done
        if self._max_errors.exceeded(done.errors, done.rows, is_finished=is_finished):
            self._commit()
            self._wait()
            example = f"; one is {self.first_error}" if self.first_error else ""
            counts = f"{done.errors:,} of {done.rows:,} rows failed"
            text = f"{counts}, more than --max-errors allows{example}"
            raise CliError(f"{text}. The same command with a higher limit continues the run")

    def _show(self) -> None:
        self._show_time = time.monotonic()
        self.done.seconds = self.before.seconds + self._show_time - self._start_time
        self._on_progress(self)

    def _commit(self) -> None:
        """Wait until the previous part is written, and let a thread write the next part."""
        self._wait()
        done, results, now = self.done, self._results, time.monotonic()
        if not results and not done.complete:
            return
        done.parts += bool(results)
        done.seconds = self.before.seconds + now - self._start_time
        self._results, self._size_bytes, self._commit_time = [], 0, now
        self._pending_write = self._writer_thread.submit(self._write, replace(done), results)

    def _write(self, progress: Checkpoint, results: list[RowResult]) -> None:
        if results:
            self._writer.write(progress.parts, results)
        self._journal.commit(progress)

    def _wait(self) -> None:
        if self._pending_write is not None:
            future, self._pending_write = self._pending_write, None
            future.result()
