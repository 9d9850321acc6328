"""The sha-256 of a file, cached while the file does not change."""

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
from tsx_archiver.storage.atomic_file import whole_file

# A file that was written this shortly ago could be written again within the same tick of the file
# system's clock.
FRESH_NS = 2_000_000_000


def content_digest(file: BinaryIO, count: Callable[[int], None] = lambda size: None) -> str:
    """sha-256 of what is left of the stream. `count` is called with the bytes of each piece."""
    digest = hashlib.sha256()
    while chunk := file.read(MIB):
        digest.update(chunk)
        count(len(chunk))
    return digest.hexdigest()


def file_digest(
    file: BinaryIO,
    path: Path,
    seen: Path | None = None,
    count: Callable[[int], None] = lambda size: None,
) -> str:
    """The digest of the open `file`, which was opened from `path`; notes are kept in the directory
    `seen`. `count`: see above.
    """
    state = _state(os.fstat(file.fileno()))
    note = seen / hashlib.sha256(os.fsencode(path.absolute())).hexdigest() if seen else None
    known = _read_note(note, state) if note else None
    if known:
        return known
    file.seek(0)
    digest = content_digest(file, count)
    file.seek(0)
    after = os.fstat(file.fileno())
    if note and _state(after) == state and time.time_ns() - after.st_mtime_ns > FRESH_NS:
        _write_note(note, {"state": state, "sha256": digest})
    return digest


def file_state(file: BinaryIO) -> list[int]:
    """Changes when the file does."""
    return _state(os.fstat(file.fileno()))


def _state(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev, status.st_ctime_ns]


def _read_note(note: Path, state: list[int]) -> str | None:
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
        if content["state"] != state:
            return None
        digest = str(content["sha256"])
        os.utime(note)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if len(digest) == 64 and digest.isalnum() else None


def _write_note(note: Path, content: dict[str, object]) -> None:
    with (
        suppress(OSError),
        whole_file(note, mode=0o600, durable=False) as file,
    ):  # else the file is read again
        file.write(json.dumps(content).encode())
