"""The store of answers, truth, counts and contests, in SQL that SQLite and PostgreSQL both take."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, Row, bindparam, create_engine, event, text
from sqlalchemy.exc import SQLAlchemyError

from tsx_archiver.errors import CacheError
from tsx_archiver.storage.private_directory import private_directory, private_opener
from tsx_runtime.errors import StoreUnavailable

SCHEMA = 1
# The attribute '' stands for all answers. Its value is '', or with a truth the confidence's decile.
# The kind is 0 for all answers, 1 for those with a true class and 2 for those with a true number,
# whose errors are summed. A mirrored request has an answer of each version.
TABLES = """
CREATE TABLE IF NOT EXISTS tsx_monitor_schema (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tsx_monitor_answers (
  model TEXT NOT NULL, request_id TEXT NOT NULL, version TEXT NOT NULL, row INTEGER NOT NULL,
  at DOUBLE PRECISION NOT NULL, prediction TEXT, number DOUBLE PRECISION,
  confidence DOUBLE PRECISION, key TEXT, attributes TEXT, truth TEXT, error DOUBLE PRECISION,
  truth_at DOUBLE PRECISION, counted TEXT NOT NULL,
  PRIMARY KEY (model, request_id, version, row)
);
CREATE INDEX IF NOT EXISTS tsx_monitor_answers_at ON tsx_monitor_answers (at);
CREATE INDEX IF NOT EXISTS tsx_monitor_answers_key
  ON tsx_monitor_answers (model, key, at) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS tsx_monitor_answers_truth
  ON tsx_monitor_answers (model, version, at) WHERE truth IS NOT NULL;
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
POSTGRES = ("postgresql://", "postgres://")
SQLITE = "sqlite:///"
TIMEOUT_S = 5  # limit of the wait for a lock or a connection, during which nothing else is done
STATEMENT_TIMEOUT_MS = 20_000
# The number of an advisory lock, so that servers that start together make the tables one by one.
TABLES_LOCK = 0x7478_6D6F
HOUR_S = 3600

EXPIRE = (  # Samples wait for a transaction, so it deletes a part.
    "DELETE FROM tsx_monitor_answers WHERE (model, request_id, version, row) IN (SELECT model,"
    " request_id, version, row FROM tsx_monitor_answers WHERE at < :before LIMIT 5000)",
    "DELETE FROM tsx_monitor_counts WHERE hour < :before / 3600 OR answers = 0",
    "DELETE FROM tsx_monitor_states WHERE updated < :before",
    "DELETE FROM tsx_monitor_contests WHERE at < :before AND state != 'open'",
)


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
    key: str | None = None
    attributes: str | None = None  # groups by attribute as JSON, only of recorded requests
    truth: str | None = None
    error: float | None = None  # 0 or 1, or the absolute error of a number
    truth_at: float | None = None
    counted: str = ""  # attributes that are counted with the truth, as JSON


class CountKey(NamedTuple):
    model: str
    version: str
    hour: int
    attribute: str
    value: str
    kind: int
    prediction: str = ""
    truth: str = ""


class CountChanges(dict[CountKey, list[float]]):
    """Changes of counts that are not written yet."""

    def add(self, key: CountKey, answers: int, confidence: float | None, error: float = 0) -> None:
        """Add answers, or with -1 remove one."""
        sums = self.setdefault(key, [0, 0.0, 0.0, 0.0])
        for index, value in enumerate((1, confidence or 0.0, error, error * error)):
            sums[index] += answers * value


def _insert(table: str, columns: Iterable[str], conflict: str) -> str:
    names = list(columns)
    values = ", ".join(f":{name}" for name in names)
    return (
        f"INSERT INTO tsx_monitor_{table} ({', '.join(names)}) VALUES ({values})"
        f" ON CONFLICT {conflict}"
    )


SUMS = ("answers", "confidence", "total", "squares")
_ADDED = ", ".join(f"{name} = tsx_monitor_counts.{name} + excluded.{name}" for name in SUMS)
ADD_ANSWERS = _insert("answers", MonitoredAnswer._fields, "DO NOTHING")
ADD_COUNTS = _insert(
    "counts",
    CountKey._fields + SUMS,
    f"({', '.join(CountKey._fields)}) DO UPDATE SET {_ADDED}",
)
SAVE_STATE = _insert(
    "states",
    ("model", "version", "instance", "updated", "state"),
    "(model, version, instance) DO UPDATE SET updated = excluded.updated, state = excluded.state",
)
ADD_CONTEST = _insert(
    "contests",
    ("id", "model", "version", "request_id", "at", "reason", "prediction", "state", "response"),
    "DO NOTHING",
)
SET_TRUTH = (
    "UPDATE tsx_monitor_answers SET truth = :truth, error = :error, truth_at = :truth_at,"
    " counted = :counted WHERE model = :model AND request_id = :request_id AND version = :version"
    " AND row = :row"
)
# A key names the newest request that had it.
FIND_KEYS = (
    "SELECT key, request_id FROM tsx_monitor_answers AS a WHERE model = :model AND key IN :names"
    " AND at = (SELECT max(at) FROM tsx_monitor_answers WHERE model = :model AND key = a.key)"
    " ORDER BY request_id"
)
FIND_ANSWERS = (
    f"SELECT {', '.join(MonitoredAnswer._fields)} FROM tsx_monitor_answers WHERE model = :model"
    " AND request_id IN :names ORDER BY request_id, version, row"
)


class MonitorStore:
    """A store that several servers can share if it is a PostgreSQL database.

    Raises:
        StoreUnavailable: By all methods: the store cannot be used; nothing was written.
    """

    def __init__(self, location: str | None, retention_s: float) -> None:
        self.retention_s = retention_s
        self.is_configured = location is not None
        self._location = (location or "").removeprefix(SQLITE)
        self._is_postgres = self._location.startswith(POSTGRES)
        self._label = "the database" if self._is_postgres else self._location
        self._engine: Engine | None = None
        self._problem = ""
        self._pause_until = 0.0  # time.monotonic() of the next attempt to connect

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
            if self._engine is None and self._is_postgres:
                self._pause_until = time.monotonic() + TIMEOUT_S
            raise StoreUnavailable(self._problem, retry_after=TIMEOUT_S) from error

    def read(self, sql: str, **values: Any) -> list[Row[Any]]:
        """Return the rows of a query in a transaction of its own."""
        with self.transaction() as connection:
            return list(connection.execute(text(sql), values))

    def find_answers(
        self, connection: Connection, model: str, ids: Iterable[str], keys: Collection[str]
    ) -> tuple[list[MonitoredAnswer], dict[str, str]]:
        """Return the answers with request ids, and the request ids of keys.

        The answers are locked until the end of the transaction.
        """
        lock = " FOR UPDATE" if self._is_postgres else ""
        names = bindparam("names", expanding=True)
        find_keys = text(FIND_KEYS).bindparams(names)
        find_answers = text(FIND_ANSWERS + lock).bindparams(names)
        values = {"model": model, "names": sorted(keys)}
        by_key = dict(map(tuple, connection.execute(find_keys, values))) if keys else {}
        values["names"] = sorted({*ids, *by_key.values()})
        rows = connection.execute(find_answers, values)
        return [MonitoredAnswer(*row) for row in rows], by_key

    def write(
        self, connection: Connection, answers: Iterable[MonitoredAnswer], changes: CountChanges
    ) -> None:
        """Store answers, except those whose request id is known, and change the counts."""
        # The order is the same in all servers, so that none waits for another in a circle.
        rows = [row._asdict() for row in sorted(answers, key=lambda answer: answer[:4])]
        sums = [
            key._asdict() | dict(zip(SUMS, sums, strict=True))
            for key, sums in sorted(changes.items())
        ]
        for sql, values in ((ADD_ANSWERS, rows), (ADD_COUNTS, sums)):
            if values:
                connection.execute(text(sql), values)

    def expire(self) -> bool:
        """Delete a part of what is older than the retention; tell whether there may be more.

        Contests that nobody has answered stay.
        """
        values = {"before": time.time() - self.retention_s}
        with self.transaction() as connection:
            deleted = [connection.execute(text(sql), values).rowcount for sql in EXPIRE]
        return bool(deleted[0])

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _open(self) -> Engine:
        engine = self._postgres_engine() if self._is_postgres else self._sqlite_engine()
        try:
            with engine.begin() as connection:
                if self._is_postgres:
                    connection.execute(text(f"SELECT pg_advisory_xact_lock({TABLES_LOCK})"))
                for statement in TABLES.split(";"):
                    connection.execute(text(statement))
                version = connection.scalar(text("SELECT version FROM tsx_monitor_schema"))
                if version is None:
                    connection.execute(text(f"INSERT INTO tsx_monitor_schema VALUES ({SCHEMA})"))
                elif version != SCHEMA:
                    raise StoreUnavailable(
                        f"The store of monitoring, {self._label}, has the tables of another release"
                        f" (format {version}, this one uses {SCHEMA}). Name another store."
                    )
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _sqlite_engine(self) -> Engine:
        path = Path(self._location)
        private_directory(path.parent)
        with open(path, "ab", opener=private_opener):
            pass
        engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": TIMEOUT_S})

        def set_up(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # The driver begins no transactions of its own.
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "journal_size_limit=67108864"):
                connection.execute(f"PRAGMA {pragma}")

        event.listen(engine, "connect", set_up)
        event.listen(
            engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE")
        )
        return engine

    def _postgres_engine(self) -> Engine:
        import psycopg  # an optional dependency
        from psycopg.conninfo import conninfo_to_dict

        try:
            parts = conninfo_to_dict(self._location)
        except psycopg.Error:  # The error's text may contain the password.
            raise OSError("its URL is not postgresql://USER:PASSWORD@HOST:PORT/DATABASE") from None
        self._label = f"postgresql://{parts.get('host') or ''}/{parts.get('dbname') or ''}"
        options = f"{parts.pop('options', '')} -c statement_timeout={STATEMENT_TIMEOUT_MS}"
        parameters: dict[str, Any] = {"connect_timeout": TIMEOUT_S, "application_name": "tsx"}
        return create_engine(
            "postgresql+psycopg://",
            creator=lambda: psycopg.connect(**parameters | parts, options=options),
            pool_pre_ping=True,
        )


def clean(value: str) -> str:
    """Return a text that both databases can store."""
    return value.encode(errors="replace").decode().replace("\0", "\ufffd")


def _reason(error: Exception) -> str:
    """Return an error's message without its details, which quote rows and statements."""
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, ImportError):
        return "PostgreSQL needs the extra postgres: pip install 'tsx-serve[postgres]'"
    diagnosis = getattr(cause, "diag", None)
    return getattr(diagnosis, "message_primary", None) or str(cause)
