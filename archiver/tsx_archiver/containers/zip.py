"""Reads .mar files: the zip directory is checked first, the bytes while they are read."""

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

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LONGEST_COMMENT = 65535
_LOCAL_HEADER_SIZE = 30
_NAME_AND_EXTRA = struct.Struct("<2H")  # their lengths, at the end of a local header
_DIRECTORY_BYTES_PER_MEMBER = 512
_METHODS = {
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
        checked = MemberList(source, limits)
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            member = _member(info, source)
            if member is not None:
                checked.add(member)
                self._infos[member.name] = info
        _refuse_overlaps(infos, self._zip.start_dir, source)
        self.members = checked.finish()

    def stream(self) -> Iterator[tuple[Member, BinaryIO]]:
        for member in self.members:
            if not member.is_directory:
                with self.open(member) as stream:
                    yield member, stream

    def read(self, name: str, most: int) -> bytes | None:
        member = next(
            (member for member in self.members if member.name == name and not member.is_directory),
            None,
        )
        if member is None:
            return None
        if member.size > most:
            raise CorruptMember(
                f"{self._source}: {shown(name)} has {member.size} bytes; the limit is {most}. Pack"
                " the model again."
            )
        with self.open(member) as stream:
            return stream.read()

    def open(self, member: Member) -> BinaryIO:
        """The member's bytes. They are checked against length and CRC when the last one is read."""
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

    def stored(self) -> dict[str, bool]:
        """Whether each file member is there as it is, uncompressed."""
        return {
            name: info.compress_type == zipfile.ZIP_STORED
            for name, info in self._infos.items()
            if not info.is_dir()
        }

    def close(self) -> None:
        self._zip.close()


class _MemberReader:
    """A member's stream that raises our errors, and raises where the bytes end before the declared
    size.
    """

    def __init__(
        self, stream: object, source: str, member: Member, info: zipfile.ZipInfo, file: BinaryIO
    ) -> None:
        self._stream = cast(BinaryIO, stream)
        self._source = source
        self._member = member
        self._info = info
        self._file = file
        self._count = 0
        self._copied = False

    def plain_range(self) -> FileRange | None:
        """Where a stored member lies in the archive; `zipfile` has looked at the header before its
        bytes.
        """
        if self._info.compress_type != zipfile.ZIP_STORED:
            return None
        header = os.pread(self._file.fileno(), _LOCAL_HEADER_SIZE, self._info.header_offset)
        name, extra = _NAME_AND_EXTRA.unpack_from(header, _LOCAL_HEADER_SIZE - _NAME_AND_EXTRA.size)
        return FileRange(
            self._file.fileno(), self._info.header_offset + _LOCAL_HEADER_SIZE + name + extra
        )

    def check_copy(self, count: int, crc: int) -> None:
        if count == self._member.size and crc != self._info.CRC:
            raise self._damaged(f"Bad CRC-32 for file {shown(self._member.name)}")
        self._count, self._copied = count, True

    def read(self, size: int = -1) -> bytes:
        try:
            chunk = b"" if self._copied else self._stream.read(size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise self._damaged(error) from error
        self._count += len(chunk)
        if not chunk and size != 0 and self._count != self._member.size:
            raise CorruptMember(
                f"{self._source}: {shown(self._member.name)} has {self._count} bytes, not the"
                f" {self._member.size} it claims. Pack it again."
            )
        return chunk

    def _damaged(self, why: object) -> CorruptMember:
        return CorruptMember(
            f"{self._source}: {shown(self._member.name)} is damaged ({why}). Copy or download it"
            " again, or pack it again."
        )

    def __enter__(self) -> _MemberReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()


def _member(info: zipfile.ZipInfo, source: str) -> Member | None:
    """The checked member, or None for an entry of the archive's own root."""
    original = (
        info.orig_filename
    )  # zipfile cuts `filename` at a NUL, and on Windows turns backslashes
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
        method = _METHODS.get(info.compress_type, f"method {info.compress_type}")
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
    """Members that share bytes are how a small file unpacks to petabytes without a high ratio of
    any one.
    """
    following = end
    for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
        if (
            info.header_offset + _LOCAL_HEADER_SIZE + len(info.orig_filename) + info.compress_size
            > following
        ):
            raise CorruptMember(
                f"{source}: the bytes of {shown(info.filename)} overlap those of another member."
                f" {REFUSED} Pack the model again."
            )
        following = info.header_offset


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
    """Bytes of the central directory by the record at the file's end, read before `zipfile` reads
    all of it; None without such a record.
    """
    size = file.seek(0, 2)
    tail_size = min(size, _LONGEST_COMMENT + _END.size + _END64_LOCATOR.size)
    file.seek(size - tail_size)
    tail = file.read(tail_size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        return None
    directory = int(_END.unpack_from(tail, at)[5])
    locator = at - _END64_LOCATOR.size
    if locator >= 0 and tail.startswith(b"PK\x06\x07", locator):
        file.seek(min(_END64_LOCATOR.unpack_from(tail, locator)[2], size))
        record = file.read(_END64.size)
        if len(record) == _END64.size:
            directory = _END64.unpack(record)[8]
    file.seek(0)
    return directory
