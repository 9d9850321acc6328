"""Where an output goes, and beside it the parts and the journal of its run until it is whole: a
disk, or S3.
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
from tsx_cli.batch.s3 import S3, place
from tsx_cli.common.failure import CliError

WORK = ".tsx-batch"  # behind the output's name: the directory of its run
JOURNAL = "journal.json"
AT_ONCE = 16  # objects that are written at a time
LONGEST_NAME = 200  # bytes of a file's name, to which its kind is added; file systems take 255
Write = Callable[[BinaryIO], object]


def _resolve_own(output: str) -> Path:
    """Follow the links on the way to an output, but none of another user. Raises CliError,
    OSError.
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
    """What is written is on the disk on return.

    Raises OSError, CliError. An `output` that ends with a slash is a directory of files.
    """

    def __init__(self, output: str) -> None:
        self.output = output
        self._path = _resolve_own(output)
        self._work = self._path.with_name(f"{self._path.name}{WORK}")
        self._files = self._work / "files"
        self._lock: FileLock | None = None

    def exists(self) -> bool:
        """Whether the output, or a file in it, is there."""
        return any(self._path.iterdir()) if self._path.is_dir() else self._path.exists()

    def lock(self) -> None:
        """Before all but `exists`. Raises CliError where another run has it."""
        while self._lock is None or not self._lock.is_current():  # another run that ends removes it
            if self._lock is not None:
                self._lock.close()
            try:
                private_directory(self._work)
            except PermissionError as error:
                todo = (
                    "Remove it if you can, or name an output in a directory that no other user can"
                    " write to"
                )
                raise CliError(
                    f"{self.output} cannot be written: {error.strerror}. {todo}."
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
        """As a whole or not at all."""
        self._replace(self._work / name, lambda file: file.write(content))

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """To a directory."""
        paths, folders = [self._files / name for name in files], {self._work}
        for path, content in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)  # whole or not: it is no part of the output yet
            folders |= {parent for parent in path.parents if self._work in parent.parents}
        for path in (
            *paths,
            *folders,
        ):  # once all are written, as the first takes most others along
            _sync(path)

    def remove_files(self, names: Iterable[str]) -> None:
        for name in names:
            (self._files / name).unlink(missing_ok=True)

    def publish(self, write: Write | None) -> None:
        """What `write` writes becomes the output, as a whole; without it, the directory is
        complete. May be called again.
        """
        if write is not None:
            self._replace(self._path, write)
        elif self._files.is_dir():
            self._files.replace(self._path)  # which is nothing, or an empty directory
            _sync(self._path.parent)
        else:
            self._path.mkdir(exist_ok=True)

    def clear(self) -> None:
        """Remove all but the output, the journal first: it must not speak of parts that are
        gone.
        """
        (self._work / JOURNAL).unlink(missing_ok=True)
        _sync(self._work)
        for each in self._work.iterdir():
            if each.is_dir():
                shutil.rmtree(each)
            elif each.name != "lock":
                each.unlink()

    def close(self) -> None:
        if self._lock is not None:
            try:
                if self._lock.is_current() and [each.name for each in self._work.iterdir()] == [
                    "lock"
                ]:
                    shutil.rmtree(self._work)
            finally:
                self._lock.close()

    def _replace(self, path: Path, write: Write) -> None:
        """By way of a file that always has the same name, so that a run that is killed leaves no
        others behind.
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
    """As `LocalStore`, but S3 has no locks: two runs at a time are not kept from each other."""

    def __init__(self, output: str, s3: S3) -> None:
        self.output, self._s3 = output, s3
        self._work = f"{output.rstrip('/')}{WORK}/"

    def exists(self) -> bool:
        with self._s3.calls(self.output) as client:
            bucket, key = place(self.output).values()
            found = client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get("Contents", [])
        return any(key.endswith("/") or each["Key"] == key for each in found)

    def lock(self) -> None:
        pass

    def read(self, name: str) -> bytes | None:
        url = self._work + name
        with self._s3.calls(url) as client:
            try:
                content: bytes = client.get_object(**place(url))["Body"].read()
            except client.exceptions.NoSuchKey:
                return None
        return content

    def put(self, name: str, content: bytes) -> None:
        self._put(self._work + name, content)

    def add_files(self, files: Mapping[str, bytes]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._put, (f"{self.output}{name}" for name in files), files.values()))

    def remove_files(self, names: Iterable[str]) -> None:
        for name in names:
            self._delete(f"{self.output}{name}")

    def publish(self, write: Write | None) -> None:
        if write is not None:
            with tempfile.TemporaryFile() as file, self._s3.calls(self.output) as client:
                write(file)
                file.seek(0)
                client.upload_fileobj(file, *place(self.output).values())

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
            client.put_object(**place(url), Body=content)

    def _delete(self, url: str) -> None:
        with self._s3.calls(url) as client:
            client.delete_object(**place(url))


OutputStore: TypeAlias = LocalStore | S3Store


def file_name(id: str) -> str:
    """The path of a row's file in a directory, which it cannot lead out of.

    A part that is too long for a file system is cut.
    """
    parts = [
        re.sub(r"[\x00-\x1f\x7f%\\]|^\.", lambda found: f"%{ord(found[0]):02X}", part) or "%"
        for part in id.split("/")
    ]
    return "/".join(part if len(part.encode()) <= LONGEST_NAME else _cut(part) for part in parts)


def _cut(name: str) -> str:
    """With a digest, as the names of two rows stay two."""
    return f"{name.encode()[: LONGEST_NAME - 17].decode(errors='ignore')}%{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _sync(path: Path) -> None:
    """The content of a file, or the names in a directory, are on the disk on return."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
