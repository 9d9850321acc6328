"""The stores of an output: a disk, or S3.

Until the output is complete, they also keep its parts and the journal of the run next to it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeAlias

from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import check_directory, is_trusted, private_directory
from tsx_cli.batch.s3 import S3, is_s3, location
from tsx_cli.common.failure import CliError

WORK_SUFFIX = ".tsx-batch"  # The work directory of a run has the output's name with this suffix.
JOURNAL = "journal.json"
MAX_PARALLEL_WRITES = 16
MAX_NAME_BYTES = 200  # The limit of file systems is 255, and a suffix is added.
Write = Callable[[BinaryIO], object]


def _resolve_output(output: str) -> Path:
    """Resolve symbolic links in an output's path, except a link that another user owns.

    Raises:
        CliError: Another user can write to the directory.
    """
    path = Path(output).absolute()
    try:
        check_directory(path.parent, allow_sticky=True)
    except PermissionError as error:
        raise CliError(
            f"{output} cannot be written: {error.strerror}. Name an output in a directory of your"
            " own."
        ) from error
    is_own_link = path.is_symlink() and is_trusted(path.lstat())
    return (
        path.resolve()
        if is_own_link or path.name in ("", "..")
        else path.parent.resolve() / path.name
    )


class LocalStore:
    """An output on a disk; a write is durable when it returns.

    Methods raise OSError and CliError. An `output` with a final slash is a directory of files.
    """

    def __init__(self, output: str) -> None:
        self.output = output
        self._path = _resolve_output(output)
        self._work = self._path.with_name(f"{self._path.name}{WORK_SUFFIX}")
        self._files = self._work / "files"
        self._lock: FileLock | None = None

    def exists(self) -> bool:
        """Tell whether the output, or a file in it, exists."""
        return any(self._path.iterdir()) if self._path.is_dir() else self._path.exists()

    def lock(self) -> None:
        """Lock the output; only `exists` may be called before.

        Raises:
            CliError: Another run has the lock.
        """
        # A run that ends removes its lock file, so the lock may be on a removed file.
        while self._lock is None or not self._lock.is_current():
            if self._lock is not None:
                self._lock.close()
            try:
                private_directory(self._work)
            except PermissionError as error:
                advice = (
                    "Remove it if you can, or name an output in a directory that no other user can"
                    " write to"
                )
                raise CliError(
                    f"{self.output} cannot be written: {error.strerror}. {advice}."
                ) from error
            self._lock = FileLock(self._work / "lock")
            if not self._lock.lock_exclusive(wait=False):
                raise CliError(
                    f"another run writes {self.output}; wait until it ends, or name another output"
                )

    def read(self, name: str) -> bytes | None:
        path = self._work / name
        return path.read_bytes() if path.exists() else None

    def put(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        self._replace(self._work / name, lambda file: file.write(content))

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Add files to the directory of the output."""
        paths, folders = [self._files / name for name in files], {self._work}
        for path, content in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            folders |= {parent for parent in path.parents if self._work in parent.parents}
        # Syncing is quick after all writes, because the first sync flushes most other files too.
        for path in (*paths, *folders):
            _sync(path)

    def remove_files(self, names: Iterable[str]) -> None:
        for name in names:
            (self._files / name).unlink(missing_ok=True)

    def publish(self, write: Write | None) -> None:
        """Write the output atomically with `write`; if it is None, complete the directory.

        The method may be called again.
        """
        if write is not None:
            self._replace(self._path, write)
        elif self._files.is_dir():
            self._files.replace(self._path)  # The target is absent or an empty directory.
            _sync(self._path.parent)
        else:
            self._path.mkdir(exist_ok=True)

    def clear(self) -> None:
        """Remove everything except the output.

        The journal is removed first, so that it never refers to missing parts.
        """
        (self._work / JOURNAL).unlink(missing_ok=True)
        _sync(self._work)
        for entry in self._work.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def close(self) -> None:
        if self._lock is not None:
            try:
                if self._lock.is_current() and [entry.name for entry in self._work.iterdir()] == [
                    "lock"
                ]:
                    shutil.rmtree(self._work)
            finally:
                self._lock.close()

    def _replace(self, path: Path, write: Write) -> None:
        """Replace a file through a temporary file.

        Its name is fixed, so that the next run overwrites a file that a killed run has left.
        """
        partial = self._work / "partial"
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync(path.parent)


class S3Store:
    """An output in S3, which has no locks: two concurrent runs overwrite each other."""

    def __init__(self, output: str, s3: S3) -> None:
        self.output, self._s3 = output, s3
        self._work = f"{output.rstrip('/')}{WORK_SUFFIX}/"

    def exists(self) -> bool:
        with self._s3.calls(self.output) as client:
            bucket, key = location(self.output).values()
            objects = client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get(
                "Contents", []
            )
        return any(key.endswith("/") or entry["Key"] == key for entry in objects)

    def lock(self) -> None:
        pass

    def read(self, name: str) -> bytes | None:
        url = self._work + name
        with self._s3.calls(url) as client:
            try:
                content: bytes = client.get_object(**location(url))["Body"].read()
            except client.exceptions.NoSuchKey:
                return None
        return content

    def put(self, name: str, content: bytes) -> None:
        self._put(self._work + name, content)

    def add_files(self, files: Mapping[str, bytes]) -> None:
        with ThreadPoolExecutor(MAX_PARALLEL_WRITES) as pool:
            list(pool.map(self._put, (f"{self.output}{name}" for name in files), files.values()))

    def remove_files(self, names: Iterable[str]) -> None:
        for name in names:
            self._delete(f"{self.output}{name}")

    def publish(self, write: Write | None) -> None:
        if write is not None:
            with tempfile.TemporaryFile() as file, self._s3.calls(self.output) as client:
                write(file)
                file.seek(0)
                client.upload_fileobj(file, *location(self.output).values())

    def clear(self) -> None:
        for url in sorted(
            (url for url, _, _ in self._s3.listing(self._work)),
            key=lambda url: not url.endswith(f"/{JOURNAL}"),
        ):
            self._delete(url)

    def close(self) -> None:
        pass

    def _put(self, url: str, content: bytes) -> None:
        with self._s3.calls(url) as client:
            client.put_object(**location(url), Body=content)

    def _delete(self, url: str) -> None:
        with self._s3.calls(url) as client:
            client.delete_object(**location(url))


OutputStore: TypeAlias = LocalStore | S3Store


def open_store(output: str, s3: S3) -> OutputStore:
    return S3Store(output, s3) if is_s3(output) else LocalStore(output)


def file_name(id: str) -> str:
    """Return the relative path for a row's file, which cannot leave the output's directory.

    A path component that is too long for a file system is shortened.
    """
    parts = [
        re.sub(r"[\x00-\x1f\x7f%\\]|^\.", lambda match: f"%{ord(match[0]):02X}", part) or "%"
        for part in id.split("/")
    ]
    return "/".join(
        part if len(part.encode()) <= MAX_NAME_BYTES else _shorten(part) for part in parts
    )


def _shorten(name: str) -> str:
    """Shorten a name, and add a digest that keeps names distinct."""
    return f"{name.encode()[: MAX_NAME_BYTES - 17].decode(errors='ignore')}%{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
