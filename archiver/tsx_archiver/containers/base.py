"""One interface for zip and tar.gz: a checked list of members, and their bytes, never more than
declared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple, Protocol

from tsx_archiver.errors import (
    ArchiveTooLarge,
    DuplicateMember,
    EmptyArchive,
    TooManyMembers,
)
from tsx_archiver.limits import Limits, human
from tsx_archiver.names import MANIFEST_DIRECTORIES, collision_key, shown

REFUSED = "Nothing was unpacked."


class Member(NamedTuple):
    name: str  # in its safe spelling
    size: int
    packed: int | None  # None where the form compresses the archive as a whole
    is_directory: bool = False


class ArchiveFile(Protocol):
    """An open archive file. The constructor has checked `members` and raises if anything is
    unsafe.
    """

    form: str
    members: list[Member]

    def stream(self) -> Iterator[tuple[Member, BinaryIO]]:
        """Each file member once, in the archive's order, with a stream of its bytes that must be
        read before going on.
        """

    def read(self, name: str, most: int) -> bytes | None:
        """The bytes of a small member, at most `most` of them; None where there is no such
        member.
        """

    def close(self) -> None: ...


class MemberList:
    """Collects members as they are found, and refuses an unsafe set as early as possible."""

    def __init__(self, source: str, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        self.members: list[Member] = []
        self.total = 0
        self._dense = self._dense_packed = (
            # of all members that unpack to so much more than their size: many small bombs are one
            0
        )
        self._seen: dict[str, Member] = {}

    def add(self, member: Member) -> None:
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
                raise too_dense(
                    self.source,
                    f"member {shown(member.name)}",
                    self._dense,
                    self._dense_packed,
                    self.limits,
                )
        self._refuse_twin(member)
        self.members.append(member)

    def _refuse_twin(self, member: Member) -> None:
        key = collision_key(member.name)
        twin = self._seen.get(key)
        if twin is not None and not (twin.is_directory and member.is_directory):
            raise DuplicateMember(
                f"{self.source} has two members for one file, {shown(twin.name)} and"
                f" {shown(member.name)}. {REFUSED} Pack it again."
            )
        self._seen[key] = member

    def finish(self) -> list[Member]:
        """No file may also be the directory of another member."""
        for member in self.members:
            parts = collision_key(member.name).split("/")
            for depth in range(1, len(parts)):
                above = self._seen.get("/".join(parts[:depth]))
                if above is not None and not above.is_directory:
                    raise DuplicateMember(
                        f"{self.source} holds {shown(above.name)} both as a file and as the"
                        f" directory of {shown(member.name)}. {REFUSED} Pack the model again."
                    )
        if all(member.is_directory for member in self.members):
            raise EmptyArchive(f"{self.source} is an archive without files. Pack the model again.")
        return self.members


def too_dense(source: str, what: str, size: int, packed: int, limits: Limits) -> ArchiveTooLarge:
    return ArchiveTooLarge(
        f"{source}: {what} unpacks from {human(packed)} to {human(size)}, more than {limits.ratio}"
        f" times its size, as zip bombs do, and more than {human(limits.ratio_floor)}. {REFUSED}"
        " Raise max_dense_archive_size only if you know the archive."
    )


def root_of(members: Sequence[Member]) -> str:
    """The directory inside the archive that is the model's: empty, or the only one at the top, as
    in TorchServe's .tar.gz.
    """
    tops = set()
    for member in members:
        top, slash, _ = member.name.partition("/")
        if top.startswith(".") or top == "__MACOSX":  # what file managers leave behind
            continue
        if not slash and not member.is_directory:
            return ""
        tops.add(top)
    only = tops.pop() if len(tops) == 1 else ""
    return "" if only in MANIFEST_DIRECTORIES else only
