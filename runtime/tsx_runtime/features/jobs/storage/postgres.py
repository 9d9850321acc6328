"""The store in a PostgreSQL database, which several servers can share."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tsx_runtime.errors import BadRequest, StoreFull, StoreUnavailable, TsxError
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.sql_thread import Session

CONNECT_TIMEOUT_S = 10
STATEMENT_TIMEOUT_MS = 60_000  # more than any statement of a store needs
# The number of an advisory lock, so that servers that start together make the tables one by one.
# Other applications must not use it.
TABLES_LOCK = 0x7478_6A6F
# If other users can create triggers, functions or operators in the schema, their code runs with the
# rights of this server's database user. The query returns the schema, whether others may create
# objects in it, and a table of the store that another user owns.
SCHEMA_CHECK = """
SELECT nspname, has_schema_privilege('public', oid, 'CREATE'), (
  SELECT min(relname) FROM pg_class
  WHERE relnamespace = s.oid AND left(relname, 4) = 'tsx_' AND NOT pg_has_role(relowner, 'USAGE'))
FROM pg_namespace AS s WHERE nspname = current_schema()
"""


class PostgresStore(SqlStore):
    """A store in a PostgreSQL database; times are the database's.

    Jobs are claimed by FOR UPDATE SKIP LOCKED. A server owns them while it renews their leases.
    """

    dialect = {
        "{begin}": "BEGIN",
        "{now}": "extract(epoch FROM clock_timestamp())::float8",
        "{locked}": "FOR UPDATE SKIP LOCKED",
        "?": "%s",
    }
    types = {
        "serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "real": "DOUBLE PRECISION",
        "blob": "BYTEA",
    }
    driver_error = psycopg.Error

    def __init__(self, url: str) -> None:
        """Use the database of a URL.

        Raises:
            psycopg.ProgrammingError: It is not the URL of a database.
        """
        super().__init__()
        self._url = url
        self._label = _without_secrets(url)

    def connect(self) -> Any:
        options = f"-c statement_timeout={STATEMENT_TIMEOUT_MS} -c synchronous_commit=on"
        parameters = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": "tsx",
            "options": options,
        } | conninfo_to_dict(self._url)
        return psycopg.connect(autocommit=True, **parameters)  # type: ignore[arg-type]  # parameters of libpq, by name

    def prepare(self, session: Session) -> None:
        session.run("SELECT pg_advisory_xact_lock(?)", TABLES_LOCK)
        session.run("SELECT set_config('search_path', quote_ident(current_schema()), false)")
        for schema, is_open, table in session.rows(SCHEMA_CHECK):
            if is_open or table:
                fault = (
                    f"the table {table} in its schema {schema} belongs to another user, whose"
                    " triggers would run as this server"
                )
                if is_open:
                    fault = (
                        f"any user of the database can put functions into its schema {schema},"
                        " which would run as this server"
                    )
                text = (
                    f"jobs_store, {self._label}, is refused: {fault}. Drop what others have made"
                    " there, and REVOKE CREATE ON SCHEMA"
                )
                raise StoreUnavailable(
                    f"{text} {schema} FROM PUBLIC; or append ?options=-csearch_path%3DSCHEMA to"
                    " the URL",
                    retry_after=5,
                )

    def is_lost(self, connection: Any) -> bool:
        return bool(connection.closed)

    def fault(self, error: Exception) -> TsxError:
        if isinstance(error, psycopg.errors.DiskFull):
            return StoreFull(
                f"The disk of jobs_store, {self._label}, is full. Free space there, or lower"
                " job_retention."
            )
        if isinstance(
            error, psycopg.DataError
        ):  # The data are invalid, for example a zero byte in a path.
            return BadRequest(f"The request cannot be stored: {_reason(error)}.")
        return StoreUnavailable(
            f"jobs_store, {self._label}, cannot be used: {_reason(error)}", retry_after=5
        )


def _reason(error: Exception) -> str:
    """Return an error's message without its details, which quote rows and statements."""
    message = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return message or str(error).strip() or type(error).__name__


def _without_secrets(url: str) -> str:
    parts = conninfo_to_dict(url)
    return f"postgresql://{parts.get('host') or ''}/{parts.get('dbname') or ''}"
