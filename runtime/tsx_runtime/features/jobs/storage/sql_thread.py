"""Transactions of SQLite or PostgreSQL in one thread, which commits calls in groups."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from tsx_runtime.errors import StoreUnavailable, TsxError
from tsx_runtime.features.jobs.storage.schema import TABLES, VERSION

MAX_GROUP = 256  # transactions of one commit
ResultT = TypeVar("ResultT")

logger = logging.getLogger("tsx.jobs")


class Session:
    """One transaction."""

    def __init__(self, connection: Any, dialect: Mapping[str, str]) -> None:
        """Begin a transaction; `dialect` maps `{begin}`, `{now}`, `{locked}` and `?` to SQL."""
        # Numbers of queued and running jobs, by client and for all clients (""), once counted.
        self.job_counts: dict[str, int] = {}
        self._connection = connection
        self._dialect = dialect

    def run(self, sql: str, *values: Any) -> int:
        """Execute a statement; return the number of changed rows."""
        changed: int = self._execute(sql, values).rowcount
        return changed

    def rows(self, sql: str, *values: Any) -> list[Any]:
        rows: list[Any] = self._execute(sql, values).fetchall()
        return rows

    def row(self, sql: str, *values: Any) -> Any:
        """Return the first row, or None."""
        return next(iter(self.rows(sql, *values)), None)

    def _execute(self, sql: str, values: Sequence[Any]) -> Any:
        for placeholder, replacement in self._dialect.items():
            sql = sql.replace(placeholder, replacement)
        return self._connection.execute(sql, values)


class _Call(NamedTuple):
    work: Callable[[Session], Any]
    result: asyncio.Future[Any]


class SqlThread(ABC):
    """A thread that runs each call in a transaction.

    Calls that arrive while the thread is busy share the next commit.
    """

    # The differences between databases; the thread calls these methods.

    dialect: Mapping[str, str]  # see `Session`
    types: Mapping[str, str]  # types of columns
    driver_error: type[Exception]

    @abstractmethod
    def connect(self) -> Any:
        """Return a connection without a transaction.

        Raises:
            Exception: A TsxError, or an error of the driver.
        """

    @abstractmethod
    def fault(self, error: Exception) -> TsxError:
        """Return the TsxError for an error of the driver."""

    @abstractmethod
    def prepare(self, session: Session) -> None:
        """Prepare the database, in the transaction that then makes the tables."""

    def is_lost(self, connection: Any) -> bool:
        """Tell whether an error requires a new connection."""
        return False

    def disconnect(self, connection: Any) -> None:
        connection.close()

    # The thread

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: Any = None

    async def open(self) -> None:
        """Connect, and make missing tables; otherwise the first call of `do` does this."""
        await self.do(lambda session: None)

    async def close(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def do(self, work: Callable[[Session], ResultT]) -> ResultT:
        """Run `work` in a transaction, perhaps again after a failure, and return its result.

        `work` may raise a `TsxError` only before it has written anything.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tsx jobs", daemon=True)
            self._thread.start()
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._calls.put(_Call(work, result))
        return await result

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            calls = [self._calls.get()]
            with suppress(queue.Empty):
                while len(calls) < MAX_GROUP:
                    calls.append(self._calls.get_nowait())
            is_closing = None in calls
            if group := [call for call in calls if call is not None]:
                self._commit(group)
        if self._connection is not None:
            self.disconnect(self._connection)
            self._connection = None

    def _commit(self, group: Sequence[_Call], *, may_retry: bool = True) -> None:
        """Commit a group in one transaction; after a failure, each call in its own.

        Thus no call fails because of another. If there is no connection, all calls fail.
        """
        try:
            if self._connection is None:
                self._connection = self._open_connection()
        except Exception as error:
            # An exception that escaped would end the thread; each caller gets it instead.
            results: list[Any] = [self._fault(error) for _ in group]
        else:
            try:
                results = self._transaction(self._connection, group)
            except Exception as error:
                is_lost = self._roll_back()
                if is_lost and may_retry:
                    self._commit(group, may_retry=False)
                    return
                if not is_lost and len(group) > 1:
                    for call in group:
                        self._commit([call])
                    return
                results = [self._fault(error) for _ in group]
        for call, result in zip(group, results, strict=True):
            # The caller's event loop may be closed; then nobody waits for the result.
            with suppress(RuntimeError):
                call.result.get_loop().call_soon_threadsafe(_set, call.result, result)

    def _transaction(self, connection: Any, group: Sequence[_Call]) -> list[Any]:
        session, results = Session(connection, self.dialect), []
        session.run("{begin}")
        for call in group:
            try:
                results.append(call.work(session))
            except TsxError as error:
                results.append(error)
        connection.commit()
        return results

    def _open_connection(self) -> Any:
        connection = self.connect()
        try:
            session = Session(connection, self.dialect)
            session.run("{begin}")
            self.prepare(session)
            for statement in TABLES.format(**self.types).split(";"):
                session.run(statement)
            version = session.row("SELECT version FROM tsx_schema")
            if version is None:
                session.run("INSERT INTO tsx_schema (version) VALUES (?)", VERSION)
            elif version[0] != VERSION:
                text = (
                    f"jobs_store has the tables of another release (format {version[0]}, this one"
                    f" reads {VERSION})."
                )
                raise StoreUnavailable(f"{text} Name another store.")
            connection.commit()
        except BaseException:
            self.disconnect(connection)
            raise
        return connection

    def _fault(self, error: Exception) -> Exception:
        if isinstance(error, TsxError):
            return error
        if not isinstance(error, self.driver_error):
            logger.error("a transaction of jobs_store failed unexpectedly", exc_info=error)
        return self.fault(error)

    def _roll_back(self) -> bool:
        """Roll back; tell whether the connection is lost."""
        with suppress(
            Exception
        ):  # If the roll-back fails, the connection counts as lost and is closed below.
            self._connection.rollback()
        if not self.is_lost(self._connection):
            return False
        with suppress(Exception):  # The connection is lost, so an error at its end does not matter.
            self.disconnect(self._connection)
        self._connection = None
        return True


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
