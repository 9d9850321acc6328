"""The opening of an archive or a directory as the model directory of a worker."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, TypeVar

from tsx_archiver.containers.base import ArchiveFile, root_of
from tsx_archiver.containers.formats import open_container
from tsx_archiver.errors import (
    ArchiveNotFound,
    CannotOpen,
    CorruptMember,
    EmptyArchive,
    ForeignFile,
    InvalidConfig,
    UnsafePath,
    WrongChecksum,
)
from tsx_archiver.limits import MAX_MANIFEST_BYTES, MIB, Limits
from tsx_archiver.metadata.manifest import Manifest, parse_manifest
from tsx_archiver.metadata.modelfile import describe_model_stream
from tsx_archiver.names import (
    MANIFEST_DIRECTORIES,
    MANIFEST_PATH,
    is_inside,
    normal,
    shown,
    similar_file,
    unnamed_archive_name,
)
from tsx_archiver.storage.cache import Cache, CacheEntry, as_cache, release
from tsx_archiver.storage.copying import copy_plain
from tsx_archiver.storage.digest import file_digest, file_state
from tsx_archiver.storage.locks import FileLock

if TYPE_CHECKING:
    from tsx_archiver.metadata.modelconfig import ModelConfig

DEFAULT_CONFIG = "model-config.yaml"
DirectoryT = TypeVar("DirectoryT", bound="LockedDirectory")
MODEL_SUFFIXES = (".pt", ".pth", ".pt2", ".onnx", ".safetensors", ".bin")


class LockedDirectory:
    """A directory that stays in the cache, or where it is, until it is closed."""

    on_close: Callable[[], None] | None = None  # removes a directory that is not in the cache
    _lock: FileLock | None = None

    def close(self) -> None:
        """Let the cache remove the directory."""
        if self.on_close is not None:
            self.on_close()
        if self._lock is not None:
            release(self._lock)
            self._lock = None

    def __enter__(self: DirectoryT) -> DirectoryT:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class OpenArchive(LockedDirectory):
    """An open archive, whose directory is kept until it is closed.

    Attributes:
        source: The path of the archive.
        directory: The directory of its files.
        manifest: The manifest.
        config: The content of model-config.yaml.
        problems: Warnings about settings that will probably not do what the author meant.
        digest: The SHA-256 of the archive's file, or None for a directory.
    """

    source: Path
    directory: Path
    manifest: Manifest
    config: ModelConfig
    problems: list[str] = field(default_factory=list)
    digest: str | None = None


# The arguments are the step (reading or unpacking), the bytes so far and the total bytes.
OpeningProgress: TypeAlias = Callable[[str, int, int], None]


def open_archive(
    source: Path,
    *,
    cache: Path | Cache | None = None,
    limits: Limits = Limits(),  # noqa: B008
    name: str | None = None,
    progress: OpeningProgress = lambda step, done, total: None,
) -> OpenArchive:
    """Open an archive file (.mar, .model, .tar.gz or .tgz) or a directory.

    The bytes of a file determine its format. An unsafe archive is refused before anything is
    written.

    Args:
        source: The archive. A directory is used in place.
        cache: The cache for the unpacked archive; the default is the user's cache directory.
        limits: The largest sizes and numbers of files.
        name: The model's name if the manifest has none; the default comes from the file's name.
        progress: Called with the step, the bytes so far, and the total bytes.

    Raises:
        ArchiveError: The archive is missing, damaged, unsafe or too large.

    Examples:
        >>> archive = open_archive(Path("digits.mar"))
        >>> archive.manifest.model_name
        'digits'
    """
    source = Path(source)
    default_name = name or unnamed_archive_name(source.absolute())
    if is_directory(source):
        return _open_directory(source, default_name)
    with open_source(source) as file:
        refuse_model_file(file, source)

        def read_checksums(container: ArchiveFile, root: str) -> Mapping[str, str]:
            return read_manifest(container, root, default_name, source).checksums

        entry, digest = unpack_file(file, source, cache, limits, read_checksums, progress)
    try:
        archive = _open_directory(model_root(entry.files), default_name, source)
    except BaseException:
        entry.lock.close()
        raise
    archive.digest, archive._lock = digest, entry.lock
    return archive


def is_directory(source: Path) -> bool:
    """Tell whether a path is a readable directory.

    Path.is_dir raises some errors and hides others. Here every error means False, and `open_source`
    then explains it.
    """
    try:
        return stat.S_ISDIR(source.stat().st_mode)
    except (OSError, ValueError):
        return False


def open_source(source: Path) -> BinaryIO:
    """Open an archive file.

    Raises:
        ArchiveNotFound: There is no such file.
        CannotOpen: The file cannot be opened, or is not a regular file.
    """
    try:
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(source.stat().st_mode):
            raise ForeignFile(f"{source} is not a regular file. Give a .mar file or a directory.")
        return source.open("rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        suggestion = similar_file(source) or "."
        raise ArchiveNotFound(
            f"{source} does not exist{suggestion} Check the path, or pack a model with 'tsx"
            " archive'."
        ) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ArchiveNotFound(
                f"{shown(str(source))} does not exist: its name is too long for a file. Check the"
                " path."
            ) from error
        if error.errno == errno.ELOOP:
            raise CannotOpen(
                f"{source} cannot be opened: its symbolic links form a loop. Point them to a file."
            ) from error
        raise CannotOpen(
            f"{source} cannot be opened ({error.strerror}). Check its permissions."
        ) from error
    except ValueError as error:  # The path contains NUL, or a character that cannot be encoded.
        raise ArchiveNotFound(
            f"{shown(str(source))} does not exist: no file can have this name. Check the path."
        ) from error


def read_manifest(container: ArchiveFile, root: str, default_name: str, source: Path) -> Manifest:
    """Read the manifest of an archive.

    Raises:
        ForeignFile: The archive has neither a manifest nor a file of a model.
        InvalidManifest: The manifest cannot be used.
    """
    content = container.read(
        f"{root}/{MANIFEST_PATH}" if root else MANIFEST_PATH, MAX_MANIFEST_BYTES
    )
    if content is not None:
        return parse_manifest(content, default_name=default_name, source=str(source))
    _refuse_foreign_files(
        [member.name for member in container.members if not member.is_directory], source
    )
    return Manifest(default_name=default_name)


def refuse_model_file(file: BinaryIO, source: Path) -> None:
    """Raise an error that names the kind of the file if it is a model file.

    A model file may itself be a zip file, like an archive.
    """
    kind = describe_model_stream(file, source).kind
    file.seek(0)
    if kind != "unknown":
        raise ForeignFile(
            f"{source} is a model file ({kind}), not an archive. Pack it with 'tsx archive"
            f" {source.name}'."
        )


def unpack_file(
    file: BinaryIO,
    source: Path,
    cache: Path | Cache | None,
    limits: Limits,
    read_checksums: Callable[[ArchiveFile, str], Mapping[str, str]],
    progress: OpeningProgress = lambda step, done, total: None,
) -> tuple[CacheEntry, str]:
    """Unpack an archive into the cache unless it is there, and return the entry and the SHA-256.

    Args:
        file: The open archive.
        source: The path of the archive.
        cache: The cache.
        limits: The largest sizes and numbers of files.
        read_checksums: Called with the archive and the model's directory in it before anything is
            written. It may refuse the archive, and returns the checksums of the manifest.
        progress: Called with the step, the bytes so far, and the total bytes.
    """
    state = file_state(file)
    archive_cache = as_cache(cache)
    digest = file_digest(
        file, source, archive_cache.root / "seen", _progress_counter(progress, "reading", state[0])
    )

    def unpack_entry(target: Path) -> dict[str, int]:
        container = open_container(file, str(source), limits)
        try:
            root = root_of(container.members)
            checksums = read_checksums(container, root)
            total = sum(member.size for member in container.members)
            archive_cache.check_room(total)
            sizes = _unpack(
                container,
                target,
                root,
                checksums,
                source,
                _progress_counter(progress, "unpacking", total),
            )
        finally:
            container.close()
        if file_state(file) != state:
            raise CorruptMember(
                f"{source} changed while it was unpacked. Try again once nothing writes to it."
            )
        return sizes

    return archive_cache.open(digest, unpack_entry), digest


def _progress_counter(progress: OpeningProgress, step: str, total: int) -> Callable[[int], None]:
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(step, done, total)

    return count


def _unpack(
    container: ArchiveFile,
    target: Path,
    root: str,
    checksums: Mapping[str, str],
    source: Path,
    count: Callable[[int], None],
) -> dict[str, int]:
    """Write all members to a new directory, and return their sizes by name."""
    sizes = {}
    missing_names = {normal(name) for name in checksums}
    for member, stream in container.stream():
        path = target / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        name = member.name[len(root) + 1 :] if root else member.name
        digest = _write_member(stream, path, member.size, str(source), member.name, count)
        missing_names.discard(name)
        if name in checksums and digest != checksums[name].lower():
            raise wrong_checksum(source, name, checksums[name], digest)
        sizes[member.name] = member.size
    if missing_names:
        raise WrongChecksum(
            f"{source}: the manifest has a sha-256 for {shown(min(missing_names))}, which is"
            " missing. Pack the model again."
        )
    for member in container.members:
        if member.is_directory:
            (target / member.name).mkdir(parents=True, exist_ok=True)
    return sizes


def wrong_checksum(source: Path, name: str, expected: str, actual: str) -> WrongChecksum:
    """Return the error for a member whose SHA-256 differs from the manifest's."""
    return WrongChecksum(
        f"{source}: the sha-256 of {shown(name)} is {actual[:16]}..., not the manifest's"
        f" {expected[:16]}...: it is damaged or was changed. Copy or download the file again, or"
        " pack the model again."
    )


def _write_member(
    stream: BinaryIO, path: Path, size: int, source: str, name: str, count: Callable[[int], None]
) -> str:
    """Copy exactly `size` bytes to a new file, and return their SHA-256."""
    digest = hashlib.sha256()
    remaining = size

    def on_chunk(chunk: bytes | memoryview) -> None:
        digest.update(chunk)
        count(len(chunk))

    fd = os.open(
        path,
        os.O_RDWR
        | os.O_CREAT
        | os.O_EXCL
        | getattr(os, "O_NOFOLLOW", 0)
        | getattr(os, "O_BINARY", 0),
        0o644,
    )
    with open(fd, "w+b", buffering=0) as out:
        copy_plain(stream, out, size, on_chunk)
        remaining -= out.tell()
        while chunk := stream.read(MIB):
            remaining -= len(chunk)
            if remaining < 0:
                break
            on_chunk(chunk)
            out.write(chunk)
    if remaining:
        raise CorruptMember(
            f"{source}: {shown(name)} does not have the declared {size} bytes. Copy or download the"
            " file again."
        )
    return digest.hexdigest()


def _open_directory(directory: Path, default_name: str, source: Path | None = None) -> OpenArchive:
    try:
        root = model_root(directory)
        refuse_foreign_link(root, directory, source or directory)
        manifest = directory_manifest(root, default_name, source or directory)
        config, problems = _read_config(root, manifest)
    except OSError as error:
        raise CannotOpen(
            f"{error.filename} cannot be read ({error.strerror}). Check its permissions."
        ) from error
    file_names = [
        name
        for name in (
            manifest.handler_file,
            manifest.serialized_file,
            manifest.model_file,
            manifest.requirements_file,
        )
        if name
    ]
    existing_files = {
        normal(name): None
        for name in [*file_names, manifest.config_file or ""]
        if name and (root / name).exists()
    }
    problems += manifest.missing_files(existing_files)
    problems += config.missing_warm_up(
        {entry.file for entry in config.warmup or () if (root / entry.file).is_file()}
    )
    return OpenArchive(source or directory, root.absolute(), manifest, config, problems)


def model_root(directory: Path) -> Path:
    """Return the only directory inside, if there is nothing else, or the directory itself.

    Hidden files and macOS's metadata do not count.
    """
    entries = [
        path
        for path in directory.iterdir()
        if not path.name.startswith(".") and path.name != "__MACOSX"
    ]
    if len(entries) == 1 and entries[0].is_dir() and entries[0].name not in MANIFEST_DIRECTORIES:
        return entries[0]
    return directory


def directory_manifest(root: Path, default_name: str, source: Path) -> Manifest:
    """Read the manifest of an unpacked archive, like `read_manifest`."""
    path = root / MANIFEST_PATH
    refuse_foreign_link(path, root, source)
    if path.is_file():
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CorruptMember(
                f"{path} has {path.stat().st_size} bytes; at most {MAX_MANIFEST_BYTES} are read."
                " Pack the model again."
            )
        return parse_manifest(path.read_bytes(), default_name=default_name, source=str(source))
    _refuse_foreign_files([entry.name for entry in root.iterdir() if entry.is_file()], source)
    return Manifest(default_name=default_name)


def refuse_foreign_link(path: Path, root: Path, source: Path) -> None:
    """Refuse a link out of the model's directory.

    Error messages quote values of files, so a link could disclose the content of another file.

    Raises:
        UnsafePath: The path leads out of `root`.
    """
    if not is_inside(path, root):
        name = shown(str(path.relative_to(root)))
        raise UnsafePath(
            f"{source}: {name} is a link to a file outside the model's directory. Replace the link"
            " with the file."
        )


def _refuse_foreign_files(names: list[str], source: Path) -> None:
    if not names:
        raise EmptyArchive(f"{source} contains no files. Check the path.")
    if not any(name.endswith((".py", *MODEL_SUFFIXES)) for name in names):
        raise ForeignFile(
            f"{source} is not a model archive: it has neither {MANIFEST_PATH} nor a handler or"
            " model file. Pack it with 'tsx archive'."
        )


def _read_config(root: Path, manifest: Manifest) -> tuple[ModelConfig, list[str]]:
    """Read the configuration that the manifest names, or model-config.yaml without a manifest."""
    # This module imports pydantic, which is slow.
    from tsx_archiver.metadata.modelconfig import ModelConfig, load_model_config

    name = manifest.config_file or (None if manifest.data else DEFAULT_CONFIG)
    if name is None or not (root / name).is_file():
        return ModelConfig(), []
    refuse_foreign_link(root / name, root, Path(manifest.model_name))
    try:
        config, problems = load_model_config(root / name)
    except InvalidConfig as error:
        raise InvalidConfig(
            error.message.replace(str(root / name), f"{name} of {manifest.model_name}", 1)
        ) from error
    return config, [f"{name}: {problem}" for problem in problems]
