"""Archives in the format .mar, which are zip files.

The list of members is checked when the archive is opened, and a member's bytes while they are read.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from tsx_archiver.containers.base import REFUSED, Member, MemberList
from tsx_archiver.errors import (
    CorruptMember,
    EncryptedMember,
    LinkMember,
    SpecialMember,
    TooManyMembers,
    TruncatedArchive,
    UnsafePath,
    UnsupportedCompression,
)
from tsx_archiver.limits import Limits
from tsx_archiver.names import safe_member_name, shown
from tsx_archiver.storage.copying import FileRange

# The end of the central directory, its zip64 locator, and its zip64 form (APPNOTE.TXT, 4.3.14 to
# 4.3.16).
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_MAX_COMMENT_BYTES = 65535
_LOCAL_HEADER_SIZE = 30
# The lengths of the name and of the extra field, at the end of a local header.
_NAME_AND_EXTRA = struct.Struct("<2H")
_DIRECTORY_BYTES_PER_MEMBER = 512
_METHOD_NAMES = {
    1: "shrink",
    6: "implode",
    9: "deflate64",
    12: "bzip2",
    14: "lzma",
    93: "zstd",
    95: "xz",
    99: "AES encryption",
}


class ZipContainer:
    """An open .mar."""

    form = "mar"

    def __init__(self, file: BinaryIO, source: str, limits: Limits) -> None:
        self._source = source
        self._file = file
        _refuse_huge_directory(file, source, limits)
        try:
            self._zip = zipfile.ZipFile(file)
        except (
            zipfile.BadZipFile,
            ValueError,
            OSError,
            NotImplementedError,
            struct.error,
        ) as error:
            raise TruncatedArchive(
                f"{source} begins as a zip file but its directory cannot be read ({error}). Copy or"
                " download it again."
            ) from error
        infos = self._zip.infolist()
        members = MemberList(source, limits)
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            member = _member(info, source)
            if member is not None:
                members.add(member)
                self._infos[member.name] = info
        _refuse_overlaps(infos, self._zip.start_dir, source)
        self.members = members.finish()

    def stream(self) -> Iterator[tuple[Member, BinaryIO]]:
        """Yield each file member with a stream of its bytes."""
        for member in self.members:
            if not member.is_directory:
                with self.open(member) as stream:
                    yield member, stream

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a small member, or None if there is no such member."""
        member = next(
            (member for member in self.members if member.name == name and not member.is_directory),
            None,
        )
        if member is None:
            return None
        if member.size > max_bytes:
            raise CorruptMember(
                f"{self._source}: {shown(name)} has {member.size} bytes; the limit is {max_bytes}."
                " Pack the model again."
            )
        with self.open(member) as stream:
            return stream.read()

    def open(self, member: Member) -> BinaryIO:
        """Open a member; reading to the end checks the number of bytes and their CRC-32."""
        try:
            info = self._infos[member.name]
            return cast(
                BinaryIO,
                _MemberReader(self._zip.open(info), self._source, member, info, self._file),
            )
        except (
            zipfile.BadZipFile,
            ValueError,
            struct.error,
            OSError,
            NotImplementedError,
        ) as error:
            raise CorruptMember(
                f"{self._source}: {shown(member.name)} cannot be read ({error}). Copy or download"
                " the file again."
            ) from error

    def stored_by_name(self) -> dict[str, bool]:
        """Return whether each file member is stored without compression, by its name."""
        return {
            name: info.compress_type == zipfile.ZIP_STORED
            for name, info in self._infos.items()
            if not info.is_dir()
        }

    def close(self) -> None:
        """Release the archive; the caller closes the file itself."""
        self._zip.close()


class _MemberReader:
    """The stream of a member's bytes, which checks that they have the declared size."""

    def __init__(
        self, stream: object, source: str, member: Member, info: zipfile.ZipInfo, file: BinaryIO
    ) -> None:
        self._stream = cast(BinaryIO, stream)
        self._source = source
        self._member = member
        self._info = info
        self._file = file
        self._count = 0
        self._is_copied = False

    def plain_range(self) -> FileRange | None:
        """Return the position of a stored member's bytes, or None if the member is compressed."""
        if self._info.compress_type != zipfile.ZIP_STORED:
            return None
        header = os.pread(self._file.fileno(), _LOCAL_HEADER_SIZE, self._info.header_offset)
        name, extra = _NAME_AND_EXTRA.unpack_from(header, _LOCAL_HEADER_SIZE - _NAME_AND_EXTRA.size)
        return FileRange(
            self._file.fileno(), self._info.header_offset + _LOCAL_HEADER_SIZE + name + extra
        )

    def check_copy(self, count: int, crc: int) -> None:
        """Check bytes that were copied elsewhere.

        Raises:
            CorruptMember: The CRC-32 differs from the archive's.
        """
        if count == self._member.size and crc != self._info.CRC:
            raise self._damage_error(f"Bad CRC-32 for file {shown(self._member.name)}")
        self._count, self._is_copied = count, True

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes.

        Raises:
            CorruptMember: The bytes are damaged, or not as many as declared.
        """
        try:
            chunk = b"" if self._is_copied else self._stream.read(size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise self._damage_error(error) from error
        self._count += len(chunk)
        if not chunk and size != 0 and self._count != self._member.size:
            raise CorruptMember(
                f"{self._source}: {shown(self._member.name)} has {self._count} bytes, not the"
                f" {self._member.size} it claims. Pack it again."
            )
        return chunk

    def _damage_error(self, reason: object) -> CorruptMember:
        return CorruptMember(
            f"{self._source}: {shown(self._member.name)} is damaged ({reason}). Copy or download it"
            " again, or pack it again."
        )

    def __enter__(self) -> _MemberReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()


def _member(info: zipfile.ZipInfo, source: str) -> Member | None:
    """Check a member, and return None for the archive's root directory."""
    # zipfile cuts `filename` at a NUL, and replaces backslashes on Windows.
    original = info.orig_filename
    name = safe_member_name(original, source)
    mode = info.external_attr >> 16
    if stat.S_ISLNK(mode):
        raise LinkMember(
            f"{source}: {shown(original)} is a link. {REFUSED} Pack the file that it points to."
        )
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise SpecialMember(
            f"{source}: {shown(original)} is a device, a pipe or a socket. {REFUSED} Pack the model"
            " again without it."
        )
    if info.flag_bits & 0x41:
        raise EncryptedMember(
            f"{source}: {shown(original)} is encrypted. {REFUSED} Pack the model again without a"
            " password."
        )
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        method = _METHOD_NAMES.get(info.compress_type, f"method {info.compress_type}")
        raise UnsupportedCompression(
            f"{source}: {shown(original)} is compressed by {method}. {REFUSED} Pack the model"
            " again, deflated or stored."
        )
    is_directory = original.endswith("/")
    if not name:
        if is_directory:
            return None
        raise UnsafePath(
            f"{source}: member {shown(original)} has no name. {REFUSED} Pack the model again."
        )
    if is_directory and info.file_size:
        raise UnsafePath(
            f"{source}: directory {shown(original)} claims to hold {info.file_size} bytes."
            f" {REFUSED} Pack the model again."
        )
    if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
        raise CorruptMember(
            f"{source}: {shown(original)} is stored in {info.compress_size} bytes but claims"
            f" {info.file_size}. Pack the model again."
        )
    return Member(name, info.file_size, info.compress_size, is_directory)


def _refuse_overlaps(infos: list[zipfile.ZipInfo], end: int, source: str) -> None:
    """Refuse members that share bytes, which let a small file unpack to petabytes."""
    next_start = end
    for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
        if (
            info.header_offset + _LOCAL_HEADER_SIZE + len(info.orig_filename) + info.compress_size
            > next_start
        ):
            raise CorruptMember(
                f"{source}: the bytes of {shown(info.filename)} overlap those of another member."
                f" {REFUSED} Pack the model again."
            )
        next_start = info.header_offset


def _refuse_huge_directory(file: BinaryIO, source: str, limits: Limits) -> None:
    directory = directory_size(file)
    if directory is None:
        raise TruncatedArchive(
            f"{source} begins as a zip file but ends before its directory: it is truncated. Copy or"
            " download it again."
        )
    if directory > limits.members * _DIRECTORY_BYTES_PER_MEMBER:
        raise TooManyMembers(
            f"{source} has a directory of {directory} bytes, too many for {limits.members} members."
            f" {REFUSED} Raise max_archive_files only if you know the archive."
        )


def directory_size(file: BinaryIO) -> int | None:
    """Return the size of the central directory in bytes, from the record at the end of the file.

    Returns:
        None if the file has no such record.
    """
    size = file.seek(0, 2)
    tail_size = min(size, _MAX_COMMENT_BYTES + _END.size + _END64_LOCATOR.size)
    file.seek(size - tail_size)
    tail = file.read(tail_size)
    offset = tail.rfind(b"PK\x05\x06")
    if offset < 0 or offset + _END.size > len(tail):
        return None
    directory = int(_END.unpack_from(tail, offset)[5])
    locator = offset - _END64_LOCATOR.size
    if locator >= 0 and tail.startswith(b"PK\x06\x07", locator):
        file.seek(min(_END64_LOCATOR.unpack_from(tail, locator)[2], size))
        record = file.read(_END64.size)
        if len(record) == _END64.size:
            directory = _END64.unpack(record)[8]
    file.seek(0)
    return directory
