"""The cache of unpacked archives by the SHA-256 of their files, shared by all processes.

    <cache>/archives/
        entries/<sha256>.<random>/    a complete entry, renamed into place
            files/                    the archive's members
            complete.json             their sizes; its mtime is the time of the last open or close
            lock                      has a shared lock while a process uses the entry
        partial/<sha256>.<random>/    an incomplete entry, locked by the process that creates it
        building/<two digits>         locked while an entry with this prefix is searched or created
        seen/<sha256 of a path>       the digest of the file, valid while the file does not change

A process that dies leaves an unlocked partial entry, which the next cleanup removes. If a file of
an entry does not have its recorded size, the archive is unpacked into a new entry, because other
processes may still use the old one. A thread cleans up after an archive is opened.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tsx_archiver.errors import CacheError
from tsx_archiver.limits import GIB, human
from tsx_archiver.storage.locks import CAN_LOCK, FileLock
from tsx_archiver.storage.private_directory import (
    OTHERS_WRITE,
    check_directory,
    is_trusted,
    private_directory,
)

DAY_S = 86400.0

logger = logging.getLogger("tsx.archive")
_cleanup_lock = threading.Lock()


class CacheLimits(NamedTuple):
    """The limits of unused entries; ages are in seconds, sizes in bytes."""

    age: float = 14 * DAY_S
    total: int = 10 * GIB
    entries: int = 10_000
    orphan_age: float = 3600.0  # age of a partial entry without a lock file


class CacheEntry(NamedTuple):
    """An unpacked archive, in use until `lock` is closed."""

    files: Path
    lock: FileLock


def default_cache() -> Path:
    """Return $XDG_CACHE_HOME/tsx or ~/.cache/tsx, or a temporary directory if both are unusable.

    The temporary directory is removed when this process ends.
    """
    base = os.environ.get("XDG_CACHE_HOME") or (
        os.environ.get("LOCALAPPDATA") if os.name == "nt" else None
    )
    if base and Path(base).is_absolute():
        return Path(base) / "tsx"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/nonexistent")
    if not os.access(home, os.W_OK):
        return _temporary_cache(f"the home directory {home} cannot be written")
    directory = home / ".cache" / "tsx"
    try:
        check_directory(directory)
    except OSError as error:
        return _temporary_cache(str(error.strerror))
    return directory


@functools.cache
def _temporary_cache(reason: str) -> Path:
    # No other user can guess the name, or create it first.
    directory = tempfile.mkdtemp(prefix="tsx-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    logger.warning(
        "%s, so the cache is %s until this process ends; set cache_dir to keep one",
        reason,
        directory,
    )
    return Path(directory)


def as_cache(cache: Path | Cache | None) -> Cache:
    """Return the cache of a directory, the default cache for None, or a given cache itself."""
    return cache if isinstance(cache, Cache) else Cache(cache or default_cache())


class CachedFiles(NamedTuple):
    """An entry in the list of `tsx cache`."""

    directory: Path
    size: int  # bytes
    used: float  # Unix time of the last open or close; 0 if it is unknown
    in_use: bool


class Cache:
    """A cache of unpacked archives; see the module's docstring."""

    def __init__(
        self,
        directory: Path,
        limits: CacheLimits = CacheLimits(),  # noqa: B008  # an immutable tuple
        kind: str = "archives",
        *,
        require_private: bool = True,
    ) -> None:
        """Create the directories of the cache.

        Args:
            directory: The directory of the cache.
            limits: The limits of unused entries.
            kind: The name of the subdirectory, such as `archives`.
            require_private: Whether to refuse a directory to which other users can write, because
                its files are executed. False for a new directory that the user has chosen.

        Raises:
            CacheError: The directory cannot be used.
        """
        self.root = Path(directory) / kind
        self._limits = limits
        self._require_private = require_private
        try:
            for name in ("", "entries", "partial", "building", "seen"):
                if require_private:
                    private_directory(self.root / name, strict=True)
                else:
                    (self.root / name).mkdir(mode=0o700)
        except OSError as error:
            raise CacheError(
                f"{self.root} cannot be used as a cache ({error.strerror}). Choose another cache"
                " directory, or remove it.",
                str(error.strerror),
            ) from error

    def open(self, digest: str, make: Callable[[Path], Mapping[str, int]]) -> CacheEntry:
        """Return the entry of an archive, and create it if it is missing.

        If another process is creating the same entry, this waits for it.

        Args:
            digest: The SHA-256 of the archive.
            make: A function that unpacks the archive into a directory, and returns the size of each
                file.

        Raises:
            CacheError: The cache cannot be written.
        """
        building = FileLock(self.root / "building" / digest[:2])
        try:
            building.lock_exclusive(wait=True)
            entry = self._find(digest)
            if entry is None:
                entry = self._make(digest, make)
            if self._require_private:
                threading.Thread(
                    target=self._clean_in_thread, name="tsx-cache", daemon=True
                ).start()
            return entry
        except OSError as error:
            raise CacheError(
                f"{error.filename or self.root}: {error.strerror}. Free some disk space, or choose"
                " another cache directory.",
                str(error.strerror),
            ) from error
        finally:
            building.close()

    def _clean_in_thread(self) -> None:
        """Clean up unless another thread does.

        Errors are ignored, because the next cleanup tries again.
        """
        if _cleanup_lock.acquire(blocking=False):
            try:
                with suppress(OSError, CacheError):
                    self.clean()
            finally:
                _cleanup_lock.release()

    def clean(self, now: float | None = None) -> None:
        """Remove leftovers of dead processes, and unused entries above the limits."""
        if not CAN_LOCK:
            return
        now = time.time() if now is None else now
        self._clean_leftovers(now)
        total = count = 0
        for entry in sorted(
            self._paths_in("entries"), key=lambda path: _age(path / "complete.json", now)
        ):
            size = _recorded_size(entry)
            is_too_old = _age(entry / "complete.json", now) > self._limits.age
            if (
                is_too_old or total + size > self._limits.total or count >= self._limits.entries
            ) and self._remove_unused(entry):
                continue
            total, count = total + size, count + 1

    def _clean_leftovers(self, now: float) -> None:
        for partial in self._paths_in("partial"):
            if (partial / "lock").exists() or _age(partial, now) > self._limits.orphan_age:
                self._remove_unused(partial)
        for digest_record in self._paths_in("seen"):
            if _age(digest_record, now) > self._limits.age:
                digest_record.unlink(missing_ok=True)

    def listing(self) -> list[CachedFiles]:
        """Return all entries, the last used one first."""
        now = time.time()
        entries = [
            CachedFiles(
                entry,
                _recorded_size(entry),
                max(now - _age(entry / "complete.json", now), 0.0),
                self._is_in_use(entry),
            )
            for entry in self._paths_in("entries")
        ]
        return sorted(entries, key=lambda entry: -entry.used)

    def prune(self, age: float) -> list[CachedFiles]:
        """Remove the entries that no process has used for `age` seconds, and return them."""
        now = time.time()
        self._clean_leftovers(now)
        unused_entries = [entry for entry in self.listing() if now - entry.used >= age]
        return [entry for entry in unused_entries if self._remove_unused(entry.directory)]

    def _is_in_use(self, entry: Path) -> bool:
        # This keeps other processes from opening the entry while its lock is tested.
        building = FileLock(self.root / "building" / entry.name[:2])
        try:
            if not building.lock_exclusive(wait=False):
                return True
            lock = FileLock(entry / "lock")
            try:
                return not lock.lock_exclusive(wait=False)
            finally:
                lock.close()
        except OSError:  # Another process has removed the entry.
            return False
        finally:
            building.close()

    def _find(self, digest: str) -> CacheEntry | None:
        for directory in self._paths_in("entries"):
            if not directory.name.startswith(f"{digest}."):
                continue
            try:
                if not (directory / "lock").exists() or not _is_trusted_directory(directory):
                    continue
                lock = FileLock(directory / "lock")
            except FileNotFoundError:  # Another process has removed the entry.
                continue
            if lock.lock_shared() and lock.is_current() and _is_complete(directory):
                os.utime(directory / "complete.json")
                return CacheEntry(directory / "files", lock)
            lock.close()
            self._remove_unused(directory)
        return None

    def _make(self, digest: str, make: Callable[[Path], Mapping[str, int]]) -> CacheEntry:
        partial, lock = self._new_partial(digest)
        try:
            (partial / "files").mkdir()
            sizes = make(partial / "files")
            (partial / "complete.json").write_text(json.dumps({"files": sizes}), encoding="utf-8")
            if self._require_private:
                _remove_write_permissions(partial)
            final = self.root / "entries" / partial.name
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            lock.close()
            raise
        lock.set_path(final / "lock")
        return CacheEntry(final / "files", lock)

    def _new_partial(self, digest: str) -> tuple[Path, FileLock]:
        """Create a directory for an entry, and lock it.

        Another process may remove the directory before it is locked, so this tries again.
        """
        while True:
            partial = self.root / "partial" / f"{digest}.{secrets.token_hex(4)}"
            partial.mkdir(mode=0o700)
            lock = FileLock(partial / "lock")
            if lock.lock_shared() and lock.is_current():
                return partial, lock
            lock.close()

    def check_room(self, size: int) -> None:
        """Check that the disk has room for `size` bytes, after cleaning up if necessary.

        Raises:
            CacheError: The disk is full.
        """
        if size > shutil.disk_usage(self.root).free:
            self.clean()
        free = shutil.disk_usage(self.root).free
        if size > free:
            reason = f"{human(free)} free, and the archive needs {human(size)}"
            raise CacheError(
                f"{self.root} has {reason}. Free some disk space, or choose another cache.",
                f"there is {reason}",
            )

    def _remove_unused(self, directory: Path) -> bool:
        """Remove an entry unless its lock is held, and tell whether it is gone."""
        if not CAN_LOCK:
            return False
        try:
            lock = FileLock(directory / "lock")
        except OSError:  # Another process has removed the entry.
            return True
        try:
            if not lock.lock_exclusive(wait=False):
                return False
            trash = self.root / "partial" / directory.name
            # The entry is moved first, so that no process opens a partly removed entry.
            with suppress(FileNotFoundError):
                directory.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
            return True
        finally:
            lock.close()

    def _paths_in(self, name: str) -> list[Path]:
        return list((self.root / name).iterdir())


def release(lock: FileLock) -> None:
    """End the use of an entry, which then counts as unused."""
    with suppress(OSError):
        os.utime(lock.path.with_name("complete.json"))
    lock.close()


def _remove_write_permissions(directory: Path) -> None:
    """Remove other users' write permission, except on hard links, which other caches share."""
    for path in directory.rglob("*"):
        status = path.lstat()
        has_one_link = stat.S_ISDIR(status.st_mode) or (
            stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        )
        if has_one_link and status.st_mode & OTHERS_WRITE:
            path.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)


def _is_trusted_directory(directory: Path) -> bool:
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and is_trusted(status)


def _is_complete(directory: Path) -> bool:
    """Tell whether every file exists and has its recorded size.

    Additional files are allowed, because a handler may write some.
    """
    try:
        for name, size in _read_sizes(directory).items():
            status = os.lstat(directory / "files" / name)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _read_sizes(directory: Path) -> dict[str, int]:
    return dict(json.loads((directory / "complete.json").read_text(encoding="utf-8"))["files"])


def _recorded_size(directory: Path) -> int:
    try:
        return sum(_read_sizes(directory).values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return float("inf")
