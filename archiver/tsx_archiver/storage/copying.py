"""Copies between files by copy_file_range, which lets a file system share blocks.

The copy is read back from the target, so that a checksum covers the written bytes even if the
source changes meanwhile.
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

MIN_SIZE_BYTES = 4 * MIB  # Threads do not pay off for a smaller copy.
_CHUNK_BYTES = 8 * MIB
_CAN_COPY = hasattr(os, "copy_file_range")
# Errors of file systems and sandboxes without copy_file_range.
_UNSUPPORTED = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


class FileRange(NamedTuple):
    """The bytes of an open file from `start` to its end."""

    descriptor: int
    start: int

    def skip(self, offset: int) -> FileRange:
        """Return the range that begins `offset` bytes later."""
        return FileRange(self.descriptor, self.start + offset)


@runtime_checkable
class PlainSource(Protocol):
    """A stream whose bytes may exist in a file as they are, without compression."""

    def plain_range(self) -> FileRange | None:
        """Return the range of the bytes in the file, or None if they are compressed."""

    def check_copy(self, count: int, crc: int) -> None:
        """Check bytes that were copied.

        Raises:
            CorruptMember: The number or the CRC-32 of the bytes differs from the stream's.
        """


class InputFile(io.FileIO):
    """A file that may be copied as a whole."""

    def plain_range(self) -> FileRange | None:
        """Return the range that begins at the current position."""
        return FileRange(self.fileno(), self.tell())

    def check_copy(self, count: int, crc: int) -> None:
        """Move the position past the copied bytes."""
        self.seek(count, os.SEEK_CUR)


def copy_plain(
    stream: object, target: BinaryIO, size: int, on_chunk: Callable[[memoryview], None]
) -> int | None:
    """Copy the bytes of a stream in the kernel, and return their CRC-32.

    A thread copies the next chunk while `on_chunk` handles one.

    Args:
        stream: The source, which may be a `PlainSource`.
        target: A file that is open for reading and writing, at the position of the copy.
        size: The number of bytes. The copy is shorter if the source ends earlier.
        on_chunk: Called with each chunk, as read back from the target.

    Returns:
        None, without any effect, if the bytes are compressed or too few.
    """
    source = (
        stream.plain_range()
        if _CAN_COPY and size >= MIN_SIZE_BYTES and isinstance(stream, PlainSource)
        else None
    )
    if source is None or not isinstance(stream, PlainSource):
        return None
    target.flush()
    target_range = FileRange(target.fileno(), target.tell())
    buffer = memoryview(bytearray(min(size, _CHUNK_BYTES)))
    crc = done = 0
    with ThreadPoolExecutor(2) as executor:
        count = copy_range(source, target_range, min(size, _CHUNK_BYTES))
        while count:
            copied_size = done + count
            next_count = executor.submit(
                copy_range,
                source.skip(copied_size),
                target_range.skip(copied_size),
                min(size - copied_size, _CHUNK_BYTES),
            )
            chunk = _read_back(target_range.skip(done), buffer[:count])
            next_crc = executor.submit(zlib.crc32, chunk, crc)
            on_chunk(chunk)
            crc, done, count = next_crc.result(), copied_size, next_count.result()
    target.seek(target_range.start + done)
    stream.check_copy(done, crc)
    return crc


def copy_file_content(source: BinaryIO, target: BinaryIO, size: int) -> None:
    """Copy a file into a new one, in the kernel if the system supports it."""
    if _CAN_COPY:
        copy_range(FileRange(source.fileno(), 0), FileRange(target.fileno(), 0), size)
    else:
        shutil.copyfileobj(source, target, MIB)


def copy_range(source: FileRange, target: FileRange, size: int) -> int:
    """Copy at most `size` bytes, and return their number."""
    done = 0
    while done < size and (count := _copy_once(source.skip(done), target.skip(done), size - done)):
        done += count
    return done


def _copy_once(source: FileRange, target: FileRange, size: int) -> int:
    try:
        if count := os.copy_file_range(
            source.descriptor, target.descriptor, size, source.start, target.start
        ):
            return count
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return os.pwrite(
        target.descriptor, os.pread(source.descriptor, min(size, MIB), source.start), target.start
    )


def _read_back(source: FileRange, buffer: memoryview) -> memoryview:
    offset = 0
    while offset < len(buffer):
        count = os.preadv(source.descriptor, [buffer[offset:]], source.start + offset)
        if not count:
            raise OSError(errno.EIO, "the copy was cut short while it was read back")
        offset += count
    return buffer
