"""Writes files atomically: a reader sees the old file or the new one, whatever happens to the
writer.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """`mode` is that of a new file, before the umask.

    Unless `durable`, a power failure may leave it empty.
    """
    partial = beside(path)
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


def beside(path: Path) -> Path:
    """A name that nothing has, in the same directory."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
