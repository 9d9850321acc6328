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
from tsx_runtime.features.jobs.storage.sql_store import REQUEUE, SqlStore
from tsx_runtime.features.jobs.storage.sql_thread import Session

PAGE_BYTES = 4096
POLL_S = 0.05  # between checks whether the other server has released the file
MAX_PAGES = 4_294_967_294  # SQLite's limit
MAX_LOG_BYTES = 64 << 20  # the size of the write-ahead log


class SqliteStore(SqlStore):
    """A store in a SQLite file.

    WAL mode with synchronous=FULL guarantees that a commit is on the disk. After a server
    was killed, the next one queues its running jobs again at once.
    """

    dialect = {
        "{begin}": "BEGIN IMMEDIATE",
        "{now}": "((julianday('now') - 2440587.5) * 86400.0)",
        "{locked}": "",
    }
    types = {"serial": "INTEGER PRIMARY KEY AUTOINCREMENT", "real": "REAL", "blob": "BLOB"}
    driver_error = sqlite3.Error

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """Use a file of at most `max_bytes`; 0: no limit."""
        super().__init__()
        self.path = path
        self._max_bytes = max_bytes
        self._lock: FileLock | None = None
        self._is_current = True  # until another server replaces this one
        # The time.monotonic() at which an earlier server stops using the file; None without one.
        self._shared_until: float | None = None

    @property
    def shared(self) -> bool:
        return not self._is_current or (
            self._shared_until is not None and time.monotonic() < self._shared_until
        )

    def follow(self, seconds: float) -> None:
        self._shared_until = time.monotonic() + seconds

    def hand_over(self) -> None:
        """Pass the lock to another server; this server keeps its running jobs by their leases."""
        self._is_current = False
        lock, self._lock = self._lock, None
        if lock is not None:
            # The other server must get the file even if the shared lock cannot be taken.
            with suppress(OSError, CacheError):
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
            # With isolation_level=None the driver begins no transactions of its own.
            connection = sqlite3.connect(self.path, isolation_level=None)
            for pragma in (
                f"page_size={PAGE_BYTES}",
                "journal_mode=WAL",
                f"journal_size_limit={MAX_LOG_BYTES}",
                "synchronous=FULL",
                f"max_page_count={self._max_bytes // PAGE_BYTES or MAX_PAGES}",
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
            is_only_user = (
                self._is_current
                and self._shared_until is None
                and draining.lock_exclusive(wait=False)
            )
        if is_only_user and session.row("SELECT 1 FROM sqlite_master WHERE name = 'tsx_jobs'"):
            session.run(f"UPDATE tsx_jobs SET {REQUEUE} WHERE state = 'running'")
            # Callbacks without an error that are due later were being sent by the killed server.
            session.run("UPDATE tsx_callbacks SET due = {now} WHERE due > {now} AND error = ''")
            session.run("DELETE FROM tsx_answers WHERE status IS NULL")

    def fault(self, error: Exception) -> TsxError:
        if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
            limit = (
                f" or has reached max_jobs_size, {self._max_bytes} bytes" if self._max_bytes else ""
            )
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

        It outlives the server that replaced them.
        """
        return FileLock(self.path.with_name(self.path.name + ".draining"))

    def _drain(self) -> None:
        draining = self._draining()
        # Another server may hold the lock for a moment, to check whether it is shared.
        while not draining.lock_shared():
            time.sleep(POLL_S)
        self._lock = draining

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_file(self) -> None:
        """Take the lock file next to the database; the lock ends with this process.

        Raises:
            StoreUnavailable: Another server has the file.
            OSError, CacheError: The lock cannot be taken.
        """
        if not self._is_current:
            self._drain()
            return
        lock = FileLock(self.path.with_name(self.path.name + ".lock"))
        while not lock.lock_exclusive(wait=False):
            if self.shared:
                time.sleep(POLL_S)  # This runs in the store's thread, so the event loop goes on.
                continue
            lock.close()
            text = f"jobs_store, {self.path}, is in use by another running server."
            raise StoreUnavailable(
                f"{text} Name another file, or a postgresql:// URL, which servers can share."
            )
        self._lock = lock
        if not self._is_current:  # `hand_over` was called during the wait.
            self.hand_over()
