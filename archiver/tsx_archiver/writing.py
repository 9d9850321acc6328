"""Functions that write an archive in one pass, in constant memory, reproducibly and atomically."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeAlias, cast

from tsx_archiver.errors import CannotPack, OutputExists
from tsx_archiver.limits import MIB, Limits
from tsx_archiver.metadata.manifest import CHECKSUMS_KEY
from tsx_archiver.opening import MODEL_SUFFIXES
from tsx_archiver.packing import ArchiveSpec, PackingPlan, PlannedMember, Warn, plan_archive
from tsx_archiver.storage.atomic_file import partial_path, write_atomically
from tsx_archiver.storage.copying import MIN_SIZE_BYTES, InputFile, copy_plain

Format: TypeAlias = Literal["default", "zip-store", "tgz", "no-archive"]
FORMATS: tuple[Format, ...] = ("default", "zip-store", "tgz", "no-archive")

# The arguments are the name of a member, the bytes read so far, and the total bytes. Each member
# has at least one call.
Progress: TypeAlias = Callable[[str, int, int], None]

# The number increases when a new release packs the same inputs into different bytes.
ARCHIVER_VERSION = "tsx-2"

SUFFIXES = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
_FILE_SUFFIXES = {
    "default": (".mar", ".model"),
    "zip-store": (".mar", ".model"),
    "tgz": (".tar.gz", ".tgz"),
    "no-archive": (),
}
DEFLATE_LEVEL = 6
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_FILE_MODE = 0o644
_BLOCK = 4096
# zipalign's extra field: its id, the size of its content, the alignment, and zeros.
_PADDING = struct.Struct("<3H")
_PADDING_ID = 0xD935
_SAMPLE_COUNT = 16
_SAMPLE_SIZE = 64 * 1024
_MAX_DEFLATED_RATIO = 0.75  # A member is deflated if its samples shrink below this fraction.
WEIGHT_SUFFIXES = (*MODEL_SUFFIXES, ".ckpt", ".gguf")


def write_archive(
    spec: ArchiveSpec,
    destination: Path,
    *,
    format: Format = "default",
    force: bool = False,
    progress: Progress | None = None,
    warn: Warn | None = None,
) -> Path:
    """Pack an archive and return its path; an error leaves no partial output.

    Args:
        spec: The description of the archive.
        destination: The archive, if the path has a suffix of the format. Otherwise the directory
            for `<model name>.mar`, which is created.
        format: `default` (a compressed zip file), `zip-store`, `tgz`, or `no-archive` (a
            directory).
        force: Whether to replace an existing archive.
        progress: Called with the name of a file, the bytes read so far, and the total bytes.
        warn: Called for a doubtful detail; see `plan_archive`.

    Raises:
        ArchiveError: The spec cannot be packed.

    Examples:
        >>> import tempfile
        >>> spec = ArchiveSpec("echo", handler="echo.py", contents={"words.txt": b"hello"})
        >>> path = write_archive(spec, Path(tempfile.mkdtemp()))
        >>> path.name
        'echo.mar'
    """
    if format not in FORMATS:
        raise CannotPack(
            f"The archive format {format!r} is unknown. Use one of {', '.join(FORMATS)}."
        )
    path = output_path(spec.model_name, destination, format)
    write_plan(plan_archive(spec, warn=warn), path, format, force=force, progress=progress)
    return path


def write_plan(
    plan: PackingPlan,
    path: Path,
    format: Format = "default",
    *,
    force: bool = False,
    progress: Progress | None = None,
    kind: str = "model",
) -> None:
    """Write a planned archive; the errors are the same as for `write_archive`."""
    try:
        if path.exists() and not force:
            raise OutputExists(
                f"{path} already exists.\nPlease specify --force/-f option to overwrite the {kind}"
                " archive output file."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_and_replace(plan, path, format, progress)
    except (FileExistsError, NotADirectoryError) as error:
        raise CannotPack(
            f"{path} cannot be written: {error.filename} is no directory. Choose another place for"
            " the archive."
        ) from error
    except OSError as error:
        raise CannotPack(
            f"{path} cannot be written: {error.strerror} ({error.filename or path})."
        ) from error


def output_path(model_name: str, destination: Path, format: Format) -> Path:
    """Return the path of an archive; see `write_archive`."""
    destination = Path(destination)
    if destination.name.lower().endswith(_FILE_SUFFIXES[format]) and not destination.is_dir():
        return destination
    return destination / f"{model_name}{SUFFIXES[format]}"


class Sink(Protocol):
    """An archive that is being written."""

    def add(self, member: PlannedMember, stream: Stream) -> None:
        """Add a member by reading exactly its size from `stream`."""


def _write_and_replace(
    plan: PackingPlan, path: Path, format: Format, progress: Progress | None
) -> None:
    if format == "no-archive":
        with _new_directory(path) as directory:
            _add_members(plan, _DirectorySink(directory), progress)
        return
    if path.is_dir():
        raise CannotPack(f"{path} is a directory. Remove it, or choose another name.")
    with write_atomically(path) as file:
        if format == "tgz":
            _write_tar(plan, file, progress)
        else:
            _write_zip(plan, file, progress, store_all=format == "zip-store")


def _add_members(plan: PackingPlan, sink: Sink, progress: Progress | None) -> None:
    """Add all members, then the manifest with their checksums, so that each file is read once."""
    total = sum(member.size for member in plan.members)
    done = 0
    checksums = {}
    for member in plan.members:
        with open_member_source(member.source) as raw:
            stream = CountingStream(raw, member, _reporter(progress, member.name, done, total))
            sink.add(member, stream)
            stream.check_end()
        done += member.size
        checksums[member.name] = stream.digest.hexdigest()
    content = manifest_content(plan.manifest, checksums)
    sink.add(PlannedMember(plan.manifest_path, content, len(content)), BytesIO(content))


def manifest_content(manifest: Mapping[str, Any], checksums: Mapping[str, str]) -> bytes:
    """Return the JSON of a manifest with checksums."""
    full_manifest = {**manifest, "archiverVersion": ARCHIVER_VERSION, CHECKSUMS_KEY: checksums}
    return json.dumps(full_manifest, indent=2, ensure_ascii=False).encode() + b"\n"


def _reporter(
    progress: Progress | None, name: str, bytes_before: int, total: int
) -> Callable[[int], None]:
    def report(count: int) -> None:
        if progress is not None:
            progress(name, bytes_before + count, total)

    return report


class CountingStream:
    """The bytes of a packed file: hashed, reported, and checked against the planned size."""

    def __init__(self, raw: BinaryIO, member: PlannedMember, report: Callable[[int], None]) -> None:
        self._raw = raw
        self._member = member
        self._report = report
        self._count = 0
        self.digest = hashlib.sha256()
        report(0)

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes, up to the planned size.

        Raises:
            CannotPack: The file has become shorter.
        """
        remaining = self._member.size - self._count
        count = min(remaining, size) if size >= 0 else remaining
        chunk = self._raw.read(count)
        while len(chunk) < count:  # An unbuffered read may stop early.
            next_chunk = self._raw.read(count - len(chunk))
            if not next_chunk:
                raise self._change_error()
            chunk += next_chunk
        self._count_chunk(chunk)
        return chunk

    def copy_to(self, out: BinaryIO) -> int | None:
        """Copy the file in the kernel, and return its CRC-32.

        Returns:
            None, without any effect, if the kernel cannot copy the file.
        """
        return copy_plain(self._raw, out, self._member.size, self._count_chunk)

    def _count_chunk(self, chunk: bytes | memoryview) -> None:
        self.digest.update(chunk)
        self._count += len(chunk)
        self._report(self._count)

    def check_end(self) -> None:
        """Check that the file has the planned size.

        Raises:
            CannotPack: The file has changed.
        """
        if self._count != self._member.size or self._raw.read(1):
            raise self._change_error()

    def _change_error(self) -> CannotPack:
        return CannotPack(
            f"{self._member.source!s} changed while it was packed. Pack again once nothing writes"
            " to it."
        )


Stream: TypeAlias = CountingStream | BytesIO


class ZipSink:
    """A zip file whose large stored members begin on a block of the file system.

    `copy_file_range` can share the blocks of such members with their source files.
    """

    def __init__(
        self, archive: zipfile.ZipFile, file: BinaryIO, is_stored: Callable[[PlannedMember], bool]
    ) -> None:
        """Write to an archive.

        Args:
            archive: The archive.
            file: The file to which `archive` writes.
            is_stored: Tells whether to store a member without compression.
        """
        self._zip = archive
        self._file = file
        self._is_stored = is_stored

    def add(self, member: PlannedMember, stream: Stream) -> None:
        """Add a member, stored or deflated."""
        info = zipfile.ZipInfo(member.name, _ZIP_TIME)
        info.create_system = 3
        info.external_attr = (0o100000 | _FILE_MODE) << 16
        info.file_size = member.size  # `open` needs the size to choose zip64.
        info.compress_type = zipfile.ZIP_STORED if self._is_stored(member) else zipfile.ZIP_DEFLATED
        if (
            info.compress_type == zipfile.ZIP_STORED
            and member.size >= MIN_SIZE_BYTES
            and isinstance(stream, CountingStream)
        ):
            self._add_aligned(info, stream)
            return
        with self._zip.open(info, "w") as out:
            shutil.copyfileobj(stream, out, MIB)

    def _add_aligned(self, info: zipfile.ZipInfo, stream: CountingStream) -> None:
        """Write a member without `zipfile`, which cannot copy in the kernel.

        The padding is only in the member's local header, not in the central directory.
        """
        file = self._file
        info.header_offset = file.seek(self._zip.start_dir)
        info.compress_size, info.CRC = info.file_size, 0
        padding = -(info.header_offset + len(info.FileHeader()) + _PADDING.size) % _BLOCK
        info.extra = _PADDING.pack(_PADDING_ID, 2 + padding, _BLOCK) + bytes(padding)
        file.write(info.FileHeader())
        crc = stream.copy_to(file)
        info.CRC = _copy(stream, file) if crc is None else crc
        self._zip.start_dir = file.tell()
        file.seek(info.header_offset)
        file.write(info.FileHeader())
        info.extra = b""
        self._zip.filelist.append(info)
        self._zip.NameToInfo[info.filename] = info


def _copy(stream: CountingStream, out: BinaryIO) -> int:
    crc = 0
    while chunk := stream.read(MIB):
        out.write(chunk)
        crc = zlib.crc32(chunk, crc)
    return crc


def _write_zip(
    plan: PackingPlan, file: BinaryIO, progress: Progress | None, *, store_all: bool
) -> None:
    limits = Limits()
    with new_zip(file) as archive:
        _add_members(
            plan,
            ZipSink(archive, file, lambda member: store_all or not is_worth_deflating(member)),
            progress,
        )
        dense_bytes = sum(
            info.file_size
            for info in archive.infolist()
            if limits.is_dense(info.file_size, info.compress_size)
        )
    # The samples missed much repetition, so readers would refuse the archive as a zip bomb. It is
    # written again without compression.
    if dense_bytes > limits.ratio_floor:
        file.seek(0)
        file.truncate()
        _write_zip(plan, file, progress, store_all=True)


def new_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open a new zip file for writing."""
    return zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=DEFLATE_LEVEL)


class TarSink:
    """A tar file whose members are in the directory `root`."""

    def __init__(self, archive: tarfile.TarFile, root: str) -> None:
        self._tar = archive
        self._root = root

    def add(self, member: PlannedMember, stream: Stream) -> None:
        """Add a member without owner and time."""
        info = tarfile.TarInfo(f"{self._root}/{member.name}" if self._root else member.name)
        info.size = member.size
        info.mode = _FILE_MODE
        self._tar.addfile(info, cast(BinaryIO, stream))


def _write_tar(plan: PackingPlan, file: BinaryIO, progress: Progress | None) -> None:
    """Write a .tar.gz, which is compressed if most of the bytes are worth it."""
    deflatable = sum(member.size for member in plan.members if is_worth_deflating(member))
    level = DEFLATE_LEVEL if 2 * deflatable >= sum(member.size for member in plan.members) else 0
    _gzip_tar(plan, file, progress, level)
    if level and Limits().too_dense(sum(member.size for member in plan.members), file.tell()):
        file.seek(0)
        file.truncate()
        _gzip_tar(plan, file, progress, 0)


def _gzip_tar(plan: PackingPlan, file: BinaryIO, progress: Progress | None, level: int) -> None:
    with new_tar(file, level) as archive:
        _add_members(plan, TarSink(archive, plan.model_name), progress)


@contextmanager
def new_tar(file: BinaryIO, level: int) -> Iterator[tarfile.TarFile]:
    """Open a new .tar.gz for writing."""
    with (
        gzip.GzipFile(
            filename="", mode="wb", compresslevel=level, fileobj=file, mtime=0
        ) as gzip_file,
        tarfile.open(fileobj=gzip_file, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        yield archive


class _DirectorySink:
    """A directory that takes the place of an archive."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(self, member: PlannedMember, stream: Stream) -> None:
        """Write a member to a file."""
        path = self._directory / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x+b") as out:
            if not isinstance(stream, CountingStream) or stream.copy_to(out) is None:
                shutil.copyfileobj(stream, out, MIB)


def is_worth_deflating(member: PlannedMember) -> bool:
    """Tell whether to deflate a member.

    Weights are stored, because deflating gigabytes takes minutes and saves a few percent. For other
    files, samples decide. A file that compresses as much as a zip bomb is stored as well, because
    readers would refuse it.
    """
    if member.size == 0 or member.name.lower().endswith(WEIGHT_SUFFIXES):
        return False
    with open_member_source(member.source) as file:
        compressed_size = sampled_size = 0
        step = max(member.size // _SAMPLE_COUNT, _SAMPLE_SIZE)
        for start in range(0, member.size, step):
            file.seek(start)
            sample = file.read(min(_SAMPLE_SIZE, member.size - start))
            compressed_size += len(zlib.compress(sample, DEFLATE_LEVEL))
            sampled_size += len(sample)
    return compressed_size < _MAX_DEFLATED_RATIO * sampled_size and (
        member.size <= Limits().ratio_floor or sampled_size <= Limits().ratio * compressed_size
    )


@contextmanager
def open_member_source(source: Path | bytes) -> Iterator[BinaryIO]:
    """Open the bytes of a member."""
    if isinstance(source, bytes):
        yield BytesIO(source)
        return
    with InputFile(source) as file:
        yield cast(BinaryIO, file)


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory that replaces `path` at the end of the context."""
    partial, backup = partial_path(path), partial_path(path)
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            path.rename(backup)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if backup.exists() and not path.exists():
            backup.rename(path)
        raise
    shutil.rmtree(backup, ignore_errors=True)
