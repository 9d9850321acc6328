"""An actor in the cluster that runs the dataset.

It passes chunks of rows from the driver to the replicas, and returns the responses in order. The
driver may be a client (`ray://`), which cannot run a dataset itself.

A chunk is kept until its responses are on their way to the driver. The task that reads chunks can
therefore start again. In a full cluster, Ray would wait forever to restart a lost replica. Replicas
are therefore not restarted: the dataset fails, and the driver starts another on the nodes that
remain.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from tsx_cli.batch.ray.replica import CHUNK, Answers, BatchReplica, ReplicaSpec, answers_of

MAX_REPLICA_CHUNKS = 2  # chunks that a replica computes concurrently


class Coordinator:
    """An actor that is called by the threads of the driver and of the task that reads chunks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._chunks: dict[int, bytes] = {}
        self._answered_chunks = 0
        self._end: int | None = None

    def start(self, spec: ReplicaSpec, replicas: int, cpus: int, gpus: int) -> None:
        context = DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.target_max_block_size = 1  # A limit of 1 byte makes each chunk a block and a task.
        source = ChunkSource(ray.get_runtime_context().current_actor)
        dataset = ray.data.read_datasource(
            source, override_num_blocks=1, ray_remote_args={"num_cpus": 0}
        ).map_batches(
            BatchReplica,
            fn_constructor_args=(spec,),
            batch_size=1,  # A row of the dataset is a chunk; with GPUs, Ray requires a batch size.
            batch_format="pyarrow",
            compute=ActorPoolStrategy(min_size=1, max_size=replicas, initial_size=replicas),
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=MAX_REPLICA_CHUNKS,
            max_restarts=0,
            max_task_retries=0,
        )
        self._blocks = iter(
            dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
        )

    def feed(self, number: int, chunk: bytes | None) -> None:
        """Add the chunk of a number; None says that there are only `number` chunks."""
        with self._changed:
            if chunk is None:
                self._end = number
            else:
                self._chunks[number] = chunk
            self._changed.notify_all()

    def take(self, number: int) -> bytes | None:
        """Wait for a chunk, and return it; return None at the end.

        The chunk is empty if the driver already has its responses.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    number < self._answered_chunks or number in self._chunks or number == self._end
                )
            )
            return b"" if number < self._answered_chunks else self._chunks.get(number)

    def answers(self) -> Answers:
        """Return the responses of the next chunk, in order."""
        answers = answers_of(next(self._blocks))
        with self._changed:
            self._chunks.pop(self._answered_chunks)
            self._answered_chunks += 1
        return answers


class ChunkSource(Datasource):  # type: ignore[misc]  # mypy does not read Ray's incomplete types
    """The chunks as a stream of one block each."""

    def __init__(self, coordinator: Any) -> None:
        super().__init__()
        self._coordinator = coordinator

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        coordinator = self._coordinator

        def read() -> Iterator[pyarrow.Table]:
            number = 0
            while (chunk := ray.get(coordinator.take.remote(number))) is not None:
                yield pyarrow.table({CHUNK: [chunk]})
                number += 1

        return [
            ReadTask(
                read,
                BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None),
            )
        ]
