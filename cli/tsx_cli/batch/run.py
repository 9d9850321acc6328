"""A run: rows from the reader through the engine to the writer, committed to the journal part by part."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from tsx_cli.batch.engine import BatchEngine
from tsx_cli.batch.journal import BatchJournal, Checkpoint
from tsx_cli.batch.readers import RowReader
from tsx_cli.batch.rows import Position, Row, RowResult
from tsx_cli.batch.writers import Writer
from tsx_cli.common.failure import CliError

PART = 32 << 20  # bytes of answers, with which a part is written whatever its age
PART_ROWS = 100_000
UNREADABLE = 50_000  # rows whose results may be to come when one cannot be read
ENOUGH = 100  # rows, of which a share of errors says something
SHOWN = 0.2  # seconds between two calls of `progress`


class MaxErrors(NamedTuple):
    """The run ends with more errors than `rows`, or than that `share` of the rows that are done. None: no limit."""

    rows: int | None = None
    share: float | None = None

    def exceeded(self, errors: int, rows: int, *, over: bool) -> bool:
        many = self.rows is not None and errors > self.rows
        return many or (self.share is not None and (over or rows >= ENOUGH) and errors > self.share * rows)


NO_LIMIT = MaxErrors()


@dataclass
class Tally:
    """`rows` and `errors` are those of the whole output; `before` were there when this run began."""

    rows: int
    errors: int
    before: int
    seconds: float  # of this run
    total_seconds: float  # of all runs
    position: Position  # behind the last row
    first_error: str = ""  # of this run
    finished: bool = False  # the output is whole; else the run was stopped


def run_batch(
    engine: BatchEngine,
    reader: RowReader,
    writer: Writer,
    journal: BatchJournal,
    *,
    stop: threading.Event,
    max_errors: MaxErrors = NO_LIMIT,
    progress: Callable[[Tally], None] = lambda tally: None,
    commit_every: float = 5.0,
) -> Tally:
    """Go on where the journal says, until the output is whole or `stop` is set: what the engine has taken is finished and committed.

    Raises CliError for too many errors, after a commit, and what reader, engine and writer raise.
    """
    return _BatchRun(engine, reader, writer, journal, stop, max_errors, progress, commit_every).run()


class _BatchRun:
    def __init__(
        self,
        engine: BatchEngine,
        reader: RowReader,
        writer: Writer,
        journal: BatchJournal,
        stop: threading.Event,
        max_errors: MaxErrors,
        progress: Callable[[Tally], None],
        commit_every: float,
    ) -> None:
        self._engine, self._reader, self._writer, self._journal = engine, reader, writer, journal
        self._stop, self._max_errors, self._progress, self._every = stop, max_errors, progress, commit_every
        self._kept = before = journal.progress
        self._begun = self._committed = self._shown = time.monotonic()
        self.tally = Tally(before.rows, before.errors, before.rows, 0.0, before.seconds, before.position)
        self._seconds = before.seconds
        self._exhausted = False  # all rows were taken
        self._taken: deque[Row] = deque()  # without their bodies: rows whose results are still to come
        self._results: list[RowResult] = []  # of the next part
        self._size = 0
        self._thread = ThreadPoolExecutor(1, "writer")
        self._written: Future[None] | None = None

    def run(self) -> Tally:
        tally = self.tally
        with self._thread:
            if not self._kept.complete:
                with closing(self._reader.rows(tally.position, tally.rows)) as rows:
                    self._answer(rows)
                self._check_errors(over=self._exhausted)
                self._commit(complete=self._exhausted)
                self._wait()
            if self._kept.complete:
                self._writer.finish(self._kept.parts)
                tally.finished = True
        self._show(time.monotonic())
        return tally

    def _answer(self, rows: Iterator[Row]) -> None:
        while not (self._exhausted or self._stop.is_set()):
            with closing(self._engine.run(self._readable(rows))) as results:
                for result in results:
                    self._add_unreadable(result.index)
                    self._add(result, self._taken.popleft().next)
            self._add_unreadable(None)

    def _readable(self, rows: Iterator[Row]) -> Iterator[Row]:
        """For the engine. It ends early where many rows in a row cannot be read, so that their results do not pile up."""
        for row in rows:
            self._taken.append(row._replace(body=b""))
            if row.error is None:
                yield row
            if self._stop.is_set() or (row.error is not None and len(self._taken) > UNREADABLE):
                return
        self._exhausted = True

    def _add_unreadable(self, before: int | None) -> None:
        """Results of the rows that the engine did not get, up to this index."""
        while self._taken and (before is None or self._taken[0].index < before):
            row = self._taken.popleft()
            if row.error is None:
                raise CliError(f"the result of row {row.index} ({row.id}) is missing")  # the engine broke its promise
            self._add(RowResult(row.index, row.id, 400, "", b"", row.error), row.next)

    def _add(self, result: RowResult, position: Position) -> None:
        tally = self.tally
        self._results.append(result)
        self._size += len(result.body)
        tally.rows, tally.position = tally.rows + 1, position
        if result.error is not None:
            tally.errors += 1
            tally.first_error = tally.first_error or f"{result.id}: {result.error}"
            self._check_errors(over=False)
        now = time.monotonic()
        if now - self._shown >= SHOWN:
            self._show(now)
        if self._size >= PART or len(self._results) >= PART_ROWS or now - self._committed >= self._every:
            self._commit(complete=False)

    def _check_errors(self, *, over: bool) -> None:
        tally = self.tally
        if self._max_errors.exceeded(tally.errors, tally.rows, over=over):
            self._commit(complete=False)
            self._wait()
            why = f"; one is {tally.first_error}" if tally.first_error else ""
            raise CliError(f"{tally.errors:,} of {tally.rows:,} rows failed, more than --max-errors allows{why}")

    def _show(self, now: float) -> None:
        self._shown, self.tally.seconds = now, now - self._begun
        self.tally.total_seconds = self._seconds + self.tally.seconds
        self._progress(self.tally)

    def _commit(self, *, complete: bool) -> None:
        """Has one thread write what there is, while the next rows are computed; waits for the part before."""
        self._wait()
        now = time.monotonic()
        tally, results = self.tally, self._results
        if not results and not complete:
            return
        seconds = self._seconds + now - self._begun
        parts = self._kept.parts + bool(results)
        self._kept = Checkpoint(tally.rows, tally.errors, parts, seconds, complete, tally.position)
        self._results, self._size, self._committed = [], 0, now
        self._written = self._thread.submit(self._write, self._kept, results)

    def _write(self, progress: Checkpoint, results: list[RowResult]) -> None:
        if results:
            self._writer.write(progress.parts, results)
        self._journal.commit(progress)

    def _wait(self) -> None:
        if self._written is not None:
            written, self._written = self._written, None
            written.result()
