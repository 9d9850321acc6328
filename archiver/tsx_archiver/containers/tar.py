"""Archives in the format .tar.gz.

A tar file has no list of its members. Therefore a first pass checks every member, and a second one
unpacks them.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from tsx_archiver.containers.base import REFUSED, Member, MemberList, zip_bomb_error
from tsx_archiver.errors import (
    ArchiveTooLarge,
    CorruptMember,
    ForeignFile,
    LinkMember,
    SpecialMember,
    TruncatedArchive,
    UnsafePath,
)
from tsx_archiver.limits import MAX_MANIFEST_BYTES, MIB, Limits
from tsx_archiver.names import MANIFEST_PATH, safe_member_name, shown

_DAMAGE_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError, RecursionError)
_MAX_READ_BYTES = 4 * MIB


class TarContainer:
    """An open .tar.gz."""

    form = "tar.gz"

    def __init__(self, file: BinaryIO, source: str, limits: Limits) -> None:
        self._file = file
        self._source = source
        self._limits = limits
        self._size = file.seek(0, 2)
        self._manifests: dict[str, bytes] = {}
        members = MemberList(source, limits)
        for member, stream in self._walk():
            members.add(member)
            if member.name == MANIFEST_PATH or member.name.endswith("/" + MANIFEST_PATH):
                self._manifests[member.name] = _read(stream, MAX_MANIFEST_BYTES)
        self.members = members.finish()
        if limits.too_dense(members.total, self._size):
            raise zip_bomb_error(source, "the archive", members.total, self._size, limits)

    def stream(self) -> Iterator[tuple[Member, BinaryIO]]:
        """Yield each file member with a stream of its bytes.

        Raises:
            CorruptMember: The archive changed since it was opened.
        """
        expected = iter(self.members)
        for member, stream in self._walk():
            if member != next(expected, None):
                raise CorruptMember(
                    f"{self._source} changed while it was read. Try again once nothing writes"
                    " to it."
                )
            if not member.is_directory:
                yield member, stream

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a small member, or None if there is no such member.

        The manifest is kept in memory. Any other member costs a pass over the archive.
        """
        content = self._manifests.get(name)
        if content is None:
            content = next(
                (
                    _read(stream, max_bytes + 1)
                    for member, stream in self.stream()
                    if member.name == name
                ),
                None,
            )
        if content is not None and len(content) > max_bytes:
            raise CorruptMember(
                f"{self._source}: {shown(name)} has more than {max_bytes} bytes. Pack the model"
                " again."
            )
        return content

    def close(self) -> None:
        """Do nothing; the caller closes the file."""

    def _walk(self) -> Iterator[tuple[Member, BinaryIO]]:
        self._file.seek(0)
        with gzip.GzipFile(fileobj=self._file, mode="rb") as unpacked:
            stream = _ForwardReader(unpacked, self._size, self._source, self._limits)
            try:
                with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r:") as tar:
                    while (info := tar.next()) is not None:
                        member = _member(info, self._source)
                        if member is not None:
                            yield member, cast(BinaryIO, _MemberReader(tar, info, self._source))
                        # This frees memory. typeshed lacks the field.
                        tar.members = []  # type: ignore[attr-defined]
                    self._check_end(stream)
            except tarfile.ReadError as error:
                if stream.count <= tarfile.BLOCKSIZE:
                    raise self._foreign_error(error) from error
                raise self._damage_error(error) from error
            except _DAMAGE_ERRORS as error:
                raise self._damage_error(error) from error

    def _check_end(self, stream: _ForwardReader) -> None:
        """Check that the tar ended properly, and read on to gzip's checksum.

        tarfile reports an invalid header as the end of the archive.
        """
        if stream.last_chunk.strip(b"\0"):
            if stream.count <= tarfile.BLOCKSIZE:
                raise self._foreign_error("invalid header")
            raise self._damage_error("a member's header is invalid")
        while stream.read(MIB):
            pass

    def _foreign_error(self, reason: object) -> ForeignFile:
        return ForeignFile(
            f"{self._source} is gzipped, but does not contain a tar archive ({reason}). Pack the"
            " model with 'tsx archive'."
        )

    def _damage_error(self, reason: object) -> TruncatedArchive:
        return TruncatedArchive(
            f"{self._source} is damaged or truncated ({reason}). Copy or download it again."
        )


class _ForwardReader:
    """The unpacked bytes of a gzip file, as a file object for tarfile that seeks forwards only.

    A seek back would unpack everything again. The reader counts bytes, so that it notices a bomb in
    headers or after the last member. It refuses to read a very large header.
    """

    def __init__(self, stream: gzip.GzipFile, packed: int, source: str, limits: Limits) -> None:
        self._stream = stream
        self._packed = packed
        self._source = source
        self._limits = limits
        self.count = 0  # bytes unpacked so far
        # The last unpacked bytes are kept, because tarfile seeks back by one byte before a header.
        self.last_chunk = b""
        self._rewound_bytes = 0  # bytes at the end of `last_chunk` that will be read again

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes.

        Raises:
            ArchiveTooLarge: The archive is a zip bomb, or holds a very large header.
        """
        if not 0 <= size <= _MAX_READ_BYTES:
            raise ArchiveTooLarge(
                f"{self._source} holds a header of {size} bytes. {REFUSED} Pack the model again."
            )
        repeated = (
            self.last_chunk[len(self.last_chunk) - self._rewound_bytes :][:size]
            if self._rewound_bytes
            else b""
        )
        self._rewound_bytes -= len(repeated)
        unpacked = self._stream.read(size - len(repeated)) if size > len(repeated) else b""
        if size > len(repeated):
            self.last_chunk = unpacked
        self.count += len(unpacked)
        slack = self._limits.members * 4 * tarfile.BLOCKSIZE  # bytes of headers and padding
        if (
            self._limits.too_dense(self.count, self._packed)
            or self.count > self._limits.total + slack
        ):
            raise zip_bomb_error(
                self._source, "the archive", self.count, self._packed, self._limits
            )
        return repeated + unpacked

    def tell(self) -> int:
        """Return the position."""
        return self.count - self._rewound_bytes

    def seek(self, position: int) -> int:
        """Go to a position: forwards, or back within the last read."""
        while self.tell() < position:
            if not self.read(min(position - self.tell(), MIB)):
                break
        back = self.count - position
        if 0 <= back <= len(self.last_chunk):
            self._rewound_bytes = back
        elif back > 0:
            raise tarfile.ReadError(f"cannot go back to {position} from {self.count}")
        return self.tell()


class _MemberReader:
    """The stream of a member's bytes."""

    def __init__(self, tar: tarfile.TarFile, info: tarfile.TarInfo, source: str) -> None:
        self._stream = tar.extractfile(info)
        self._name = info.name
        self._source = source

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes.

        Raises:
            TruncatedArchive: The archive ends inside this member.
        """
        assert self._stream is not None
        try:
            return self._stream.read(size)
        except _DAMAGE_ERRORS as error:
            raise TruncatedArchive(
                f"{self._source} ends inside {shown(self._name)} ({error}). Copy or download it"
                " again."
            ) from error


def _member(info: tarfile.TarInfo, source: str) -> Member | None:
    name = safe_member_name(info.name, source)
    if info.issym() or info.islnk():
        raise LinkMember(
            f"{source}: {shown(info.name)} is a link to {shown(info.linkname)}. {REFUSED} Pack the"
            " file that it points to."
        )
    if not (info.isreg() or info.isdir()) or info.sparse is not None:
        kind = "sparse" if info.isreg() else "a device, a pipe or of an unknown type"
        raise SpecialMember(
            f"{source}: {shown(info.name)} is {kind}. {REFUSED} Pack the model again without it."
        )
    if not name:
        if info.isdir():
            return None
        raise UnsafePath(
            f"{source}: member {shown(info.name)} has no name. {REFUSED} Pack the model again."
        )
    return Member(name, info.size if info.isreg() else 0, None, info.isdir())


def _read(stream: BinaryIO, max_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < max_bytes and (chunk := stream.read(min(MIB, max_bytes - len(content)))):
        content += chunk
    return bytes(content)
