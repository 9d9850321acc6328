"""The store of answers, truth, counts and contests, in SQL that SQLite and PostgreSQL both take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from tsx_archiver.errors import CacheError
from tsx_archiver.storage.private_directory import private_directory, private_opener
from tsx_runtime.errors import StoreUnavailable
from tsx_runtime.settings.fields import POSTGRES

SCHEMA_VERSION = 1  # a change of TABLES raises it
# The first server that opens a store writes the version into it.
SCHEMA_TABLE = (
    "CREATE TABLE IF NOT EXISTS tsx_monitor_schema (version INTEGER NOT NULL)",
    f"INSERT INTO tsx_monitor_schema SELECT {SCHEMA_VERSION}"
    " WHERE NOT EXISTS (SELECT * FROM tsx_monitor_schema)",
)
# A count is of answers with the same hour, group, class and truth. The attribute '' stands for all
# answers, and its value is the confidence's decile. The kind is 0 for answers whose truth is not
# known, 1 for those with a true class and 2 for those with a true number, whose errors are summed.
# A mirrored request has an answer of each version.
TABLES = """
CREATE TABLE IF NOT EXISTS tsx_monitor_answers (
  model TEXT NOT NULL, request_id TEXT NOT NULL, version TEXT NOT NULL, row INTEGER NOT NULL,
  at DOUBLE PRECISION NOT NULL, prediction TEXT, number DOUBLE PRECISION,
  confidence DOUBLE PRECISION, key TEXT, attributes TEXT NOT NULL, truth TEXT,
  error DOUBLE PRECISION, truth_at DOUBLE PRECISION,
  PRIMARY KEY (model, request_id, version, row)
);
CREATE INDEX IF NOT EXISTS tsx_monitor_answers_at ON tsx_monitor_answers (at);
CREATE INDEX IF NOT EXISTS tsx_monitor_answers_key
  ON tsx_monitor_answers (model, key, at) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS tsx_monitor_answers_truth
  ON tsx_monitor_answers (model, version, at, number, error) WHERE truth IS NOT NULL;
CREATE INDEX IF NOT EXISTS tsx_monitor_answers_worst
  ON tsx_monitor_answers (model, version, error, confidence) WHERE error > 0;
CREATE TABLE IF NOT EXISTS tsx_monitor_counts (
  model TEXT NOT NULL, version TEXT NOT NULL, hour INTEGER NOT NULL, attribute TEXT NOT NULL,
  value TEXT NOT NULL, kind INTEGER NOT NULL, prediction TEXT NOT NULL, truth TEXT NOT NULL,
  answers INTEGER NOT NULL, confidence DOUBLE PRECISION NOT NULL, total DOUBLE PRECISION NOT NULL,
  squares DOUBLE PRECISION NOT NULL,
  PRIMARY KEY (model, version, hour, attribute, value, kind, prediction, truth)
);
CREATE TABLE IF NOT EXISTS tsx_monitor_states (
  model TEXT NOT NULL, version TEXT NOT NULL, instance TEXT NOT NULL,
  updated DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, PRIMARY KEY (model, version, instance)
);
CREATE TABLE IF NOT EXISTS tsx_monitor_contests (
  id TEXT PRIMARY KEY, model TEXT NOT NULL, version TEXT NOT NULL, request_id TEXT NOT NULL,
  at DOUBLE PRECISION NOT NULL, answered_at DOUBLE PRECISION, reason TEXT NOT NULL,
  prediction TEXT, state TEXT NOT NULL, response TEXT NOT NULL,
  UNIQUE (model, request_id, version)
)
"""
MAX_NAME_CHARS = 500  # PostgreSQL cannot index a key of more than 2,700 bytes.
TIMEOUT_S = 5  # limit of the wait for a connection, during which nothing else is done
# Servers that start together make the tables one by one, by the number of an advisory lock.
LOCK_TABLES = "SELECT pg_advisory_xact_lock(1954049391)"

EXPIRE = (  # Samples wait for a transaction, so it deletes a part.
    "DELETE FROM tsx_monitor_answers WHERE (model, request_id, version, row) IN (SELECT model,"
    " request_id, version, row FROM tsx_monitor_answers WHERE at < :before LIMIT 20000)",
    "DELETE FROM tsx_monitor_counts WHERE hour < :before / 3600 OR answers = 0",
    "DELETE FROM tsx_monitor_states WHERE updated < :before",
    "DELETE FROM tsx_monitor_contests WHERE at < :before AND state != 'open'",
)
ADD_ANSWERS = """
INSERT INTO tsx_monitor_answers VALUES (:model, :request_id, :version, :row, :at, :prediction,
  :number, :confidence, :key, :attributes, :truth, :error, :truth_at) ON CONFLICT DO NOTHING
"""
ADD_COUNTS = """
INSERT INTO tsx_monitor_counts AS old VALUES (:model, :version, :hour, :attribute, :value, :kind,
  :prediction, :truth, :answers, :confidence, :total, :squares)
ON CONFLICT (model, version, hour, attribute, value, kind, prediction, truth) DO UPDATE SET
  answers = old.answers + excluded.answers, confidence = old.confidence + excluded.confidence,
  total = old.total + excluded.total, squares = old.squares + excluded.squares
"""


class MonitoredAnswer(NamedTuple):
    """The answer to one row of a request."""

    model: str
    request_id: str
    version: str
    row: int
    at: float
    prediction: str | None  # a class, or a number as text
    number: float | None
    confidence: float | None
    key: str | None
    attributes: str
    """Groups by attribute as JSON: those of recorded requests, and null for those that were counted
    with the truth without being stored."""
    truth: str | None = None
    error: float | None = None  # 0 or 1, or the absolute error of a number
    truth_at: float | None = None


class CountKey(NamedTuple):
    model: str
    version: str
    hour: int
    attribute: str
    value: str
    kind: int
    prediction: str
    truth: str


# Changes of counts that are not written yet, as counters of `answers` and of the sums.
CountChanges = dict[CountKey, Any]


class MonitorStore:
    """A store that several servers can share if it is a PostgreSQL database.

    Raises:
        StoreUnavailable: By all methods: the store cannot be used; nothing was written.
    """

    def __init__(self, location: str | None, retention_s: float) -> None:
        self.retention_s = retention_s
        self.is_configured = bool(location)
        self._location = location or ""
        self._is_postgres = self._location.startswith(POSTGRES)
        self._label = "the database" if self._is_postgres else self._location
        self._engine: Engine | None = None
        self._problem = ""
        self._pause_until = 0.0  # time.monotonic() of the next attempt to reach a database

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        if not self.is_configured:
            raise StoreUnavailable("Answers are not stored: set monitor_store or state_dir.")
        if time.monotonic() < self._pause_until:
            raise StoreUnavailable(self._problem, retry_after=TIMEOUT_S)
        try:
            is_deleted = not self._is_postgres and not Path(self._location).exists()
            if self._engine is not None and is_deleted:
                self._engine.dispose()  # What is written to the deleted file would be lost.
                self._engine = None
            if self._engine is None:
                self._engine = self._open()
            with self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, OSError, CacheError, ImportError) as error:
            self._problem = (
                f"The store of monitoring, {self._label}, cannot be used: {_reason(error)}. Free"
                " space or repair it, or name another store; then send the request again."
            )
            if self._is_postgres:
                self._pause_until = time.monotonic() + TIMEOUT_S
            raise StoreUnavailable(self._problem, retry_after=TIMEOUT_S) from error

    def read(self, sql: str, **values: Any) -> list[dict[str, Any]]:
        """Return the rows of a query in a transaction of its own."""
        with self.transaction() as connection:
            return [dict(row._mapping) for row in connection.execute(text(sql), values)]

    def write(
        self, connection: Connection, answers: Iterable[MonitoredAnswer], changes: CountChanges
    ) -> None:
        """Store answers, except those whose request id is known, and change the counts."""
        rows = [row._asdict() for row in answers]
        # The order is the same in all servers, so that none waits for another in a circle.
        sums = [key._asdict() | dict(sums) for key, sums in sorted(changes.items())]
        for sql, values in ((ADD_ANSWERS, rows), (ADD_COUNTS, sums)):
            if values:
                connection.execute(text(sql), values)

    def expire(self) -> None:
        """Delete a part of what is older than the retention; unanswered contests stay."""
        values = {"before": time.time() - self.retention_s}
        with self.transaction() as connection:
            for sql in EXPIRE:
                connection.execute(text(sql), values)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _open(self) -> Engine:
        engine = self._postgres_engine() if self._is_postgres else self._sqlite_engine()
        first = LOCK_TABLES if self._is_postgres else "PRAGMA journal_mode=WAL"
        with engine.begin() as connection:
            for statement in (first, *SCHEMA_TABLE):
                connection.execute(text(statement))
            version = connection.scalar(text("SELECT version FROM tsx_monitor_schema"))
            if version != SCHEMA_VERSION:
                release = "a newer" if version > SCHEMA_VERSION else "an older"
                raise StoreUnavailable(
                    f"The store of monitoring, {self._label}, has the tables of {release} release"
                    f" (version {version}; this release has {SCHEMA_VERSION}). Start that release,"
                    " or name another monitor_store."
                )
            for statement in TABLES.split(";"):
                connection.execute(text(statement))
        return engine

    def _sqlite_engine(self) -> Engine:
        path = Path(self._location)
        private_directory(path.parent)
        with open(path, "ab", opener=private_opener):
            pass
        return create_engine(f"sqlite:///{path}")

    def _postgres_engine(self) -> Engine:
        import psycopg  # an optional dependency
        from psycopg.conninfo import conninfo_to_dict

        defaults: dict[str, Any] = {
            "connect_timeout": TIMEOUT_S,
            "options": "-c statement_timeout=20000",
        }
        try:
            parts = conninfo_to_dict(self._location)
        except psycopg.Error:  # The error's text may contain the password.
            raise OSError("its URL is not postgresql://USER:PASSWORD@HOST:PORT/DATABASE") from None
        self._label = f"postgresql://{parts.get('host') or ''}/{parts.get('dbname') or ''}"
        connect = partial(psycopg.connect, **defaults | parts)
        return create_engine("postgresql+psycopg://", creator=connect, pool_pre_ping=True)


def clean(value: object) -> str | None:
    """Return a value as a text that both databases can store; None stays None."""
    if value is None:
        return None
    return str(value).encode(errors="replace").decode().replace("\0", "\ufffd")


def _reason(error: Exception) -> str:
    """Return an error's message without its details, which quote rows and statements."""
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, ImportError):
        return "PostgreSQL needs the extra postgres: pip install 'tsx-serve[postgres]'"
    diagnosis = getattr(cause, "diag", None)
    return getattr(diagnosis, "message_primary", None) or str(cause)
