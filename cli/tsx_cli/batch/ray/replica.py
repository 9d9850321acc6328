"""One of the models that answer the rows on the nodes: an actor of Ray Data with tsx's own engine in it."""

from __future__ import annotations

import pickle
import platform
import threading
import time
from collections import deque
from contextlib import ExitStack
from itertools import cycle
from typing import Any, NamedTuple

import pyarrow

from tsx_archiver import ArchiveError
from tsx_cli.batch.local import LocalEngine, open_local
from tsx_cli.batch.readers import file_row
from tsx_cli.batch.rows import Row, RowResult
from tsx_cli.batch.sources import Source
from tsx_cli.common.failure import CliError
from tsx_runtime.errors import TsxError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.ray.archives import open_model
from tsx_runtime.targets.ray.config import RayModel

CHUNK, ANSWERS = "chunk", "answers"  # the columns of Ray Data's blocks


class ReplicaOrder(NamedTuple):
    model: RayModel
    settings: Settings
    batch_size: int | None
    seen: Source | None  # a file of the inputs, where the nodes read them


class Answers(NamedTuple):
    """Of one chunk of rows. With an `error` no row can be answered."""

    results: list[RowResult] = []
    seconds: float = 0.0
    batch_size: int = 1
    error: str = ""


class BatchReplica:
    """Two threads call it, so that its worker does not run dry."""

    def __init__(self, order: ReplicaOrder) -> None:
        self._order, self._stack, self._calibrating = order, ExitStack(), threading.Lock()
        self._engine: LocalEngine | None = None
        self._error = ""
        try:
            archive = self._stack.enter_context(open_model(order.model, order.settings))
            self._engine = self._stack.enter_context(open_local(archive.directory, order.settings, 1, order.batch_size))
        except (CliError, TsxError, ArchiveError, OSError) as error:
            self._error = self._where(error)

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        return pyarrow.table({ANSWERS: [pickle.dumps(self._answer(chunk)) for chunk in block[CHUNK].to_pylist()]})

    def _answer(self, chunk: bytes) -> Answers:
        if not chunk or self._engine is None:  # empty: it was answered before
            return Answers(error=self._error)
        engine, begun = self._engine, time.monotonic()
        try:
            rows = [self._read(row) for row in pickle.loads(chunk)]
            readable = [row for row in rows if row.error is None]
            with self._calibrating:
                if engine.batch_size is None and readable:
                    deque(engine.calibrate(cycle(readable)), maxlen=0)
                    begun = time.monotonic()
            answered = engine.run(iter(readable))
            results = [RowResult(row.index, row.id, 400, "", b"", row.error) if row.error is not None else next(answered) for row in rows]
            return Answers(results, time.monotonic() - begun, engine.batch_size or 1)
        except (CliError, TsxError) as error:
            return Answers(error=self._where(error))

    def _read(self, row: Row) -> Row:
        """Its body, where that is a file. Raises CliError on a node that does not see the inputs."""
        if row.source is None:
            return row
        found = file_row(row.source, row.next)
        if found.error is not None and self._order.seen is not None and not sees(self._order.seen):
            raise CliError(f"{self._order.seen.url} is not there: mount the inputs on all nodes, or put them into S3")
        return found._replace(index=row.index)

    def _where(self, error: Exception) -> str:
        return f"node {platform.node()}: {getattr(error, 'message', None) or error}"


def sees(source: Source) -> bool:
    """Whether this node reads the same file there."""
    return source == source.found()


def answers_of(block: Any) -> Answers:
    found: Answers = pickle.loads(block[ANSWERS][0].as_py())
    return found
