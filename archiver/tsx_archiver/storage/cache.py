"""The cache of unpacked archives, by the sha-256 of their file: created once, shared by all
processes, and cleaned up by a thread after an archive was opened.

    <cache>/archives/
        entries/<sha256>.<random>/    complete, and renamed into place whole
            files/                    the archive's members
            complete.json             their sizes; its time is when the entry was last opened or closed
            lock                      held shared as long as someone uses the entry
        partial/<sha256>.<random>/    being made; the same inside, `lock` held by the maker
        building/<two digits>         held alone while an entry is looked up or made
        seen/<sha256 of a path>       the digest of a file that has not changed since

A process that dies leaves a partial entry without a lock; the next one to make an entry removes it.
An entry whose files changed size is skipped and unpacked again beside it, since other processes may
still use the rest of it.
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
    OTHERS,
    check_directory,
    is_trusted,
    private_directory,
)

DAY = 86400.0

logger = logging.getLogger("tsx.archive")
_cleaning = threading.Lock()


class CacheLimits(NamedTuple):
    """The limits for unused entries in the cache."""

    age: float = 14 * DAY
    total: int = 10 * GIB
    entries: int = 10_000
    orphan_age: float = 3600.0  # of a partial entry that has no lock file yet


class CacheEntry(NamedTuple):
    """An unpacked archive, in use until `lock` is closed."""

    files: Path
    lock: FileLock


def default_cache() -> Path:
    """$XDG_CACHE_HOME/tsx, or ~/.cache/tsx; where that cannot be used, a temporary directory that
    goes with this process.
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
    usual = home / ".cache" / "tsx"
    try:
        check_directory(usual)
    except OSError as error:
        return _temporary_cache(str(error.strerror))
    return usual


@functools.cache
def _temporary_cache(why: str) -> Path:
    """Under a name that no other user can guess or create first."""
    directory = tempfile.mkdtemp(prefix="tsx-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    logger.warning(
        "%s, so the cache is %s until this process ends; set cache_dir to keep one", why, directory
    )
    return Path(directory)


def as_cache(cache: Path | Cache | None) -> Cache:
    """Return the cache itself, or the one in that directory; None stands for the default cache."""
    return cache if isinstance(cache, Cache) else Cache(cache or default_cache())


class CachedFiles(NamedTuple):
    """An entry as `tsx cache` lists it."""

    directory: Path
    size: int  # bytes
    used: float  # seconds since 1970, when it was last opened or closed; 0 where that is unknown
    in_use: bool


class Cache:
    def __init__(
        self,
        directory: Path,
        keep: CacheLimits = CacheLimits(),  # noqa: B008  # an immutable tuple
        kind: str = "archives",
        *,
        checked: bool = True,
    ) -> None:
        """`kind`: what the entries are, which is also the name of their directory.

        Not `checked`: nothing is run from it. It is a new directory, made where the user wants what
        is unpacked.
        """
        self.root = Path(directory) / kind
        self._keep = keep
        self._checked = checked
        try:
            for name in (
                "",
                "entries",
                "partial",
                "building",
                "seen",
            ):  # what lies there is run as code
                if checked:
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
        """The entry of `digest`, made where there is none: `make(directory)` unpacks there and
        returns each file's size.

        Waits while another process makes the same entry.
        """
        building = FileLock(self.root / "building" / digest[:2])
        try:
            building.own(wait=True)
            entry = self._find(digest)
            if entry is None:
                entry = self._make(digest, make)
            if self._checked:
                threading.Thread(target=self._clean_beside, name="tsx-cache", daemon=True).start()
            return entry
        except OSError as error:
            raise CacheError(
                f"{error.filename or self.root}: {error.strerror}. Free some disk space, or choose"
                " another cache directory.",
                str(error.strerror),
            ) from error
        finally:
            building.close()

    def _clean_beside(self) -> None:
        """Clean, unless another thread does.

        The next cleaning meets a failure again, so it is ignored.
        """
        if _cleaning.acquire(blocking=False):
            try:
                with suppress(OSError, CacheError):
                    self.clean()
            finally:
                _cleaning.release()

    def clean(self, now: float | None = None) -> None:
        """Remove what dead processes left, and unused entries that are old or beyond the bounds."""
        if not CAN_LOCK:
            return
        now = time.time() if now is None else now
        self._clean_leftovers(now)
        kept = count = 0
        for entry in sorted(
            self._listing("entries"), key=lambda path: _age(path / "complete.json", now)
        ):
            size = _recorded_size(entry)
            too_old = _age(entry / "complete.json", now) > self._keep.age
            if (
                too_old or kept + size > self._keep.total or count >= self._keep.entries
            ) and self._remove_unused(entry):
                continue
            kept, count = kept + size, count + 1

    def _clean_leftovers(self, now: float) -> None:
        for partial in self._listing("partial"):
            if (partial / "lock").exists() or _age(partial, now) > self._keep.orphan_age:
                self._remove_unused(partial)
        for note in self._listing("seen"):
            if _age(note, now) > self._keep.age:
                note.unlink(missing_ok=True)

    def listing(self) -> list[CachedFiles]:
        """All entries, the one used last first."""
        now = time.time()
        found = [
            CachedFiles(
                entry,
                _recorded_size(entry),
                max(now - _age(entry / "complete.json", now), 0.0),
                self._in_use(entry),
            )
            for entry in self._listing("entries")
        ]
        return sorted(found, key=lambda each: -each.used)

    def prune(self, age: float) -> list[CachedFiles]:
        """Remove what no process uses and none has opened for `age` seconds.

        Returns what was removed.
        """
        now = time.time()
        self._clean_leftovers(now)
        old = [each for each in self.listing() if now - each.used >= age]
        return [each for each in old if self._remove_unused(each.directory)]

    def _in_use(self, entry: Path) -> bool:
        building = FileLock(
            self.root / "building" / entry.name[:2]
        )  # so that no process looks for the entry meanwhile
        try:
            if not building.own(wait=False):
                return True
            lock = FileLock(entry / "lock")
            try:
                return not lock.own(wait=False)
            finally:
                lock.close()
        except OSError:  # it went in the meantime
            return False
        finally:
            building.close()

    def _find(self, digest: str) -> CacheEntry | None:
        for directory in self._listing("entries"):
            if not directory.name.startswith(f"{digest}."):
                continue
            try:
                if not (directory / "lock").exists() or not _is_ours(directory):
                    continue
                lock = FileLock(directory / "lock")
            except FileNotFoundError:  # another process has removed it
                continue
            if lock.share() and lock.is_current() and _is_whole(directory):
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
            if self._checked:
                _withdraw_writing(partial)
            final = self.root / "entries" / partial.name
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            lock.close()
            raise
        lock.moved(final / "lock")
        return CacheEntry(final / "files", lock)

    def _new_partial(self, digest: str) -> tuple[Path, FileLock]:
        """A directory with its lock held.

        Starts again where another process removed it before the lock was taken.
        """
        while True:
            partial = self.root / "partial" / f"{digest}.{secrets.token_hex(4)}"
            partial.mkdir(mode=0o700)
            lock = FileLock(partial / "lock")
            if lock.share() and lock.is_current():
                return partial, lock
            lock.close()

    def check_room(self, size: int) -> None:
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
        """Remove it unless someone holds its lock."""
        if not CAN_LOCK:
            return False
        try:
            lock = FileLock(directory / "lock")
        except OSError:  # it went in the meantime
            return True
        try:
            if not lock.own(wait=False):
                return False
            removed = self.root / "partial" / directory.name
            with suppress(FileNotFoundError):  # another process was faster
                directory.rename(
                    removed
                )  # first, so that nobody opens an entry of which a part is left
            shutil.rmtree(removed, ignore_errors=True)
            return True
        finally:
            lock.close()

    def _listing(self, name: str) -> list[Path]:
        return list((self.root / name).iterdir())


def release(lock: FileLock) -> None:
    """End the use of an entry; from now on it counts as unused."""
    with suppress(OSError):
        os.utime(lock.path.with_name("complete.json"))
    lock.close()


def _withdraw_writing(directory: Path) -> None:
    """Take from other users the right to write, except to hard links, which other caches own
    too.
    """
    for path in directory.rglob("*"):
        status = path.lstat()
        is_single = stat.S_ISDIR(status.st_mode) or (
            stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        )
        if is_single and status.st_mode & OTHERS:
            path.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS)


def _is_ours(directory: Path) -> bool:
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and is_trusted(status)


def _is_whole(directory: Path) -> bool:
    """Whether every file is there with its size.

    Files that a handler added beside them do not matter.
    """
    try:
        for name, size in _sizes(directory).items():
            status = os.lstat(directory / "files" / name)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _sizes(directory: Path) -> dict[str, int]:
    return dict(json.loads((directory / "complete.json").read_text(encoding="utf-8"))["files"])


def _recorded_size(directory: Path) -> int:
    try:
        return sum(_sizes(directory).values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return float("inf")
