"""The memory of workers and of the files of their models."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tsx_runtime.core.workers.worker import Worker

MEGA = 1 << 20


def size_of_files(directory: Path) -> int:
    """Return the bytes of all files; a loaded model takes at least as much memory."""
    return sum(
        os.lstat(Path(parent, name)).st_size
        for parent, _, names in os.walk(directory)
        for name in names
    )


def memory_of(workers: Iterable[Worker]) -> int:
    """Return the memory of the workers' processes; this blocks.

    A page that several processes share counts in part for each, if the system reports it (PSS).
    """
    total = 0
    for process in processes_of(workers):
        with suppress(psutil.Error, OSError):  # The process may have ended.
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss)
    return total


def processes_of(workers: Iterable[Worker]) -> list[psutil.Process]:
    """Return the processes of workers, including those that end; this blocks."""
    processes: list[psutil.Process] = []
    for worker in workers:
        for running in (worker.instance, worker.successor, *list(worker.retiring)):
            with suppress(psutil.Error, OSError):
                processes += [] if running is None else running.process.members()
    return processes
