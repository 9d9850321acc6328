"""Adds or replaces files in an existing archive, atomically; the other members and their digests stay unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tsx_archiver.containers.base import ArchiveFile, root_of
from tsx_archiver.containers.formats import open_container
from tsx_archiver.containers.zip import ZipContainer
from tsx_archiver.errors import CannotPack, CorruptMember
from tsx_archiver.limits import Limits
from tsx_archiver.names import MANIFEST_PATH, collision_key, normal, path_fault, shown
from tsx_archiver.opening import directory_manifest, is_directory, model_root, open_source, read_manifest, refuse_model_file, wrong_checksum
from tsx_archiver.packing import PlannedMember
from tsx_archiver.storage.atomic_file import beside, whole_file
from tsx_archiver.storage.digest import file_digest, file_state
from tsx_archiver.writing import (
    DEFLATE_LEVEL,
    CountingStream,
    Sink,
    TarSink,
    ZipSink,
    manifest_content,
    new_tar,
    new_zip,
    worth_deflating,
)

_COMPRESSED = 0.95  # of its members' bytes; a .tar.gz that is larger was only wrapped


def rewrite_archive(path: Path, replace: Mapping[str, bytes], *, model: Mapping[str, str] | None = None, limits: Limits = Limits()) -> None:  # noqa: B008
    """Give the members named in `replace` these bytes, adding those that are not there; raises ArchiveError and leaves what there was.

    `model` is merged into the manifest's `model`, where there is a manifest. The form stays as it is (.mar, .tar.gz or directory), and
    so does each member's compression. The same archive and the same bytes give the same archive. Works in constant memory.
    """
    path = Path(path)
    names = {normal(name): content for name, content in replace.items()}
    for name in replace:
        fault = "it is made by the archiver" if normal(name) == MANIFEST_PATH else path_fault(name) or path_fault(normal(name))
        if fault:
            raise CannotPack(f"{shown(name)} cannot be put into an archive: {fault}.")
    try:
        if is_directory(path):
            _rewrite_directory(path, names, model or {})
        else:
            _rewrite_file(path.resolve(), names, model or {}, limits)
    except OSError as error:
        raise CannotPack(f"{path} cannot be written: {error.strerror} ({error.filename or path}).") from error


class _SourceArchive(NamedTuple):
    """The archive as it is."""

    path: Path
    container: ArchiveFile
    root: str
    manifest: dict[str, Any]
    checksums: Mapping[str, str]

    def inside(self, name: str) -> str:
        return name[len(self.root) + 1 :] if self.root else name


class _Part(NamedTuple):
    """A member of the new archive, by its name inside the root; `old` says that the bytes are the old archive's."""

    name: str
    size: int
    stream: BinaryIO
    old: bool


def _rewrite_file(path: Path, replace: Mapping[str, bytes], model: Mapping[str, str], limits: Limits) -> None:
    with open_source(path) as file, ExitStack() as held:
        refuse_model_file(file, path)
        state = file_state(file)
        container = open_container(file, str(path), limits)
        held.callback(container.close)
        root = root_of(container.members)
        manifest = read_manifest(container, root, path.name, path)
        old = _SourceArchive(path, container, root, manifest.data, {normal(name): digest for name, digest in manifest.checksums.items()})
        _refuse_collisions(old, replace)
        with whole_file(path) as out:
            _write(old, replace, model, out, path.stat().st_size)
            shutil.copymode(path, out.name)
            if file_state(file) != state:
                raise CorruptMember(f"{path} changed while it was read. Try again once nothing writes to it.")


def _refuse_collisions(old: _SourceArchive, replace: Mapping[str, bytes]) -> None:
    """A new name that differs from an old one in its case only would be the same file on some systems."""
    present = {collision_key(old.inside(member.name)): old.inside(member.name) for member in old.container.members}
    for name in replace:
        twin = present.get(collision_key(name), name)
        if twin != name or any(inner.startswith(f"{collision_key(name)}/") for inner in present):
            raise CannotPack(f"{old.path} holds {shown(twin)} where {shown(name)} would be added. Rename one of them.")


def _write(old: _SourceArchive, replace: Mapping[str, bytes], model: Mapping[str, str], out: BinaryIO, size: int) -> None:
    if isinstance(old.container, ZipContainer):
        kept = old.container.stored()
        all_stored = all(kept.values())
        prefix = f"{old.root}/" if old.root else ""

        def stored(member: PlannedMember) -> bool:
            if isinstance(member.source, bytes):
                return all_stored or not worth_deflating(member)
            return kept[member.name]

        with new_zip(out) as archive:
            _fill(old, replace, model, ZipSink(archive, out, stored), prefix)
        return
    total = sum(member.size for member in old.container.members)
    level = DEFLATE_LEVEL if size < _COMPRESSED * total else 0
    with new_tar(out, level) as tar:
        _fill(old, replace, model, TarSink(tar, old.root), "")


def _fill(old: _SourceArchive, replace: Mapping[str, bytes], model: Mapping[str, str], sink: Sink, prefix: str) -> None:
    checksums = {}
    for part in _parts(old, replace):
        source: Path | bytes = old.path if part.old else replace[part.name]
        member = PlannedMember(prefix + part.name, source, part.size)
        stream = CountingStream(part.stream, member, lambda count: None)
        sink.add(member, stream)
        stream.check_end()
        found = checksums[part.name] = stream.digest.hexdigest()
        said = old.checksums.get(part.name, found) if part.old else found
        if said.lower() != found:
            raise wrong_checksum(old.path, part.name, said, found)
    if any(old.inside(member.name) == MANIFEST_PATH for member in old.container.members):
        changed = {**old.manifest, "model": {**(old.manifest.get("model") or {}), **model}}
        content = manifest_content(changed, checksums)
        sink.add(PlannedMember(prefix + MANIFEST_PATH, content, len(content)), BytesIO(content))


def _parts(old: _SourceArchive, replace: Mapping[str, bytes]) -> Iterator[_Part]:
    """The old members in their order, without the manifest; a new one stands before the first whose name is greater."""
    new = sorted(replace.keys() - {old.inside(member.name) for member in old.container.members})
    for member, stream in old.container.stream():
        name = old.inside(member.name)
        if name == MANIFEST_PATH:
            continue
        while new and new[0] < name:
            yield _given(new.pop(0), replace)
        yield _given(name, replace) if name in replace else _Part(name, member.size, stream, True)
    for name in new:
        yield _given(name, replace)


def _given(name: str, replace: Mapping[str, bytes]) -> _Part:
    return _Part(name, len(replace[name]), BytesIO(replace[name]), False)


def _rewrite_directory(path: Path, replace: Mapping[str, bytes], model: Mapping[str, str]) -> None:
    """Every new file is written beside its place first; then all take their names."""
    root = model_root(path)
    manifest = directory_manifest(root, path.name, path)
    made: dict[str, Path] = {}
    try:
        for name, content in replace.items():
            made[name] = _laid(root / name, content)
        data = dict(manifest.data)
        if data and (model or manifest.checksums):
            checksums = dict(manifest.checksums)
            if checksums:
                for name, partial in made.items():
                    with partial.open("rb") as file:
                        checksums[name] = file_digest(file, partial)
            changed = {**data, "model": {**(data.get("model") or {}), **model}}
            content = manifest_content(changed, checksums) if checksums else json.dumps(changed, indent=2, ensure_ascii=False).encode()
            made[MANIFEST_PATH] = _laid(root / MANIFEST_PATH, content)
        for name, partial in made.items():
            partial.replace(root / name)
    except BaseException:
        for partial in made.values():
            partial.unlink(missing_ok=True)
        raise


def _laid(place: Path, content: bytes) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(place)
    partial.write_bytes(content)
    if place.exists():
        shutil.copymode(place, partial)
    return partial
