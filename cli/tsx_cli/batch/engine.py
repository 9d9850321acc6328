"""What computes the results: this machine, a cluster, a service."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from tsx_cli.batch.rows import Row, RowResult


class BatchEngine(Protocol):
    """Entered for the time of a run, as a context manager that yields it. `run` may be called again once its results are all there."""

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        """One result for each row, in the order of the rows.

        It takes rows ahead of its results within a bound of its own, from one thread. `rows` ends early where the run is to stop: what was
        taken is still answered. A row that fails is a result with an `error`; raises CliError or TsxError where no further row can succeed.
        """


OpenEngine = AbstractContextManager[BatchEngine]
