"""`ts.metrics.process_memory_metric`: the resident memory of processes."""

import logging
import sys
from typing import TextIO

import psutil

__all__ = ["check_process_mem_usage", "get_cpu_usage"]

logger = logging.getLogger("tsx.worker")


def get_cpu_usage(pid: int | str) -> int:
    """Resident bytes, in spite of its name; 0 for a process that is not there."""
    try:
        return int(psutil.Process(int(pid)).memory_info().rss)
    except psutil.NoSuchProcess:
        logger.error("there is no process %s", pid)
        return 0


def check_process_mem_usage(stdin: TextIO) -> None:
    """Process ids, parted by commas, from `stdin`; a line `pid:bytes` for each to the standard output."""
    for pid in stdin.readline().strip().split(","):
        if pid:
            sys.stdout.write(f"{int(pid)}:{get_cpu_usage(pid)}\n")
