"""The format of an archive file, detected by its first bytes."""

from __future__ import annotations

from typing import BinaryIO

from tsx_archiver.containers.base import ArchiveFile
from tsx_archiver.containers.tar import TarContainer
from tsx_archiver.containers.zip import ZipContainer
from tsx_archiver.errors import EmptyArchive, ForeignFile, TruncatedArchive
from tsx_archiver.limits import Limits


def open_container(file: BinaryIO, source: str, limits: Limits) -> ArchiveFile:
    """Open an archive file in the format that its first bytes show, whatever its name.

    Raises:
        ArchiveError: The file is not an archive, or is unsafe.
    """
    head = file.read(4)
    file.seek(0)
    if not head:
        raise EmptyArchive(f"{source} is empty (0 bytes). Copy or download it again.")
    if head in (b"PK\x03\x04", b"PK\x05\x06"):
        return ZipContainer(file, source, limits)
    if head[:2] == b"\x1f\x8b":
        return TarContainer(file, source, limits)
    if b"PK\x03\x04".startswith(head) or head == b"\x1f":
        raise TruncatedArchive(
            f"{source} is truncated: it has {len(head)} bytes. Copy or download it again."
        )
    raise ForeignFile(
        f"{source} is not a model archive (it begins with {head!r}). A .mar is a zip file and a"
        f" .tar.gz is gzipped; {foreign_hint(head)}"
    )


def foreign_hint(head: bytes) -> str:
    """Return advice for a file of another kind, by its first bytes."""
    if head[:1] == b"<":
        return "this looks like a web page: download the file itself."
    if head == b"vers":
        return "this looks like a Git LFS pointer: run 'git lfs pull'."
    if head[:1] == b"\x80":
        return "this looks like a model file: pack it with 'tsx archive'."
    return "check the file name, or pack a model with 'tsx archive'."
