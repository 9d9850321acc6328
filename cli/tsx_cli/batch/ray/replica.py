"""A Ray Data actor that runs one copy of the model on a node.

It uses the engine of batch runs on one machine.
"""

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
from tsx_cli.batch.rows import Row, RowResult
from tsx_cli.common.failure import CliError
from tsx_runtime.errors import TsxError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.ray.archives import open_model
from tsx_runtime.targets.ray.config import RayModel

CHUNK, ANSWERS = "chunk", "answers"  # the columns of Ray Data's blocks


class ReplicaSpec(NamedTuple):
    model: RayModel
    settings: Settings
    batch_size: int | None


class Answers(NamedTuple):
    """The responses to a chunk of rows, or the `error` because of which there are none."""

    results: list[RowResult] = []
    seconds: float = 0.0
    batch_size: int = 1
    error: str = ""


class BatchReplica:
    """A copy of the model; two threads call it, so that its worker always has rows."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec, self._stack, self._calibration_lock = spec, ExitStack(), threading.Lock()
        self._engine: LocalEngine | None = None
        self._error = ""
        try:
            archive = self._stack.enter_context(open_model(spec.model, spec.settings))
            self._engine = self._stack.enter_context(
                open_local(archive.directory, spec.settings, 1, spec.batch_size)
            )
        except (CliError, TsxError, ArchiveError, OSError) as error:
            self._error = self._error_text(error)

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        return pyarrow.table(
            {ANSWERS: [pickle.dumps(self._answer(chunk)) for chunk in block[CHUNK].to_pylist()]}
        )

    def _answer(self, chunk: bytes) -> Answers:
        # If the driver already has the responses to a chunk, the coordinator sends an empty chunk.
        if not chunk or self._engine is None:
            return Answers(error=self._error)
        engine, start = self._engine, time.monotonic()
        try:
            rows: list[Row] = pickle.loads(chunk)
            with self._calibration_lock:
                if engine.batch_size is None and (
                    readable := [row for row in rows if row.error is None]
                ):
                    deque(engine.calibrate(cycle(readable)), maxlen=0)
                    start = time.monotonic()
            return Answers(
                list(engine.run(iter(rows))), time.monotonic() - start, engine.batch_size or 1
            )
        except (CliError, TsxError) as error:
            return Answers(error=self._error_text(error))

    def _error_text(self, error: Exception) -> str:
        return f"node {platform.node()}: {getattr(error, 'message', None) or error}"


def answers_of(block: Any) -> Answers:
    answers: Answers = pickle.loads(block[ANSWERS][0].as_py())
    return answers
