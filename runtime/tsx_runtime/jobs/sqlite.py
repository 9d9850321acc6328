"""The store in a SQLite file, which one server has to itself, except while another replaces it."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from tsx_archiver.errors import CacheError
from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import private_directory, private_opener
from tsx_runtime.errors import StoreFull, StoreUnavailable, TsxError
from tsx_runtime.jobs.sql_store import REQUEUE, SqlStore
from tsx_runtime.jobs.sql_thread import Session

PAGE = 4096  # bytes
LOOK = 0.05  # seconds between two looks whether the other server has left the file to this one
MOST_PAGES = 4_294_967_294  # of SQLite itself
LARGEST_LOG = 64 << 20  # bytes that the write-ahead log keeps of the disk


class SqliteStore(SqlStore):
    """WAL with synchronous=FULL: a commit is on the disk when it returns.

    What a killed server was running is queued again at once.
    """

    words = {
        "{begin}": "BEGIN IMMEDIATE",
        "{now}": "((julianday('now') - 2440587.5) * 86400.0)",
        "{locked}": "",
    }
    types = {"serial": "INTEGER PRIMARY KEY AUTOINCREMENT", "real": "REAL", "blob": "BLOB"}
    driver_error = sqlite3.Error

    def __init__(self, path: Path, most: int = 0) -> None:
        """`most`: bytes of the file; 0: as many as the disk has."""
        super().__init__()
        self.path = path
        self._most = most
        self._lock: FileLock | None = None
        self._is_mine = True  # until another server replaces this one
        self._shared_until: float | None = None  # time.monotonic(); None: by no earlier server

    @property
    def shared(self) -> bool:
        return not self._is_mine or (
            self._shared_until is not None and time.monotonic() < self._shared_until
        )

    def follow(self, seconds: float) -> None:
        self._shared_until = time.monotonic() + seconds

    def hand_over(self) -> None:
        """The lock goes to the other server at once; what this one runs stays its own, by its
        leases.
        """
        self._is_mine = False
        own, self._lock = self._lock, None
        if own is not None:
            with suppress(OSError, CacheError):  # the other server is not to wait for it
                self._drain()
            own.close()

    def exists(self) -> bool:
        return self.path.exists()

    def connect(self) -> sqlite3.Connection:
        try:
            private_directory(self.path.parent)
            self._own()
            with open(self.path, "ab", opener=private_opener):
                pass
            connection = sqlite3.connect(
                self.path, isolation_level=None
            )  # transactions are begun by name
            for pragma in (
                f"page_size={PAGE}",
                "journal_mode=WAL",
                f"journal_size_limit={LARGEST_LOG}",
                "synchronous=FULL",
                f"max_page_count={self._most // PAGE or MOST_PAGES}",
            ):
                connection.execute(f"PRAGMA {pragma}")
        except (OSError, CacheError) as error:
            self._leave()
            reason = getattr(error, "strerror", None) or error
            raise StoreUnavailable(
                f"jobs_store, {self.path}, cannot be written: {reason}. Name another file."
            ) from error
        except sqlite3.Error:
            self._leave()
            raise
        return connection

    def prepare(self, session: Session) -> None:
        with closing(self._draining()) as others:
            alone = (
                self._is_mine and self._shared_until is None and others.lock_exclusive(wait=False)
            )
        if alone and session.row("SELECT 1 FROM sqlite_master WHERE name = 'tsx_jobs'"):
            session.run(f"UPDATE tsx_jobs SET {REQUEUE} WHERE state = 'running'")
            session.run(
                "UPDATE tsx_callbacks SET due = {now} WHERE due > {now} AND error = ''"
            )  # the killed server was sending it
            session.run("DELETE FROM tsx_answers WHERE status IS NULL")

    def fault(self, error: Exception) -> TsxError:
        if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
            limit = f" or has reached max_jobs_size, {self._most} bytes" if self._most else ""
            text = f"The disk of jobs_store, {self.path}, is full{limit}."
            return StoreFull(
                f"{text} Free space there, lower job_retention, or name a store on another disk."
            )
        return StoreUnavailable(f"jobs_store, {self.path}, cannot be used: {error}.")

    def disconnect(self, connection: sqlite3.Connection) -> None:
        super().disconnect(connection)
        self._leave()

    def _draining(self) -> FileLock:
        """Shared by servers that have been replaced and still run jobs: the one that replaced them
        may have died.
        """
        return FileLock(self.path.with_name(self.path.name + ".draining"))

    def _drain(self) -> None:
        draining = self._draining()
        while not draining.lock_shared():  # another server looks whether there is one
            time.sleep(LOOK)
        self._lock = draining

    def _leave(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _own(self) -> None:
        """A lock beside the file, which ends with this process.

        Raises StoreUnavailable, OSError, CacheError.
        """
        if not self._is_mine:
            self._drain()
            return
        lock = FileLock(self.path.with_name(self.path.name + ".lock"))
        while not lock.lock_exclusive(wait=False):
            if self.shared:
                time.sleep(LOOK)  # in the store's thread
                continue
            lock.close()
            text = f"jobs_store, {self.path}, is in use by another running server."
            raise StoreUnavailable(
                f"{text} Name another file, or a postgresql:// URL, which servers can share."
            )
        self._lock = lock
        if not self._is_mine:  # handed over while it waited
            self.hand_over()
