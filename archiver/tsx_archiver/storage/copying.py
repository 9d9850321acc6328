"""Copies between files in the kernel: blocks are shared or copied there, where the file systems can
do so.

What was copied is read back from the target, so that a checksum is that of the bytes written,
whatever happens to the source meanwhile.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, Protocol, runtime_checkable

from tsx_archiver.limits import MIB

LEAST = 4 * MIB  # below it, starting threads costs more than it saves
_PIECE = 8 * MIB
_CAN_COPY = hasattr(os, "copy_file_range")
_REFUSALS = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EPERM,
)  # of file systems and sandboxes that cannot


class FileRange(NamedTuple):
    """Bytes of an open file, from `start` on."""

    descriptor: int
    start: int

    def moved(self, by: int) -> FileRange:
        return FileRange(self.descriptor, self.start + by)


@runtime_checkable
class PlainSource(Protocol):
    """A stream whose bytes may lie in a file as they are."""

    def plain_range(self) -> FileRange | None:
        """None where they do not."""

    def check_copy(self, count: int, crc: int) -> None:
        """Raises where the bytes that were copied, by their number and CRC-32, cannot be those of
        the stream.
        """


class InputFile(io.FileIO):
    """A file that may be copied as a whole."""

    def plain_range(self) -> FileRange | None:
        return FileRange(self.fileno(), self.tell())

    def check_copy(self, count: int, crc: int) -> None:
        """The position goes with the copy, so that a caller can look for more."""
        self.seek(count, os.SEEK_CUR)


def copy_plain(
    stream: object, target: BinaryIO, size: int, take: Callable[[memoryview], None]
) -> int | None:
    """Copy the stream's `size` bytes in the kernel to the position of `target`, which must be
    readable too; returns their CRC-32.

    `take` gets each piece as it is in the target; fewer bytes in all where the source ends before.
    While a piece is looked at, a thread copies the next. None, and nothing was done, where the
    bytes do not lie in a file as they are, or are too few.
    """
    source = (
        stream.plain_range()
        if _CAN_COPY and size >= LEAST and isinstance(stream, PlainSource)
        else None
    )
    if source is None or not isinstance(stream, PlainSource):
        return None
    target.flush()
    place = FileRange(target.fileno(), target.tell())
    buffer = memoryview(bytearray(min(size, _PIECE)))
    crc = done = 0
    with ThreadPoolExecutor(2) as threads:
        count = copy_range(source, place, min(size, _PIECE))
        while count:
            following = done + count
            ahead = threads.submit(
                copy_range,
                source.moved(following),
                place.moved(following),
                min(size - following, _PIECE),
            )
            piece = _read(place.moved(done), buffer[:count])
            summed = threads.submit(zlib.crc32, piece, crc)
            take(piece)
            crc, done, count = summed.result(), following, ahead.result()
    target.seek(place.start + done)
    stream.check_copy(done, crc)
    return crc


def copy_file_content(source: BinaryIO, target: BinaryIO, size: int) -> None:
    """Into a new file, in the kernel where it can."""
    if _CAN_COPY:
        copy_range(FileRange(source.fileno(), 0), FileRange(target.fileno(), 0), size)
    else:
        shutil.copyfileobj(source, target, MIB)


def copy_range(source: FileRange, target: FileRange, size: int) -> int:
    """How many bytes were copied: fewer than `size` where the source ends before."""
    done = 0
    while done < size and (
        count := _copy_some(source.moved(done), target.moved(done), size - done)
    ):
        done += count
    return done


def _copy_some(source: FileRange, target: FileRange, size: int) -> int:
    try:
        if count := os.copy_file_range(
            source.descriptor, target.descriptor, size, source.start, target.start
        ):
            return count
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    return os.pwrite(
        target.descriptor, os.pread(source.descriptor, min(size, MIB), source.start), target.start
    )


def _read(place: FileRange, into: memoryview) -> memoryview:
    read = 0
    while read < len(into):
        count = os.preadv(place.descriptor, [into[read:]], place.start + read)
        if not count:
            raise OSError(errno.EIO, "the copy was cut short while it was read back")
        read += count
    return into
