"""The errors of archives and of packing, as one tree.

    ArchiveError
    ├── CannotPack
    │   ├── InputMissing           a file to pack does not exist
    │   ├── DuplicateInput         two files would have one name inside the archive
    │   ├── InvalidModelName
    │   └── OutputExists
    ├── InvalidConfig              model-config.yaml cannot be used
    ├── InvalidManifest            MANIFEST.json is unusable, or names a file outside the archive
    ├── CannotOpen
    │   ├── ArchiveNotFound
    │   ├── EmptyArchive
    │   ├── TruncatedArchive
    │   ├── ForeignFile            a file of another kind
    │   └── CorruptMember          a member's bytes differ from the archive's headers
    │       └── WrongChecksum      a member's SHA-256 differs from the manifest's
    ├── UnsafeArchive
    │   ├── UnsafePath             a member would land outside the directory
    │   ├── LinkMember
    │   ├── SpecialMember          a device, pipe, socket or sparse member
    │   ├── DuplicateMember
    │   ├── ArchiveTooLarge        unpacked size, or the ratio of a zip bomb
    │   ├── TooManyMembers
    │   ├── EncryptedMember
    │   └── UnsupportedCompression
    └── CacheError                 the cache directory cannot be used

A message says what was wrong, with which value, and what to do next.
"""

from __future__ import annotations


class ArchiveError(Exception):
    """The base class of the package's errors; `message` is the text for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class CannotPack(ArchiveError):
    pass


class InputMissing(CannotPack, FileNotFoundError):
    """A file to pack does not exist; also a FileNotFoundError, as TorchServe's archiver raises."""


class DuplicateInput(CannotPack):
    pass


class InvalidModelName(CannotPack):
    pass


class OutputExists(CannotPack):
    pass


class InvalidConfig(ArchiveError):
    pass


class InvalidManifest(ArchiveError):
    pass


class CannotOpen(ArchiveError):
    pass


class ArchiveNotFound(CannotOpen):
    pass


class EmptyArchive(CannotOpen):
    pass


class TruncatedArchive(CannotOpen):
    pass


class ForeignFile(CannotOpen):
    pass


class CorruptMember(CannotOpen):
    pass


class WrongChecksum(CorruptMember):
    pass


class UnsafeArchive(ArchiveError):
    pass


class UnsafePath(UnsafeArchive):
    pass


class LinkMember(UnsafeArchive):
    pass


class SpecialMember(UnsafeArchive):
    pass


class DuplicateMember(UnsafeArchive):
    pass


class ArchiveTooLarge(UnsafeArchive):
    pass


class TooManyMembers(UnsafeArchive):
    pass


class EncryptedMember(UnsafeArchive):
    pass


class UnsupportedCompression(UnsafeArchive):
    pass


class CacheError(ArchiveError):
    """`reason` is the message without the place, for callers that name the place themselves."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
