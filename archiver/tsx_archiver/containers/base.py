"""The interface of zip and tar.gz files: a checked list of members, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple, Protocol

from tsx_archiver.errors import ArchiveTooLarge, DuplicateMember, EmptyArchive, TooManyMembers
from tsx_archiver.limits import Limits, human
from tsx_archiver.names import MANIFEST_DIRECTORIES, collision_key, shown

REFUSED = "Nothing was unpacked."


class Member(NamedTuple):
    """A file or directory of an archive; sizes are in bytes."""

    name: str  # normalized, see safe_member_name
    size: int
    packed: int | None  # compressed size; None in a tar.gz, which is compressed as a whole
    is_directory: bool = False


class ArchiveFile(Protocol):
    """An open archive file, whose members are checked when it is opened."""

    form: str
    members: list[Member]

    def stream(self) -> Iterator[tuple[Member, BinaryIO]]:
        """Yield each file member in the archive's order, with a stream of its bytes.

        The stream must be read before the next member. It never yields more than the declared
        size.
        """

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a small member, or None if there is no such member.

        Raises:
            CorruptMember: The member has more than `max_bytes`.
        """

    def close(self) -> None:
        """Release the archive; the caller closes the file itself."""


class MemberList:
    """The members found so far; an unsafe member is refused as soon as it is added."""

    def __init__(self, source: str, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        self.members: list[Member] = []
        self.total = 0
        # The sums over all members above the ratio: many small zip bombs are as harmful as one
        # large bomb.
        self._dense = self._dense_packed = 0
        self._by_key: dict[str, Member] = {}

    def add(self, member: Member) -> None:
        """Check a member against the limits, and add it.

        Raises:
            UnsafeArchive: The member exceeds a limit, or another one has its name.
        """
        if len(self.members) >= self.limits.members:
            raise TooManyMembers(
                f"{self.source} holds more than {self.limits.members} members. {REFUSED} "
                "Raise max_archive_files only if you know the archive."
            )
        self.total += member.size
        if self.total > self.limits.total:
            raise ArchiveTooLarge(
                f"{self.source} would unpack to more than {human(self.limits.total)}, according to"
                f" its headers. {REFUSED} Raise max_archive_size only if you know the archive."
            )
        if member.packed is not None and self.limits.is_dense(member.size, member.packed):
            self._dense, self._dense_packed = (
                self._dense + member.size,
                self._dense_packed + member.packed,
            )
            if self._dense > self.limits.ratio_floor:
                raise zip_bomb_error(
                    self.source,
                    f"member {shown(member.name)}",
                    self._dense,
                    self._dense_packed,
                    self.limits,
                )
        self._refuse_duplicate(member)
        self.members.append(member)

    def _refuse_duplicate(self, member: Member) -> None:
        key = collision_key(member.name)
        existing = self._by_key.get(key)
        if existing is not None and not (existing.is_directory and member.is_directory):
            raise DuplicateMember(
                f"{self.source} has two members for one file, {shown(existing.name)} and"
                f" {shown(member.name)}. {REFUSED} Pack it again."
            )
        self._by_key[key] = member

    def finish(self) -> list[Member]:
        """Return all members, after a check that no file is also the directory of another one."""
        for member in self.members:
            parts = collision_key(member.name).split("/")
            for depth in range(1, len(parts)):
                parent = self._by_key.get("/".join(parts[:depth]))
                if parent is not None and not parent.is_directory:
                    raise DuplicateMember(
                        f"{self.source} holds {shown(parent.name)} both as a file and as the"
                        f" directory of {shown(member.name)}. {REFUSED} Pack the model again."
                    )
        if all(member.is_directory for member in self.members):
            raise EmptyArchive(f"{self.source} is an archive without files. Pack the model again.")
        return self.members


def zip_bomb_error(
    source: str, part: str, size: int, packed: int, limits: Limits
) -> ArchiveTooLarge:
    """Return the error for a zip bomb."""
    return ArchiveTooLarge(
        f"{source}: {part} unpacks from {human(packed)} to {human(size)}, more than {limits.ratio}"
        f" times its size, as zip bombs do, and more than {human(limits.ratio_floor)}. {REFUSED}"
        " Raise max_dense_archive_size only if you know the archive."
    )


def root_of(members: Sequence[Member]) -> str:
    """Return the directory of the model inside the archive.

    If all files lie in one top-level directory, as in TorchServe's .tar.gz, it is that directory.
    Otherwise it is the archive's root, an empty string.
    """
    directories = set()
    for member in members:
        top, slash, _ = member.name.partition("/")
        if top.startswith(".") or top == "__MACOSX":  # hidden files, and those of macOS
            continue
        if not slash and not member.is_directory:
            return ""
        directories.add(top)
    directory = directories.pop() if len(directories) == 1 else ""
    return "" if directory in MANIFEST_DIRECTORIES else directory
