"""The inspection and verification of an archive without unpacking it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from tsx_archiver.containers.base import ArchiveFile, Member, root_of
from tsx_archiver.containers.formats import open_container
from tsx_archiver.errors import CorruptMember, InvalidConfig, WrongChecksum
from tsx_archiver.limits import MIB, Limits
from tsx_archiver.metadata.forms import (
    FORMS_FILE,
    MAX_FILE_BYTES,
    FormIndex,
    InvalidForms,
    parse_forms,
)
from tsx_archiver.metadata.manifest import Manifest
from tsx_archiver.metadata.modelfile import ModelFile, describe_model_stream
from tsx_archiver.metadata.safeyaml import MAX_BYTES as MAX_CONFIG_BYTES
from tsx_archiver.metadata.safeyaml import load_yaml
from tsx_archiver.names import MANIFEST_PATH, normal, shown, unnamed_archive_name
from tsx_archiver.opening import (
    DEFAULT_CONFIG,
    directory_manifest,
    is_directory,
    model_root,
    open_source,
    read_manifest,
    refuse_model_file,
    wrong_checksum,
)
from tsx_archiver.storage.digest import content_digest

if TYPE_CHECKING:
    from tsx_archiver.metadata.modelconfig import ModelConfig

_MAX_MODEL_BYTES = 2048 * MIB


class MemberInfo(NamedTuple):
    """A file of an archive; sizes are in bytes.

    Attributes:
        name: The name inside the model's directory.
        size: The size.
        packed: The size in the archive; None in a .tar.gz or a directory.
        sha256: The checksum of the manifest, or None.
    """

    name: str
    size: int
    packed: int | None
    sha256: str | None


@dataclass(frozen=True)
class Inspection:
    """The content of an archive, as `tsx archive inspect` shows it.

    Attributes:
        source: The path of the archive.
        form: `mar`, `tar.gz` or `directory`.
        size: The size in bytes.
        manifest: The manifest.
        config: The content of model-config.yaml.
        members: The files.
        model: The description of the serialized file, or None.
        forms: The forms of the model that `tsx optimize` added.
        problems: Warnings about settings that will probably not do what the author meant.
    """

    source: Path
    form: str
    size: int
    manifest: Manifest
    config: ModelConfig
    members: list[MemberInfo]
    model: ModelFile | None
    forms: FormIndex
    problems: list[str] = field(default_factory=list)


class Finding(NamedTuple):
    """A finding of `verify_archive`.

    Attributes:
        is_fault: Whether it makes the archive unusable.
        member: The name of the file, or None.
        text: The description for the user.
    """

    is_fault: bool
    member: str | None
    text: str


class _Source(NamedTuple):
    form: str
    root: str
    container: ArchiveFile
    manifest: Manifest

    def name_in_model(self, member: Member) -> str:
        return member.name[len(self.root) + 1 :] if self.root else member.name


def inspect_archive(path: Path, *, limits: Limits = Limits()) -> Inspection:  # noqa: B008
    """Read the members, the manifest, the configuration and the head of the model file.

    Args:
        path: The archive or directory.
        limits: The largest sizes and numbers of files.

    Raises:
        ArchiveError: The archive cannot be read or is unsafe.

    Examples:
        >>> [member.name for member in inspect_archive(Path("digits.mar")).members]
        ['digits.py', 'MAR-INF/MANIFEST.json']
    """
    path = Path(path)
    with _open_source(path, limits) as source:
        checksums = source.manifest.checksums
        members = [
            MemberInfo(
                source.name_in_model(member),
                member.size,
                member.packed,
                checksums.get(source.name_in_model(member)),
            )
            for member in source.container.members
            if not member.is_directory
        ]
        config, problems = _read_config(source)
        member_names = {member.name: None for member in members}
        forms, form_problems = _read_forms(source, config)
        problems += (
            source.manifest.missing_files(member_names)
            + config.missing_warm_up(member_names)
            + form_problems
        )
        return Inspection(
            path,
            source.form,
            path.stat().st_size if path.is_file() else sum(member.size for member in members),
            source.manifest,
            config,
            members,
            _describe_model(source, path),
            forms,
            problems,
        )


def manifest_of(path: Path, *, limits: Limits = Limits()) -> Manifest:  # noqa: B008
    """Read the manifest of an archive; for a .tar.gz, the whole file is read.

    Raises:
        ArchiveError: The archive cannot be read or is unsafe.
    """
    with _open_source(path, limits) as source:
        return source.manifest


def read_member(
    path: Path,
    name: str,
    *,
    most: int,
    limits: Limits = Limits(),  # noqa: B008
) -> bytes | None:
    """Return the bytes of a small file, or None if there is no such file.

    Raises:
        ArchiveError: The archive cannot be read, or the file has more than `most` bytes.
    """
    with _open_source(Path(path), limits) as source:
        content = source.container.read(f"{source.root}/{name}" if source.root else name, most + 1)
    if content is not None and len(content) > most:
        raise CorruptMember(
            f"{path}: {shown(name)} has more than {most} bytes. Pack the model again."
        )
    return content


def verify_archive(path: Path, limits: Limits = Limits()) -> list[Finding]:  # noqa: B008
    """Read every byte of an archive, and compare it with the checksums and the manifest.

    Args:
        path: The archive or directory.
        limits: The largest sizes and numbers of files.

    Returns:
        All findings, faults first.

    Raises:
        ArchiveError: The archive cannot be read at all or is unsafe.

    Examples:
        >>> verify_archive(Path("digits.mar"))
        []
    """
    path = Path(path)
    with _open_source(path, limits) as source:
        findings = _check_members(source, path)
        try:
            config, problems = _read_config(source)
        except InvalidConfig as error:
            findings.append(Finding(True, source.manifest.config_file, error.message))
        else:
            problems += (
                config.missing_warm_up(
                    {source.name_in_model(member) for member in source.container.members}
                )
                + _read_forms(source, config)[1]
            )
            findings += [Finding(False, source.manifest.config_file, text) for text in problems]
        member_names = {source.name_in_model(member): None for member in source.container.members}
        findings += [
            Finding(True, None, text) for text in source.manifest.missing_files(member_names)
        ]
        return sorted(findings, key=lambda finding: not finding.is_fault)


def _check_members(source: _Source, path: Path) -> list[Finding]:
    checksums = {normal(name): digest for name, digest in source.manifest.checksums.items()}
    findings = []
    read_names = set()
    stream = source.container.stream()
    while True:
        try:
            member, file = next(stream)
            name = source.name_in_model(member)
            read_names.add(name)
            digest = content_digest(file)
            if name in checksums and digest != checksums[name].lower():
                raise wrong_checksum(path, name, checksums[name], digest)
            if checksums and name not in checksums and name != MANIFEST_PATH:
                findings.append(
                    Finding(
                        False,
                        name,
                        f"{shown(name)} was added after packing: the manifest has no sha-256"
                        " for it",
                    )
                )
        except StopIteration:
            break
        except WrongChecksum as error:
            findings.append(Finding(True, name, error.message))
        except CorruptMember as error:
            findings.append(Finding(True, None, error.message))
            break
    if not checksums:
        text = (
            "the manifest has no sha-256 of its members, because another archiver wrote it; only"
            " lengths and CRCs were checked"
        )
        findings.append(Finding(False, None, text))
    missing_names = (
        sorted(set(checksums) - read_names)
        if not any(finding.is_fault and finding.member is None for finding in findings)
        else []
    )
    return findings + [
        Finding(True, name, f"{shown(name)} is missing, and the manifest has a sha-256 for it")
        for name in missing_names
    ]


def _read_config(source: _Source) -> tuple[ModelConfig, list[str]]:
    # This module imports pydantic, which is slow.
    from tsx_archiver.metadata.modelconfig import ModelConfig, parse_model_config

    name = source.manifest.config_file or (None if source.manifest.data else DEFAULT_CONFIG)
    if name is None:
        return ModelConfig(), []
    member_name = normal(name)
    content = source.container.read(
        f"{source.root}/{member_name}" if source.root else member_name, MAX_CONFIG_BYTES + 1
    )
    if content is None:
        return ModelConfig(), []
    config, problems = parse_model_config(load_yaml(content, source=name))
    return config, [f"{name}: {problem}" for problem in problems]


def _read_forms(source: _Source, config: ModelConfig) -> tuple[FormIndex, list[str]]:
    content = source.container.read(
        f"{source.root}/{FORMS_FILE}" if source.root else FORMS_FILE, MAX_FILE_BYTES + 1
    )
    try:
        forms = FormIndex() if content is None else parse_forms(content)
    except InvalidForms as error:
        return FormIndex(), [str(error)]
    return forms, forms.problems(config.forms or (), source.manifest.checksums)


def _describe_model(source: _Source, path: Path) -> ModelFile | None:
    """Describe the serialized file.

    The description seeks in the file. Therefore a compressed member is copied to a temporary file.
    """
    name = source.manifest.serialized_file
    member = next(
        (
            member
            for member in source.container.members
            if name and source.name_in_model(member) == normal(name)
        ),
        None,
    )
    if member is None or member.is_directory:
        return None
    member_name = Path(normal(str(name)))
    if isinstance(source.container, _Directory):
        with (source.container.root / member.name).open("rb") as file:
            return describe_model_stream(file, member_name)
    if member.size > _MAX_MODEL_BYTES:
        return ModelFile(
            member_name,
            "unknown",
            member.size,
            problem=f"{member_name} is too large to read inside the archive; unpack the archive first.",
        )
    with tempfile.TemporaryFile() as copy:
        for candidate, stream in source.container.stream():
            if candidate == member:
                shutil.copyfileobj(stream, copy, MIB)
                break
        return describe_model_stream(cast(BinaryIO, copy), member_name)


@contextmanager
def _open_source(path: Path, limits: Limits) -> Iterator[_Source]:
    name = unnamed_archive_name(path.absolute())
    if is_directory(path):
        directory = model_root(path)
        manifest = directory_manifest(directory, name, path)
        yield _Source("directory", "", _Directory(directory), manifest)
        return
    with open_source(path) as file:
        refuse_model_file(file, path)
        container = open_container(file, str(path), limits)
        try:
            root = root_of(container.members)
            manifest = read_manifest(container, root, name, path)
            yield _Source(container.form, root, container, manifest)
        finally:
            container.close()


class _Directory:
    """A directory with the interface of a container; its files are trusted."""

    form = "directory"

    def __init__(self, root: Path) -> None:
        self.root = root
        files = sorted(
            file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts
        )
        self.members = [
            Member(file.relative_to(root).as_posix(), file.stat().st_size, None) for file in files
        ]

    def stream(self) -> Iterator[tuple[Member, BinaryIO]]:
        """Yield each file with a stream of its bytes."""
        for member in self.members:
            with (self.root / member.name).open("rb") as file:
                yield member, file

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return at most `max_bytes` of a file, or None if there is no such file."""
        path = self.root / name
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return file.read(max_bytes)

    def close(self) -> None:
        """Do nothing; no file is open between reads."""
