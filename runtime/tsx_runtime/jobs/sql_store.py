"""The store in SQL, the same for SQLite and PostgreSQL: one thread, which commits what has come together in one transaction."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from tsx_runtime.errors import JobsFull, StoreUnavailable, TsxError
from tsx_runtime.jobs.schema import TABLES, VERSION
from tsx_runtime.jobs.store import JOB, AnswerKey, DueCallback, JobRecord, JobState, JobTarget, NewJob, StoredAnswer, StoredRequest

GROUP = 256  # transactions of one commit
TOMBSTONE = 86_400.0  # seconds for which an expired job is still known
EXPIRED_AT_ONCE = 500  # jobs: the thread has other work
LIVE = "state IN ('queued', 'running')"
RECORD = (
    "number, id, state, model, version, priority, client, request_id, size, attempts, status, created, started, finished, expires, "
    "deadline, callback"
)
ANSWER = "status, headers, body, fingerprint, expires"
HELD = "id = ? AND attempts = ? AND owner = ? AND state = 'running'"
BEGUN = "kind = ? AND scope = ? AND name = ? AND status IS NULL AND headers = ?"  # by this owner
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


class SqlStore(ABC):
    """A `JobStore`. Its calls become transactions in a thread: those that have come while it was busy share its next commit."""

    shared: bool
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

    def prepare(self, session: Session) -> None:
        """In the transaction that makes the tables."""

    def disconnect(self, connection: Any) -> None:
        connection.close()

    # The thread

    async def open(self) -> None:
        await self._do(lambda session: None)

    async def close(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def _do(self, work: Callable[[Session], ResultT]) -> ResultT:
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

    # Jobs, for clients

    async def add(self, job: NewJob, most: int, most_of_client: int = 0, answer: tuple[AnswerKey, StoredAnswer] | None = None) -> None:
        def work(session: Session) -> None:
            _check_room(session, job.client, most, most_of_client)
            fields = "id, state, model, version, priority, client, request_id, size, created, deadline, callback"
            added = session.run(
                f"INSERT INTO tsx_jobs ({fields}) VALUES (?, 'queued', ?, ?, ?, ?, ?, ?, {{now}}, ?, ?) ON CONFLICT (id) DO NOTHING",
                *(job.id, job.model, job.version, job.priority, job.client, job.request.request_id),
                *(len(job.request.body), job.deadline, job.callback),
            )
            if added:  # else an earlier try was committed after all
                session.run(
                    "INSERT INTO tsx_requests (id, request_id, method, path, query, headers, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    job.id,
                    *job.request,
                )
            if answer is not None:
                _put(session, *answer)

        await self._do(work)

    async def get(self, id: str) -> JobRecord | None:
        return await self._do(lambda session: _get(session, id))

    async def ahead(self, job: JobRecord) -> int:
        before = "state = 'queued' AND model = ? AND (priority > ? OR (priority = ? AND number < ?))"
        values = (job.model, job.priority, job.priority, job.number)
        count: int = (await self._do(lambda session: session.row(f"SELECT count(*) FROM tsx_jobs WHERE {before}", *values)))[0]
        return count

    async def cancel(self, id: str, keep: float) -> JobRecord | None:
        def work(session: Session) -> JobRecord | None:
            change = "state = 'cancelled', owner = NULL, finished = {now}, expires = {now} + ?"
            session.run(f"UPDATE tsx_jobs SET {change} WHERE id = ? AND {LIVE}", keep, id)
            return _get(session, id)

        return await self._do(work)

    async def retry(self, id: str) -> JobRecord | None:
        def work(session: Session) -> JobRecord | None:
            change = (
                "state = 'queued', attempts = attempts + 1, status = NULL, started = NULL, finished = NULL, expires = NULL, deadline = NULL"
            )
            if session.run(f"UPDATE tsx_jobs SET {change} WHERE id = ? AND state IN ('done', 'cancelled')", id):
                session.run("DELETE FROM tsx_answers WHERE kind = ? AND scope = '' AND name = ?", JOB, id)
                session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
            return _get(session, id)

        return await self._do(work)

    async def list_jobs(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        client: str | None = None,
        least_status: int | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[JobRecord]:
        wanted = {"state = ?": state, "model = ?": model, "client = ?": client, "status >= ?": least_status, "number < ?": before}
        given = {test: value for test, value in wanted.items() if value is not None}
        where = f"WHERE {' AND '.join(given)}" if given else ""
        sql = f"SELECT {RECORD} FROM tsx_jobs {where} ORDER BY number DESC LIMIT ?"
        return [JobRecord(*row) for row in await self._do(lambda session: session.rows(sql, *given.values(), limit))]

    async def counts(self) -> dict[tuple[str, JobState], int]:
        sql = "SELECT model, state, count(*) FROM tsx_jobs GROUP BY state, model"
        return {(model, state): count for model, state, count in await self._do(lambda session: session.rows(sql))}

    async def oldest(self) -> dict[str, float]:
        sql = "SELECT model, {now} - min(created) FROM tsx_jobs WHERE state = 'queued' GROUP BY model"
        return {model: max(0.0, seconds) for model, seconds in await self._do(lambda session: session.rows(sql))}

    # Jobs, for the servers that run them

    async def request(self, id: str) -> StoredRequest | None:
        sql = "SELECT request_id, method, path, query, headers, body FROM tsx_requests WHERE id = ?"
        row = await self._do(lambda session: session.row(sql, id))
        return None if row is None else StoredRequest(*row)

    async def waiting(self) -> set[JobTarget]:
        sql = "SELECT DISTINCT model, version FROM tsx_jobs WHERE state = 'queued'"
        return {(model, version) for model, version in await self._do(lambda session: session.rows(sql))}

    async def claim(self, wanted: Mapping[JobTarget, int], owner: str, seconds: float) -> list[JobRecord]:
        def work(session: Session) -> list[JobRecord]:
            claimed = []
            for target, most in wanted.items():
                queued = "WHERE state = 'queued' AND model = ? AND version = ? ORDER BY priority DESC, number LIMIT ?"
                for (id,) in session.rows(f"SELECT id FROM tsx_jobs {queued} {{locked}}", *target, most):
                    change = "state = 'running', attempts = attempts + 1, started = {now}, owner = ?, lease = {now} + ?"
                    session.run(f"UPDATE tsx_jobs SET {change} WHERE id = ?", owner, seconds, id)
                    claimed.append(_get(session, id))
            return [job for job in claimed if job is not None]

        return await self._do(work)

    async def renew(self, held: Collection[tuple[str, int]], owner: str, seconds: float) -> set[str]:
        def work(session: Session) -> set[str]:
            sql = f"UPDATE tsx_jobs SET lease = {{now}} + ? WHERE {HELD}"
            return {id for id, attempts in held if not session.run(sql, seconds, id, attempts, owner)}

        return await self._do(work)

    async def release(self, held: Collection[tuple[str, int]], owner: str) -> None:
        def work(session: Session) -> None:
            for id, attempts in held:
                session.run(f"UPDATE tsx_jobs SET state = 'queued', owner = NULL WHERE {HELD}", id, attempts, owner)

        await self._do(work)

    async def finish(self, id: str, attempts: int, owner: str, answer: StoredAnswer, keep: float) -> bool:
        def work(session: Session) -> bool:
            change = "state = 'done', owner = NULL, status = ?, finished = {now}, expires = {now} + ?"
            if not session.run(f"UPDATE tsx_jobs SET {change} WHERE {HELD}", answer.status, keep, id, attempts, owner):
                return False
            (expires,) = session.row("SELECT expires FROM tsx_jobs WHERE id = ?", id)
            _put(session, AnswerKey(JOB, "", id), answer._replace(expires=expires))
            called = "SELECT id, callback, {now} FROM tsx_jobs WHERE id = ? AND callback <> ''"
            session.run(f"INSERT INTO tsx_callbacks (id, url, due) {called}", id)
            return True

        return await self._do(work)

    async def reclaim(self) -> None:
        sql = "UPDATE tsx_jobs SET state = 'queued', owner = NULL WHERE state = 'running' AND lease < {now}"
        await self._do(lambda session: session.run(sql))

    async def expire(self) -> None:
        def work(session: Session) -> None:
            gone = f"SELECT id, state FROM tsx_jobs WHERE expires < {{now}} ORDER BY expires LIMIT {EXPIRED_AT_ONCE}"
            for id, state in session.rows(gone):
                if state == "expired":
                    session.run("DELETE FROM tsx_jobs WHERE id = ?", id)
                else:
                    session.run("UPDATE tsx_jobs SET state = 'expired', expires = {now} + ? WHERE id = ?", TOMBSTONE, id)
                    session.run("DELETE FROM tsx_requests WHERE id = ?", id)
                    session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
            session.run("DELETE FROM tsx_answers WHERE expires < {now}")

        await self._do(work)

    # Answers by key

    async def get_answer(self, key: AnswerKey) -> StoredAnswer | None:
        return await self._do(lambda session: _answer(session, key))

    async def begin_answer(self, key: AnswerKey, fingerprint: str, owner: str, seconds: float) -> StoredAnswer | None:
        def work(session: Session) -> StoredAnswer | None:
            session.run("DELETE FROM tsx_answers WHERE kind = ? AND scope = ? AND name = ? AND expires < {now}", *key)
            fields = "kind, scope, name, status, fingerprint, expires, headers, body"
            begun = session.run(
                f"INSERT INTO tsx_answers ({fields}) VALUES (?, ?, ?, NULL, ?, {{now}} + ?, ?, ?) ON CONFLICT (kind, scope, name) DO NOTHING",
                *(*key, fingerprint, seconds, owner.encode(), b""),
            )
            return None if begun else _answer(session, key)

        return await self._do(work)

    async def renew_answer(self, key: AnswerKey, owner: str, seconds: float) -> None:
        await self._do(
            lambda session: session.run(f"UPDATE tsx_answers SET expires = {{now}} + ? WHERE {BEGUN}", seconds, *key, owner.encode())
        )

    async def end_answer(self, key: AnswerKey, owner: str, answer: StoredAnswer | None) -> bool:
        def work(session: Session) -> bool:
            ended = session.run(f"DELETE FROM tsx_answers WHERE {BEGUN}", *key, owner.encode()) > 0
            if ended and answer is not None:
                _put(session, key, answer)
            return ended

        return await self._do(work)

    async def put_answer(self, key: AnswerKey, answer: StoredAnswer) -> None:
        await self._do(lambda session: _put(session, key, answer))

    async def drop_answer(self, key: AnswerKey) -> bool:
        sql = "DELETE FROM tsx_answers WHERE kind = ? AND scope = ? AND name = ?"
        return await self._do(lambda session: session.run(sql, *key) > 0)

    # Callbacks

    async def claim_callbacks(self, most: int, seconds: float) -> list[DueCallback]:
        def work(session: Session) -> list[DueCallback]:
            claimed = []
            due = "SELECT id, url, attempts FROM tsx_callbacks WHERE due <= {now} ORDER BY due LIMIT ? {locked}"
            for id, url, attempts in session.rows(due, most):
                session.run("UPDATE tsx_callbacks SET attempts = attempts + 1, due = {now} + ? WHERE id = ?", seconds, id)
                job, answer = _get(session, id), _answer(session, AnswerKey(JOB, "", id))
                if job is None or answer is None:  # it has expired
                    session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
                else:
                    claimed.append(DueCallback(id, url, attempts + 1, job.request_id, answer))
            return claimed

        return await self._do(work)

    async def next_callback(self) -> float | None:
        seconds: float | None = (await self._do(lambda session: session.row("SELECT min(due) - {now} FROM tsx_callbacks")))[0]
        return seconds

    async def end_callback(self, id: str, retry_in: float | None, error: str) -> None:
        if retry_in is None:
            await self._do(lambda session: session.run("DELETE FROM tsx_callbacks WHERE id = ?", id))
        else:
            sql = "UPDATE tsx_callbacks SET due = {now} + ?, error = ? WHERE id = ?"
            await self._do(lambda session: session.run(sql, retry_in, error, id))


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _check_room(session: Session, client: str, most: int, most_of_client: int) -> None:
    count = f"SELECT count(*) FROM (SELECT 1 FROM tsx_jobs WHERE {LIVE} LIMIT ?) AS live"
    if session.row(count, most)[0] >= most:
        raise JobsFull(f"{most} jobs are queued or running (max_queued_jobs). Try again later.", retry_after=5)
    count = f"SELECT count(*) FROM tsx_jobs WHERE client = ? AND {LIVE}"
    if most_of_client and session.row(count, client)[0] >= most_of_client:
        raise JobsFull(f"{most_of_client} jobs of this client are queued or running, which is the limit. Try again later.", retry_after=5)


def _get(session: Session, id: str) -> JobRecord | None:
    row = session.row(f"SELECT {RECORD} FROM tsx_jobs WHERE id = ?", id)
    return None if row is None else JobRecord(*row)


def _answer(session: Session, key: AnswerKey) -> StoredAnswer | None:
    row = session.row(f"SELECT {ANSWER} FROM tsx_answers WHERE kind = ? AND scope = ? AND name = ? AND expires >= {{now}}", *key)
    return None if row is None else StoredAnswer(*row)


def _put(session: Session, key: AnswerKey, answer: StoredAnswer) -> None:
    session.run("DELETE FROM tsx_answers WHERE kind = ? AND scope = ? AND name = ?", *key)
    session.run(f"INSERT INTO tsx_answers (kind, scope, name, {ANSWER}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *key, *answer)
