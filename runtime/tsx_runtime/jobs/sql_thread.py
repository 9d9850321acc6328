"""Transactions of SQLite or PostgreSQL in one thread, which commits together what has come while it was busy."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from tsx_runtime.errors import StoreUnavailable, TsxError
from tsx_runtime.jobs.schema import TABLES, VERSION

GROUP = 256  # transactions of one commit
ResultT = TypeVar("ResultT")


class Dialect(NamedTuple):
    """Where the two differ."""

    parameter: str
    now: str  # seconds since the epoch, by the clock that all servers of the queue share
    types: Mapping[str, str]  # of columns
    locked: str  # has a SELECT leave out what other servers work on


class Session:
    """One transaction."""

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self._connection = connection
        self._dialect = dialect

    def run(self, sql: str, *values: Any) -> int:
        """The number of rows that were changed."""
        changed: int = self._connection.execute(self._translated(sql), values).rowcount
        return changed

    def rows(self, sql: str, *values: Any) -> list[Any]:
        found: list[Any] = self._connection.execute(self._translated(sql), values).fetchall()
        return found

    def row(self, sql: str, *values: Any) -> Any:
        """None where there is none."""
        return next(iter(self.rows(sql, *values)), None)

    def _translated(self, sql: str) -> str:
        sql = sql.replace("{now}", self._dialect.now).replace("{locked}", self._dialect.locked)
        return sql if self._dialect.parameter == "?" else sql.replace("?", self._dialect.parameter)


class _Call(NamedTuple):
    work: Callable[[Session], Any]
    result: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class SqlThread(ABC):
    """Its calls become transactions in a thread: those that have come while it was busy share its next commit."""

    dialect: Dialect

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: Any = None

    # What differs between databases. All of it is called in the thread.

    @abstractmethod
    def connect(self) -> Any:
        """A connection in no transaction. Raises TsxError, or an error of the driver's."""

    @abstractmethod
    def begin(self, connection: Any) -> None: ...

    @abstractmethod
    def fault(self, error: Exception) -> TsxError:
        """What an error of the driver's means."""

    @abstractmethod
    def is_lost(self, connection: Any) -> bool:
        """Whether there must be a new connection after an error."""

    @abstractmethod
    def prepare(self, session: Session) -> None:
        """In the transaction that makes the tables, before it does."""

    def disconnect(self, connection: Any) -> None:
        connection.close()

    # The thread

    async def open(self) -> None:
        await self.do(lambda session: None)

    async def close(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def do(self, work: Callable[[Session], ResultT]) -> ResultT:
        """`work` may be called again where its transaction has failed; it raises a `TsxError` only before it has written anything."""
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tsx jobs", daemon=True)
            self._thread.start()
        result: asyncio.Future[ResultT] = loop.create_future()
        self._calls.put(_Call(work, result, loop))
        return await result

    def _run(self) -> None:
        ended = False
        while not ended:
            calls = [self._calls.get()]
            with suppress(queue.Empty):
                while len(calls) < GROUP:
                    calls.append(self._calls.get_nowait())
            ended = None in calls
            if group := [call for call in calls if call is not None]:
                self._commit(group)
        if self._connection is not None:
            self.disconnect(self._connection)
            self._connection = None

    def _commit(self, group: Sequence[_Call], *, again: bool = True) -> None:
        """One transaction; where it fails, one for each call, so that none fails for another's sake."""
        try:
            results = self._transaction(group)
        except Exception as error:  # the boundary of the thread: it is raised where the call is waited for
            lost = self._rolled_back()
            if len(group) > 1 or (lost and again):
                for call in group:
                    self._commit([call], again=False)
                return
            results = [error if isinstance(error, TsxError) else self.fault(error)]
        for call, result in zip(group, results, strict=True):
            with suppress(RuntimeError):  # the loop has ended, and with it every waiter
                call.loop.call_soon_threadsafe(_set, call.result, result)

    def _transaction(self, group: Sequence[_Call]) -> list[Any]:
        if self._connection is None:
            self._connection = self._connected()
        self.begin(self._connection)
        session, results = Session(self._connection, self.dialect), []
        for call in group:
            try:
                results.append(call.work(session))
            except TsxError as error:
                results.append(error)
        self._connection.commit()
        return results

    def _connected(self) -> Any:
        connection = self.connect()
        try:
            self.begin(connection)
            session = Session(connection, self.dialect)
            self.prepare(session)
            for statement in TABLES.format(**self.dialect.types).split(";"):
                session.run(statement)
            version = session.row("SELECT version FROM tsx_schema")
            if version is None:
                session.run("INSERT INTO tsx_schema (version) VALUES (?)", VERSION)
            elif version[0] != VERSION:
                text = f"jobs_store has the tables of another release (format {version[0]}, this one reads {VERSION})."
                raise StoreUnavailable(f"{text} Name another store.")
            connection.commit()
        except BaseException:
            self.disconnect(connection)
            raise
        return connection

    def _rolled_back(self) -> bool:
        """Whether the connection is lost."""
        if self._connection is None:
            return False
        with suppress(Exception):  # a connection that cannot roll back is lost, and closed below
            self._connection.rollback()
        if not self.is_lost(self._connection):
            return False
        with suppress(Exception):  # there is nothing left to be closed properly
            self.disconnect(self._connection)
        self._connection = None
        return True


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
