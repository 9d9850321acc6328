"""The store in a SQLite file of one server, shared only while another server replaces it."""

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

PAGE_BYTES = 4096
POLL_S = 0.05  # between checks whether the other server has released the file
MAX_PAGES = 4_294_967_294  # SQLite's own limit
MAX_LOG_BYTES = 64 << 20  # the size of the write-ahead log


class SqliteStore(SqlStore):
    """A store in a SQLite file: in WAL mode with synchronous=FULL, a commit is on the disk.

    The running jobs of a killed server are queued again at once.
    """

    dialect = {
        "{begin}": "BEGIN IMMEDIATE",
        "{now}": "((julianday('now') - 2440587.5) * 86400.0)",
        "{locked}": "",
    }
    types = {"serial": "INTEGER PRIMARY KEY AUTOINCREMENT", "real": "REAL", "blob": "BLOB"}
    driver_error = sqlite3.Error

    def __init__(self, path: Path, most: int = 0) -> None:
        """Use a file of at most `most` bytes; 0: no limit."""
        super().__init__()
        self.path = path
        self._most = most
        self._lock: FileLock | None = None
        self._is_mine = True  # until another server replaces this one
        # time.monotonic() until an earlier server uses the file; None without one.
        self._shared_until: float | None = None

    @property
    def shared(self) -> bool:
        return not self._is_mine or (
            self._shared_until is not None and time.monotonic() < self._shared_until
        )

    def follow(self, seconds: float) -> None:
        self._shared_until = time.monotonic() + seconds

    def hand_over(self) -> None:
        """Pass the lock to another server; this server's jobs remain its own by their leases."""
        self._is_mine = False
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError, CacheError):  # The other server must not wait.
                self._drain()
            lock.close()

    def exists(self) -> bool:
        return self.path.exists()

    def connect(self) -> sqlite3.Connection:
        try:
            private_directory(self.path.parent)
            self._lock_file()
            with open(self.path, "ab", opener=private_opener):
                pass
            # The driver must not begin transactions.
            connection = sqlite3.connect(self.path, isolation_level=None)
            for pragma in (
                f"page_size={PAGE_BYTES}",
                "journal_mode=WAL",
                f"journal_size_limit={MAX_LOG_BYTES}",
                "synchronous=FULL",
                f"max_page_count={self._most // PAGE_BYTES or MAX_PAGES}",
            ):
                connection.execute(f"PRAGMA {pragma}")
        except (OSError, CacheError) as error:
            self._unlock()
            reason = getattr(error, "strerror", None) or error
            raise StoreUnavailable(
                f"jobs_store, {self.path}, cannot be written: {reason}. Name another file."
            ) from error
        except sqlite3.Error:
            self._unlock()
            raise
        return connection

    def prepare(self, session: Session) -> None:
        with closing(self._draining()) as draining:
            alone = (
                self._is_mine and self._shared_until is None and draining.lock_exclusive(wait=False)
            )
        if alone and session.row("SELECT 1 FROM sqlite_master WHERE name = 'tsx_jobs'"):
            session.run(f"UPDATE tsx_jobs SET {REQUEUE} WHERE state = 'running'")
            # The killed server was sending it.
            session.run("UPDATE tsx_callbacks SET due = {now} WHERE due > {now} AND error = ''")
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
        self._unlock()

    def _draining(self) -> FileLock:
        """Return the lock that replaced servers share while they finish their jobs.

        The server that replaced them may have died.
        """
        return FileLock(self.path.with_name(self.path.name + ".draining"))

    def _drain(self) -> None:
        draining = self._draining()
        while not draining.lock_shared():  # Another server is checking the lock.
            time.sleep(POLL_S)
        self._lock = draining

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_file(self) -> None:
        """Take the lock beside the file, which ends with this process.

        Raises:
            StoreUnavailable: Another server has the file.
            OSError, CacheError: The lock cannot be taken.
        """
        if not self._is_mine:
            self._drain()
            return
        lock = FileLock(self.path.with_name(self.path.name + ".lock"))
        while not lock.lock_exclusive(wait=False):
            if self.shared:
                time.sleep(POLL_S)  # This is the store's thread.
                continue
            lock.close()
            text = f"jobs_store, {self.path}, is in use by another running server."
            raise StoreUnavailable(
                f"{text} Name another file, or a postgresql:// URL, which servers can share."
            )
        self._lock = lock
        if not self._is_mine:  # It was handed over while this waited.
            self.hand_over()
