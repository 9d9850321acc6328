"""The engine on a Ray cluster, on the driver's side: cuts the rows into chunks, and keeps as many
under way as the replicas need.
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
from tsx_cli.batch.ray.coordinator import AT_ONCE, Coordinator
from tsx_cli.batch.ray.replica import Answers, ReplicaOrder
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

SECONDS = 1.0  # that a replica is to work on a chunk
TRIES = 3  # to get an answer after the loss of nodes
LEAST, MOST = 16, 4096  # rows of a chunk
LARGEST = 8 << 20  # bytes of one


class ClusterLayout(NamedTuple):
    replicas: int
    cpus: int  # of each
    gpus: int


def layout(
    nodes: list[dict[str, float]], threads: int | None, replicas: int | None, gpus: bool
) -> ClusterLayout:
    """As many replicas as the nodes have room for, each with as many CPUs as its worker has
    threads, and a GPU where there are any.
    """
    cpus = threads or 1
    each = 1 if gpus and any(node.get("GPU") for node in nodes) else 0
    room = (min(node.get("CPU", 0) // cpus, node.get("GPU", 0) if each else MOST) for node in nodes)
    return ClusterLayout(replicas or max(1, int(sum(room))), cpus, each)


@contextmanager
def open_ray(
    address: str, model: Path, settings: Settings, replicas: int | None, batch_size: int | None
) -> Iterator[RayEngine]:
    """Raises CliError, ArchiveError."""
    if model.is_dir():
        raise CliError(
            f"{model} is a directory, and nodes check an archive by its sha-256: pack it with `tsx"
            " archive`"
        )
    with _connected(address):
        inspection, record = inspect_archive(model, limits=archive_limits()), read_record(model)
        digest = upload(model)
        threads = inspection.config.threads or (
            record.best.configuration.get("threads") if record else None
        )
        nodes = [node for node in ray.nodes() if node["Alive"]]
        found = layout(
            [node["Resources"] for node in nodes], threads, replicas, settings.number_of_gpu != 0
        )
        places = f"{counted(found.replicas, 'replica')} on {counted(len(nodes), 'node')}"
        print(
            f"{places}, {counted(found.cpus, 'CPU')} and {counted(found.gpus, 'GPU')} each",
            file=sys.stderr,
        )
        own = settings.model_copy(
            update={"cpus": found.cpus, "cache_dir": None}
        )  # which is this machine's
        known = RayModel(
            name=inspection.manifest.model_name, source=f"{OBJECT}{digest}", sha256=digest
        )
        yield RayEngine(ReplicaOrder(known, own, batch_size), found)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Raises CliError."""
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
    """See `BatchEngine`."""

    def __init__(self, order: ReplicaOrder, found: ClusterLayout) -> None:
        self.batch_size = order.batch_size
        self._order, self._layout, self._size = order, found, LEAST

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        pending, fed, more, tries = deque[bytes](), 0, True, 0  # `pending`: chunks without answers
        coordinator = self._start(pending, more)
        try:
            while True:
                try:
                    while more and len(pending) < 2 + 2 * AT_ONCE * self._layout.replicas:
                        chunk = self._chunk(rows)
                        more = bool(chunk)
                        pending += [pickle.dumps(chunk)] if chunk else []
                        ray.get(coordinator.feed.remote(fed, pending[-1] if chunk else None))
                        fed += more
                    if not pending:
                        return
                    found = Answers(*ray.get(coordinator.answers.remote()))
                except RayError:
                    tries += 1
                    if tries == TRIES:
                        raise
                    ray.kill(coordinator)
                    coordinator, fed = self._start(pending, more), len(pending)
                    continue
                if found.error:
                    raise CliError(found.error)
                pending.popleft()
                tries, self.batch_size = 0, found.batch_size
                self._size = max(
                    LEAST,
                    2 * found.batch_size,
                    min(MOST, round(SECONDS * len(found.results) / max(found.seconds, 1e-3))),
                )
                yield from found.results
        finally:
            ray.kill(coordinator)  # and with it the replicas

    def _start(self, pending: Iterable[bytes], more: bool) -> Any:
        kind: Any = ray.remote(Coordinator)
        coordinator = kind.options(
            num_cpus=0, resources=HEAD_RESOURCES, max_concurrency=4 + AT_ONCE
        ).remote()
        ray.get(coordinator.start.remote(self._order, *self._layout))
        for number, chunk in enumerate([*pending, *([] if more else [None])]):
            ray.get(coordinator.feed.remote(number, chunk))
        return coordinator

    def _chunk(self, rows: Iterator[Row]) -> list[Row]:
        chunk, size = list[Row](), 0
        while len(chunk) < self._size and size < LARGEST and (row := next(rows, None)) is not None:
            chunk.append(row)
            size += len(row.body)
        return chunk
