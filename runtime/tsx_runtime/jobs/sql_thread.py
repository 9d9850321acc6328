"""Transactions of SQLite or PostgreSQL in one thread, which commits together what has come while it
was busy.
"""

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
from tsx_runtime.jobs.schema import TABLES, VERSION

GROUP = 256  # transactions of one commit
ResultT = TypeVar("ResultT")

logger = logging.getLogger("tsx.jobs")


class Session:
    """One transaction."""

    def __init__(self, connection: Any, words: Mapping[str, str]) -> None:
        """`words`: what stands in this database for `{begin}`, `{now}`, `{locked}` and `?`."""
        self.live: dict[
            str,
            int,
            # jobs of a client, and of all (""), that are queued or running, as far as they were
            # counted
        ] = {}
        self._connection = connection
        self._words = words

    def run(self, sql: str, *values: Any) -> int:
        """The number of rows that were changed."""
        changed: int = self._execute(sql, values).rowcount
        return changed

    def rows(self, sql: str, *values: Any) -> list[Any]:
        found: list[Any] = self._execute(sql, values).fetchall()
        return found

    def row(self, sql: str, *values: Any) -> Any:
        """None where there is none."""
        return next(iter(self.rows(sql, *values)), None)

    def _execute(self, sql: str, values: Sequence[Any]) -> Any:
        for word, own in self._words.items():
            sql = sql.replace(word, own)
        return self._connection.execute(sql, values)


class _Call(NamedTuple):
    work: Callable[[Session], Any]
    result: asyncio.Future[Any]


class SqlThread(ABC):
    """Its calls become transactions in a thread: those that have come while it was busy share its
    next commit.
    """

    # What differs between databases. All of it is used in the thread.

    words: Mapping[str, str]  # see `Session`
    types: Mapping[str, str]  # of columns
    driver_error: type[Exception]

    @abstractmethod
    def connect(self) -> Any:
        """A connection in no transaction. Raises TsxError, or an error of the driver's."""

    @abstractmethod
    def fault(self, error: Exception) -> TsxError:
        """What an error of the driver's means."""

    @abstractmethod
    def prepare(self, session: Session) -> None:
        """In the transaction that makes the tables, before it does."""

    def is_lost(self, connection: Any) -> bool:
        """Whether there must be a new connection after an error."""
        return False

    def disconnect(self, connection: Any) -> None:
        connection.close()

    # The thread

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: Any = None

    async def open(self) -> None:
        """Connect, and make what is not there. The first call of `do` does it too."""
        await self.do(lambda session: None)

    async def close(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def do(self, work: Callable[[Session], ResultT]) -> ResultT:
        """`work` may be called again where its transaction has failed; it raises a `TsxError` only
        before it has written anything.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tsx jobs", daemon=True)
            self._thread.start()
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._calls.put(_Call(work, result))
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
        """One transaction; where it fails, one for each call, so that none fails for another's
        sake. Without a connection all fail.
        """
        try:
            if self._connection is None:
                self._connection = self._connected()
        except (
            Exception
        ) as error:  # the boundary of the thread: it is raised where the call is waited for
            results: list[Any] = [self._fault(error) for _ in group]
        else:
            try:
                results = self._transaction(self._connection, group)
            except Exception as error:  # as above
                lost = self._rolled_back()
                if lost and again:
                    self._commit(group, again=False)
                    return
                if not lost and len(group) > 1:
                    for call in group:
                        self._commit([call])
                    return
                results = [self._fault(error) for _ in group]
        for call, result in zip(group, results, strict=True):
            with suppress(RuntimeError):  # the loop has ended, and with it every waiter
                call.result.get_loop().call_soon_threadsafe(_set, call.result, result)

    def _transaction(self, connection: Any, group: Sequence[_Call]) -> list[Any]:
        session, results = Session(connection, self.words), []
        session.run("{begin}")
        for call in group:
            try:
                results.append(call.work(session))
            except TsxError as error:
                results.append(error)
        connection.commit()
        return results

    def _connected(self) -> Any:
        connection = self.connect()
        try:
            session = Session(connection, self.words)
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

    def _rolled_back(self) -> bool:
        """Whether the connection is lost."""
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
