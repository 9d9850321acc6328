"""A run: rows from the reader through the engine to the writer, committed to the journal part by
part.
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

from tsx_cli.batch.journal import BatchJournal, Checkpoint
from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.rows import BatchEngine, Position, Row, RowResult
from tsx_cli.batch.writers import Writer
from tsx_cli.common.failure import CliError

PART = 32 << 20  # bytes of answers, with which a part is written whatever its age
PART_ROWS = 100_000
SHARE_FROM = 100  # rows: of fewer, a share of errors says little
PROGRESS_EVERY = 0.2  # seconds between two calls of `progress`


class MaxErrors(NamedTuple):
    """The run ends with more errors than `rows`, or than that `share` of the rows that are done.

    None: no limit.
    """

    rows: int | None = None
    share: float | None = None

    def exceeded(self, errors: int, rows: int, *, over: bool) -> bool:
        many = self.rows is not None and errors > self.rows
        return many or (
            self.share is not None and (over or rows >= SHARE_FROM) and errors > self.share * rows
        )


NO_LIMIT = MaxErrors()


class BatchRun:
    """`before`: where the journal had it begin; `done`: how far it is, with rows whose commit is
    still to come.
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
        self._stop, self._max_errors, self._progress, self._every = (
            stop,
            max_errors,
            progress,
            commit_every,
        )
        self.before, self.done = journal.progress, replace(journal.progress)
        self.first_error = ""
        self._begun = self._committed = self._shown = time.monotonic()
        self._exhausted = False  # all rows were taken
        self._positions: deque[Position] = (
            deque()
        )  # behind the rows whose results are still to come
        self._results: list[RowResult] = []  # of the next part
        self._size = 0
        self._thread = ThreadPoolExecutor(1, "writer")
        self._written: Future[None] | None = None

    @property
    def seconds(self) -> float:
        return self.done.seconds - self.before.seconds

    def run(self) -> None:
        """Until the output is whole (`done.complete`) or `stop` is set: what the engine has taken
        is finished and committed.

        Raises CliError for too many errors, after a commit, and what reader, engine and writer
        raise.
        """
        done = self.done
        with self._thread:
            if not done.complete:
                with (
                    closing(self._reader.rows(done.position, done.rows)) as rows,
                    closing(self._engine.run(self._taken(rows))) as results,
                ):
                    for result in results:
                        self._add(result)
                self._check_errors(over=self._exhausted)
                done.complete = self._exhausted
                self._commit()
                self._wait()
            if done.complete:
                self._writer.finish(done.parts)
        self._show()

    def _taken(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            if self._stop.is_set():  # the row may be cut: see `Sources.end_stdin`
                return
            self._positions.append(row.next)
            yield row
        self._exhausted = not self._stop.is_set()

    def _add(self, result: RowResult) -> None:
        done = self.done
        assert result.index == done.rows, "the engine's promise"
        self._results.append(result)
        self._size += len(result.body)
        done.rows, done.position = done.rows + 1, self._positions.popleft()
        if result.error is not None:
            done.errors += 1
            self.first_error = self.first_error or f"{result.id}: {result.error}"
            self._check_errors(over=False)
        now = time.monotonic()
        if now - self._shown >= PROGRESS_EVERY:
            self._show()
        if (
            self._size >= PART
            or len(self._results) >= PART_ROWS
            or now - self._committed >= self._every
        ):
            self._commit()

    def _check_errors(self, *, over: bool) -> None:
        done = self.done
        if self._max_errors.exceeded(done.errors, done.rows, over=over):
            self._commit()
            self._wait()
            why = f"; one is {self.first_error}" if self.first_error else ""
            text = (
                f"{done.errors:,} of {done.rows:,} rows failed, more than --max-errors allows{why}"
            )
            raise CliError(f"{text}. The same command with a higher limit continues the run")

    def _show(self) -> None:
        self._shown = time.monotonic()
        self.done.seconds = self.before.seconds + self._shown - self._begun
        self._progress(self)

    def _commit(self) -> None:
        """Has one thread write what there is, while the next rows are computed; waits for the part
        before.
        """
        self._wait()
        done, results, now = self.done, self._results, time.monotonic()
        if not results and not done.complete:
            return
        done.parts += bool(results)
        done.seconds = self.before.seconds + now - self._begun
        self._results, self._size, self._committed = [], 0, now
        self._written = self._thread.submit(self._write, replace(done), results)

    def _write(self, progress: Checkpoint, results: list[RowResult]) -> None:
        if results:
            self._writer.write(progress.parts, results)
        self._journal.commit(progress)

    def _wait(self) -> None:
        if self._written is not None:
            written, self._written = self._written, None
            written.result()
