"""Waits on the event loop for the end of a process, or for a pipe."""

from __future__ import annotations

import asyncio
import os


def open_pidfd(pid: int) -> int | None:
    """A descriptor that stands for the process; None where the system has none, or the process is gone already."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def readable(fd: int, timeout: float | None = None) -> bool:
    """Whether it was in time."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _resolve, ready)
    try:
        done, _ = await asyncio.wait([ready], timeout=timeout)
        return bool(done)
    finally:
        loop.remove_reader(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
