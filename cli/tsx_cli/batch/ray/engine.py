"""The driver's side of the batch engine on a Ray cluster.

It divides the rows into chunks, and keeps enough chunks in flight for the replicas.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from tsx_archiver import inspect_archive
from tsx_cli.batch.ray.coordinator import MAX_REPLICA_CHUNKS, Coordinator
from tsx_cli.batch.ray.replica import Answers, ReplicaSpec
from tsx_cli.batch.rows import Row, RowResult
from tsx_cli.batch.summary import counted
from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.common.failure import CliError
from tsx_cli.common.options import archive_limits
from tsx_cli.deploy.ray.cluster import connect
from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.ray.archives import HEAD_RESOURCES, upload
from tsx_runtime.targets.ray.config import OBJECT, RayModel
from tsx_runtime.version import __version__

CHUNK_S = 1.0  # target time for computing a chunk on a replica
MAX_ATTEMPTS = 3  # attempts to get the same chunk's responses
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 16, 4096
MAX_CHUNK_BYTES = 8 << 20


class ClusterLayout(NamedTuple):
    replicas: int
    cpus: int  # per replica
    gpus: int  # per replica


def layout(
    nodes: list[dict[str, float]], threads: int | None, replicas: int | None, gpus: bool
) -> ClusterLayout:
    """Return as many replicas as the nodes have capacity for, unless `replicas` is given.

    A replica has as many CPUs as its worker has threads, and a GPU if the cluster has any.
    """
    cpus = threads or 1
    gpu_count = 1 if gpus and any(node.get("GPU") for node in nodes) else 0
    capacities = (
        min(node.get("CPU", 0) // cpus, node.get("GPU", 0) if gpu_count else MAX_CHUNK_ROWS)
        for node in nodes
    )
    return ClusterLayout(replicas or max(1, int(sum(capacities))), cpus, gpu_count)


@contextmanager
def open_ray(
    address: str, model: Path, settings: Settings, replicas: int | None, batch_size: int | None
) -> Iterator[RayEngine]:
    """Open the engine on a Ray cluster.

    Raises:
        CliError: The model is a directory, or the cluster cannot be used.
        ArchiveError: The archive cannot be read.
    """
    if model.is_dir():
        raise CliError(
            f"{model} is a directory, and nodes check an archive by its sha-256: pack it with `tsx"
            " archive`"
        )
    with _connect_to(address):
        inspection, record = inspect_archive(model, limits=archive_limits()), read_record(model)
        digest = upload(model)
        threads = inspection.config.threads or (
            record.best.configuration.get("threads") if record else None
        )
        nodes = [node for node in ray.nodes() if node["Alive"]]
        cluster = layout(
            [node["Resources"] for node in nodes], threads, replicas, settings.number_of_gpu != 0
        )
        replica_text = f"{counted(cluster.replicas, 'replica')} on {counted(len(nodes), 'node')}"
        print(
            f"{replica_text}, {counted(cluster.cpus, 'CPU')} and {counted(cluster.gpus, 'GPU')} each",
            file=sys.stderr,
        )
        # The setting names a directory of this machine, so nodes use their default.
        node_settings = settings.model_copy(update={"cpus": cluster.cpus, "cache_dir": None})
        ray_model = RayModel(
            name=inspection.manifest.model_name, source=f"{OBJECT}{digest}", sha256=digest
        )
        yield RayEngine(ReplicaSpec(ray_model, node_settings, batch_size), cluster)


@contextmanager
def _connect_to(address: str) -> Iterator[None]:
    """Connect to a cluster whose nodes have this version of tsx.

    Raises:
        CliError: The versions differ, or the cluster failed.
    """
    connect(address)
    try:
        version = ray.get(ray.remote(num_cpus=0)(_version).remote())
        if version != __version__:
            raise CliError(
                f"--on {address}: the nodes have tsx-serve {version}, and this machine has"
                f" {__version__}; install the same"
            )
        yield
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise CliError(
            f"--on {address}: {reason}. The same command continues where the output ends; the nodes"
            " need tsx-serve[ray]"
        ) from error
    finally:
        ray.shutdown()


def _version() -> str:
    return __version__


class RayEngine:
    """A `BatchEngine` on a Ray cluster."""

    def __init__(self, spec: ReplicaSpec, cluster: ClusterLayout) -> None:
        self.batch_size = spec.batch_size
        self._spec, self._layout, self._chunk_rows = spec, cluster, MIN_CHUNK_ROWS

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        pending, fed_chunks, has_more, attempts = deque[bytes](), 0, True, 0
        coordinator = self._start(pending, has_more)
        try:
            while True:
                try:
                    while (
                        has_more
                        and len(pending) < 2 + 2 * MAX_REPLICA_CHUNKS * self._layout.replicas
                    ):
                        chunk = self._next_chunk(rows)
                        has_more = bool(chunk)
                        pending += [pickle.dumps(chunk)] if chunk else []
                        ray.get(coordinator.feed.remote(fed_chunks, pending[-1] if chunk else None))
                        fed_chunks += has_more
                    if not pending:
                        return
                    answers = Answers(*ray.get(coordinator.answers.remote()))
                except RayError:
                    attempts += 1
                    if attempts == MAX_ATTEMPTS:
                        raise
                    ray.kill(coordinator)
                    coordinator, fed_chunks = self._start(pending, has_more), len(pending)
                    continue
                if answers.error:
                    raise CliError(answers.error)
                pending.popleft()
                attempts, self.batch_size = 0, answers.batch_size
                self._chunk_rows = max(
                    MIN_CHUNK_ROWS,
                    2 * answers.batch_size,
                    min(
                        MAX_CHUNK_ROWS,
                        round(CHUNK_S * len(answers.results) / max(answers.seconds, 1e-3)),
                    ),
                )
                yield from answers.results
        finally:
            ray.kill(coordinator)  # The replicas end with it.

    def _start(self, pending: Iterable[bytes], has_more: bool) -> Any:
        kind: Any = ray.remote(Coordinator)
        coordinator = kind.options(
            num_cpus=0, resources=HEAD_RESOURCES, max_concurrency=4 + MAX_REPLICA_CHUNKS
        ).remote()
        ray.get(coordinator.start.remote(self._spec, *self._layout))
        for number, chunk in enumerate([*pending, *([] if has_more else [None])]):
            ray.get(coordinator.feed.remote(number, chunk))
        return coordinator

    def _next_chunk(self, rows: Iterator[Row]) -> list[Row]:
        chunk, size = list[Row](), 0
        while (
            len(chunk) < self._chunk_rows
            and size < MAX_CHUNK_BYTES
            and (row := next(rows, None)) is not None
        ):
            chunk.append(row)
            size += len(row.body)
        return chunk
