"""Atomic writing: a reader sees the old file or the new one, whatever happens to the writer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def write_atomically(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` at the end of the context.

    Args:
        path: The file to write.
        mode: The permissions of the file, before the umask.
        durable: Whether the file survives a power failure right after.
    """
    partial = partial_path(path)
    try:
        with open(partial, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_path(path: Path) -> Path:
    """Return an unused name in the directory of `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
