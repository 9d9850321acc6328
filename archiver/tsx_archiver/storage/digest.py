"""The SHA-256 of a file, cached until the file changes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tsx_archiver.limits import MIB
from tsx_archiver.storage.atomic_file import write_atomically

# A younger file may change again within the same tick of the file system's clock, which would not
# show in its times. Therefore its digest is not recorded.
MIN_AGE_NS = 2_000_000_000


def content_digest(file: BinaryIO, count: Callable[[int], None] = lambda size: None) -> str:
    """Return the SHA-256 of the remaining bytes, and call `count` with the size of each chunk."""
    digest = hashlib.sha256()
    while chunk := file.read(MIB):
        digest.update(chunk)
        count(len(chunk))
    return digest.hexdigest()


def file_digest(
    file: BinaryIO,
    path: Path,
    record_directory: Path | None = None,
    count: Callable[[int], None] = lambda size: None,
) -> str:
    """Return the SHA-256 of a file, from an earlier record if the file has not changed.

    Args:
        file: The open file.
        path: The path of the file.
        record_directory: The directory of the records, or None.
        count: Called with the size of each chunk that is read.
    """
    state = _state(os.fstat(file.fileno()))
    record = (
        record_directory / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
        if record_directory
        else None
    )
    recorded_digest = _read_record(record, state) if record else None
    if recorded_digest:
        return recorded_digest
    file.seek(0)
    digest = content_digest(file, count)
    file.seek(0)
    status = os.fstat(file.fileno())
    if record and _state(status) == state and time.time_ns() - status.st_mtime_ns > MIN_AGE_NS:
        _write_record(record, {"state": state, "sha256": digest})
    return digest


def file_state(file: BinaryIO) -> list[int]:
    """Return numbers that differ after every change of the file."""
    return _state(os.fstat(file.fileno()))


def _state(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev, status.st_ctime_ns]


def _read_record(record: Path, state: list[int]) -> str | None:
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        if content["state"] != state:
            return None
        digest = str(content["sha256"])
        os.utime(record)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if len(digest) == 64 and digest.isalnum() else None


def _write_record(record: Path, content: dict[str, object]) -> None:
    # If the record cannot be written, the next call reads the file again.
    with suppress(OSError), write_atomically(record, mode=0o600, durable=False) as file:
        file.write(json.dumps(content).encode())
