"""Atomic changes to an existing archive: members are added, replaced or removed.

The other members and their digests stay the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from tsx_archiver.containers.base import ArchiveFile, root_of
from tsx_archiver.containers.formats import open_container
from tsx_archiver.containers.zip import ZipContainer
from tsx_archiver.errors import CannotPack, CorruptMember
from tsx_archiver.limits import MIB, Limits
from tsx_archiver.names import (
    MANIFEST_DIRECTORIES,
    MANIFEST_PATH,
    collision_key,
    normal,
    path_fault,
    shown,
)
from tsx_archiver.opening import (
    directory_manifest,
    is_directory,
    model_root,
    open_source,
    read_manifest,
    refuse_model_file,
    wrong_checksum,
)
from tsx_archiver.packing import PlannedMember, planned_file
from tsx_archiver.storage.atomic_file import partial_path, write_atomically
from tsx_archiver.storage.digest import file_digest, file_state
from tsx_archiver.writing import (
    DEFLATE_LEVEL,
    CountingStream,
    Sink,
    TarSink,
    ZipSink,
    is_worth_deflating,
    manifest_content,
    new_tar,
    new_zip,
    open_member_source,
)

# A .tar.gz above this fraction of its members' size was not compressed, and stays uncompressed.
_MAX_COMPRESSED_RATIO = 0.95

Content: TypeAlias = bytes | Path  # the bytes of a new member, or the file that contains them


def rewrite_archive(
    path: Path,
    replace: Mapping[str, Content],
    *,
    remove: Collection[str] = (),
    model: Mapping[str, str] | None = None,
    limits: Limits = Limits(),  # noqa: B008
) -> None:
    """Replace, add and remove members of an archive, in constant memory.

    The format (.mar, .tar.gz or directory) and the compression of each member stay the same. The
    same archive and the same changes give the same bytes. An error leaves the archive unchanged.

    Args:
        path: The archive.
        replace: The new content of members by name; new names are added.
        remove: Names of members, and of directories with all their files, which are removed before
            new members are added.
        model: Keys to merge into `model` of the manifest, if there is one.
        limits: The largest sizes and numbers of files.

    Raises:
        ArchiveError: The archive cannot be read, or the change is not possible.
    """
    path = Path(path)
    names = {normal(name): content for name, content in replace.items()}
    for name in (*replace, *remove):
        is_manifest = normal(name) == MANIFEST_PATH or (
            name in remove and normal(name) in MANIFEST_DIRECTORIES
        )
        fault = (
            "the archiver writes it"
            if is_manifest
            else path_fault(name) or path_fault(normal(name))
        )
        if fault:
            raise CannotPack(
                f"{shown(name)} cannot be put into an archive, or removed from one: {fault}."
            )
    try:
        change = _Change(
            {name: _plan_member(name, content) for name, content in names.items()},
            frozenset(map(normal, remove)),
            model or {},
        )
        if is_directory(path):
            _rewrite_directory(path, change)
        else:
            _rewrite_file(path.resolve(), change, limits)
    except OSError as error:
        raise CannotPack(
            f"{path} cannot be written: {error.strerror} ({error.filename or path})."
        ) from error


def _plan_member(name: str, content: Content) -> PlannedMember:
    return (
        PlannedMember(name, content, len(content))
        if isinstance(content, bytes)
        else planned_file(name, content)
    )


class _Change(NamedTuple):
    """The change of an archive."""

    new_members: Mapping[str, PlannedMember]
    removed_names: frozenset[str]  # names of members and directories
    model: Mapping[str, str]  # keys of the manifest's `model`

    def is_removed(self, name: str) -> bool:
        """Tell whether a member or one of its directories is removed."""
        return name in self.removed_names or any(
            parent in self.removed_names for parent in _parents(name)
        )


def _parents(name: str) -> Iterator[str]:
    """Yield the directories of a member: `a` and `a/b` for `a/b/c`."""
    parts = name.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


class _SourceArchive(NamedTuple):
    """The archive before the change."""

    path: Path
    container: ArchiveFile
    root: str
    manifest: dict[str, Any]
    checksums: Mapping[str, str]

    def name_in_model(self, name: str) -> str:
        """Return the name of a member inside the model's directory."""
        return name[len(self.root) + 1 :] if self.root else name


class _OutputMember(NamedTuple):
    """A member of the new archive, named inside the model's directory.

    `member.source` is the path of the old archive if the member's bytes are unchanged.
    """

    member: PlannedMember
    stream: BinaryIO


def _rewrite_file(path: Path, change: _Change, limits: Limits) -> None:
    with open_source(path) as file, ExitStack() as stack:
        refuse_model_file(file, path)
        state = file_state(file)
        container = open_container(file, str(path), limits)
        stack.callback(container.close)
        root = root_of(container.members)
        manifest = read_manifest(container, root, path.name, path)
        old_archive = _SourceArchive(
            path,
            container,
            root,
            manifest.data,
            {normal(name): digest for name, digest in manifest.checksums.items()},
        )
        _refuse_collisions(old_archive, change)
        with write_atomically(path) as out:
            _write_changed_archive(old_archive, change, out, path.stat().st_size)
            shutil.copymode(path, out.name)
            if file_state(file) != state:
                raise CorruptMember(
                    f"{path} changed while it was read. Try again once nothing writes to it."
                )


def _refuse_collisions(old_archive: _SourceArchive, change: _Change) -> None:
    """Refuse new names that some file systems treat as equal to an existing one.

    A name may not be both a file and a directory either.
    """
    names = (
        old_archive.name_in_model(member.name)
        for member in old_archive.container.members
        if not member.is_directory
    )
    names_by_key = {collision_key(name): name for name in names if not change.is_removed(name)}
    for name in sorted(change.new_members):
        key = collision_key(name)
        existing = next(
            (names_by_key[parent] for parent in _parents(key) if parent in names_by_key),
            names_by_key.get(key, name),
        )
        if existing != name or any(path.startswith(f"{key}/") for path in names_by_key):
            raise CannotPack(
                f"{old_archive.path} holds {shown(existing)} where {shown(name)} would be added."
                " Rename one of them."
            )
        names_by_key[key] = name


def _write_changed_archive(
    old_archive: _SourceArchive, change: _Change, out: BinaryIO, size: int
) -> None:
    if isinstance(old_archive.container, ZipContainer):
        was_stored = old_archive.container.stored_by_name()
        all_stored = all(was_stored.values())
        prefix = f"{old_archive.root}/" if old_archive.root else ""

        def is_stored(member: PlannedMember) -> bool:
            if member.source != old_archive.path:
                return all_stored or not is_worth_deflating(member)
            return was_stored[member.name]

        with new_zip(out) as archive:
            _add_members(old_archive, change, ZipSink(archive, out, is_stored), prefix)
        return
    total = sum(member.size for member in old_archive.container.members)
    level = DEFLATE_LEVEL if size < _MAX_COMPRESSED_RATIO * total else 0
    with new_tar(out, level) as tar:
        _add_members(old_archive, change, TarSink(tar, old_archive.root), "")


def _add_members(old_archive: _SourceArchive, change: _Change, sink: Sink, prefix: str) -> None:
    checksums = {}
    for output in _output_members(old_archive, change):
        name = output.member.name
        member = output.member._replace(name=prefix + name)
        stream = CountingStream(output.stream, member, lambda count: None)
        sink.add(member, stream)
        stream.check_end()
        digest = checksums[name] = stream.digest.hexdigest()
        expected_digest = (
            old_archive.checksums.get(name, digest) if member.source == old_archive.path else digest
        )
        if expected_digest.lower() != digest:
            raise wrong_checksum(old_archive.path, name, expected_digest, digest)
    if any(
        old_archive.name_in_model(member.name) == MANIFEST_PATH
        for member in old_archive.container.members
    ):
        new_manifest = {
            **old_archive.manifest,
            "model": {**(old_archive.manifest.get("model") or {}), **change.model},
        }
        content = manifest_content(new_manifest, checksums)
        sink.add(PlannedMember(prefix + MANIFEST_PATH, content, len(content)), BytesIO(content))


def _output_members(old_archive: _SourceArchive, change: _Change) -> Iterator[_OutputMember]:
    """Yield the members of the new archive without the manifest, in the order of the old archive.

    An added member comes before the first old one with a greater name.
    """
    added_names = sorted(
        change.new_members.keys()
        - {
            old_archive.name_in_model(member.name)
            for member in old_archive.container.members
            if not member.is_directory
        }
    )
    for member, stream in old_archive.container.stream():
        name = old_archive.name_in_model(member.name)
        if name == MANIFEST_PATH:
            continue
        while added_names and added_names[0] < name:
            yield from _open_new_member(change.new_members[added_names.pop(0)])
        if name in change.new_members:
            yield from _open_new_member(change.new_members[name])
        elif not change.is_removed(name):
            yield _OutputMember(PlannedMember(name, old_archive.path, member.size), stream)
    for name in added_names:
        yield from _open_new_member(change.new_members[name])


def _open_new_member(member: PlannedMember) -> Iterator[_OutputMember]:
    with open_member_source(member.source) as stream:
        yield _OutputMember(member, stream)


def _rewrite_directory(path: Path, change: _Change) -> None:
    """Change a directory: write all new files, then rename them, then remove old files."""
    root = model_root(path)
    manifest = directory_manifest(root, path.name, path)
    removed_files = {file for name in change.removed_names for file in _files_in(root / name)} - {
        root / name for name in change.new_members
    }
    partials: dict[str, Path] = {}
    try:
        for member in change.new_members.values():
            _write_partial(root, member, partials)
        data = dict(manifest.data)
        if data and (change.model or manifest.checksums):
            checksums = {
                name: digest
                for name, digest in manifest.checksums.items()
                if not change.is_removed(normal(name))
            }
            if manifest.checksums:
                for name, partial in partials.items():
                    with partial.open("rb") as file:
                        checksums[name] = file_digest(file, partial)
            new_manifest = {**data, "model": {**(data.get("model") or {}), **change.model}}
            content = (
                manifest_content(new_manifest, checksums)
                if manifest.checksums
                else json.dumps(new_manifest, indent=2, ensure_ascii=False).encode()
            )
            _write_partial(root, PlannedMember(MANIFEST_PATH, content, len(content)), partials)
        for name, partial in partials.items():
            partial.replace(root / name)
        for removed_file in removed_files:
            removed_file.unlink()
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        for directory in {file.parent for file in (*removed_files, *partials.values())}:
            _remove_empty(directory, root)


def _files_in(path: Path) -> Iterator[Path]:
    """Yield the path itself if it is a file, or all files of the directory."""
    if path.is_dir() and not path.is_symlink():
        yield from (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    elif path.exists() or path.is_symlink():
        yield path


def _write_partial(root: Path, member: PlannedMember, partials: dict[str, Path]) -> None:
    target = root / member.name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partials[member.name] = partial_path(target)
    with open_member_source(member.source) as source, partial.open("xb") as out:
        shutil.copyfileobj(source, out, MIB)
    if target.exists():
        shutil.copymode(target, partial)


def _remove_empty(directory: Path, root: Path) -> None:
    with suppress(OSError):  # The first directory with a file ends the loop.
        while directory != root:
            directory.rmdir()
            directory = directory.parent
