"""The store of jobs and answers, in SQL that SQLite and PostgreSQL both take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tsx_runtime.errors import JobsFull, StoreUnavailable, TooManyRequests
from tsx_runtime.jobs.sql_thread import Session, SqlThread
from tsx_runtime.jobs.store import (
    JOB,
    AnswerKey,
    Claim,
    DueCallback,
    JobRecord,
    JobState,
    JobTarget,
    NewJob,
    StoredAnswer,
    StoredRequest,
)

TOMBSTONE_S = 86_400.0  # seconds for which an expired job is still known
MAX_EXPIRED = 500  # jobs, or answers, at a time: the thread has other work
LIVE = "state IN ('queued', 'running')"
RECORD = ", ".join(JobRecord._fields)
ANSWER = ", ".join(StoredAnswer._fields)
REPLACE = "ON CONFLICT (kind, scope, name) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in StoredAnswer._fields
)
REQUEUE = "state = 'queued', owner = NULL, started = NULL"
HELD = "id = ? AND attempts = ? AND owner = ? AND state = 'running'"
KEY = "kind = ? AND scope = ? AND name = ?"
BEGUN = f"{KEY} AND status IS NULL AND headers = ?"  # begun by this owner
Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")


def _transaction(
    work: Callable[Concatenate[Any, Session, Params], ResultT],
) -> Callable[Concatenate[Any, Params], Coroutine[Any, Any, ResultT]]:
    """Make a coroutine out of a method that works in a transaction."""

    @wraps(work)
    async def call(self: Any, /, *args: Params.args, **options: Params.kwargs) -> ResultT:
        result: ResultT = await self.do(lambda session: work(self, session, *args, **options))
        return result

    return call


class SqlStore(SqlThread):
    """The store of jobs and answers.

    No method blocks the event loop.

    Raises:
        StoreFull: By all methods: the disk is full.
        StoreUnavailable: By all methods: the store cannot be used.
    """

    @property
    def shared(self) -> bool:
        """Whether other servers may work on the same queue."""
        return True

    def follow(self, seconds: float) -> None:
        """Note that a server that this one replaces uses the store for at most so many seconds.

        Call it before the store is used.
        """

    def hand_over(self) -> None:
        """Note that another server replaces this one, which finishes its work."""

    def exists(self) -> bool:
        """Tell whether the store may have jobs, without opening it."""
        return True

    # Jobs, for clients

    @_transaction
    def add(
        self,
        session: Session,
        job: NewJob,
        most: int,
        most_of_client: int = 0,
        answer: tuple[AnswerKey, StoredAnswer] | None = None,
        owner: str = "",
    ) -> None:
        """Accept a job; in the same commit store an `answer` under a key that `owner` has begun.

        Args:
            session: The transaction.
            job: The job.
            most: The largest number of queued and running jobs.
            most_of_client: The same for the job's client; 0: no limit.
            answer: A key and its answer.
            owner: The server that has begun the key.

        Raises:
            JobsFull: There are `most` jobs.
            TooManyRequests: There are `most_of_client` jobs of this client.
        """
        _check_room(session, job.client, most, most_of_client)
        if answer is not None:
            if not session.run(
                f"DELETE FROM tsx_answers WHERE {BEGUN}", *answer[0], owner.encode()
            ):
                raise StoreUnavailable(
                    "Another server works on this Idempotency-Key now. Send the request again.",
                    retry_after=1,
                )
            _put(session, *answer)
        fields = (
            "id, state, model, version, priority, client, request_id, size, created, deadline,"
            " callback"
        )
        added = session.run(
            f"INSERT INTO tsx_jobs ({fields}) VALUES (?, 'queued', ?, ?, ?, ?, ?, ?, {{now}},"
            " ?, ?) ON CONFLICT (id) DO NOTHING",
            *(job.id, job.model, job.version, job.priority, job.client, job.request.request_id),
            *(len(job.request.body), job.deadline, job.callback),
        )
        if added:  # False: an earlier attempt was committed after all
            fields = ", ".join(StoredRequest._fields)
            session.run(
                f"INSERT INTO tsx_requests (id, {fields}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                job.id,
                *job.request,
            )

    @_transaction
    def get(self, session: Session, id: str) -> JobRecord | None:
        return _get(session, id)

    @_transaction
    def ahead(self, session: Session, job: JobRecord) -> int:
        """Return the number of queued jobs of the model before this one."""
        condition = (
            "state = 'queued' AND model = ? AND (priority > ? OR (priority = ? AND number < ?))"
        )
        values = (job.model, job.priority, job.priority, job.number)
        count: int = session.row(f"SELECT count(*) FROM tsx_jobs WHERE {condition}", *values)[0]
        return count

    @_transaction
    def cancel(self, session: Session, id: str, keep: float) -> JobRecord | None:
        """Cancel a queued or running job; return its new record.

        The server that runs it learns of it by `renew`.
        """
        change = "state = 'cancelled', owner = NULL, finished = {now}, expires = {now} + ?"
        session.run(f"UPDATE tsx_jobs SET {change} WHERE id = ? AND {LIVE}", keep, id)
        return _get(session, id)

    @_transaction
    def retry(self, session: Session, id: str) -> JobRecord | None:
        """Queue a done or cancelled job again, and forget its answer; return its new record."""
        change = (
            "state = 'queued', status = NULL, started = NULL, finished = NULL, expires = NULL,"
            " deadline = NULL"
        )
        if session.run(
            f"UPDATE tsx_jobs SET {change} WHERE id = ? AND state IN ('done', 'cancelled')", id
        ):
            session.run(f"DELETE FROM tsx_answers WHERE {KEY}", JOB, "", id)
            session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
        return _get(session, id)

    @_transaction
    def list_jobs(
        self,
        session: Session,
        *,
        state: JobState | None = None,
        model: str | None = None,
        least_status: int | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[JobRecord]:
        """Return jobs, newest first; `before` is the number of the previous page's last job."""
        filters = {
            "state = ?": state,
            "model = ?": model,
            "status >= ?": least_status,
            "number < ?": before,
        }
        conditions = {test: value for test, value in filters.items() if value is not None}
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        sql = f"SELECT {RECORD} FROM tsx_jobs {where} ORDER BY number DESC LIMIT ?"
        return [JobRecord(*row) for row in session.rows(sql, *conditions.values(), limit)]

    @_transaction
    def counts(self, session: Session) -> dict[tuple[str, JobState], int]:
        """Return the numbers of jobs by model and state."""
        rows = session.rows("SELECT model, state, count(*) FROM tsx_jobs GROUP BY state, model")
        return {(model, state): count for model, state, count in rows}

    @_transaction
    def oldest(self, session: Session) -> dict[str, float]:
        """Return the seconds that the oldest queued job of each model has waited."""
        # This needs only an index.
        first = "SELECT min(number) FROM tsx_jobs WHERE state = 'queued' GROUP BY model"
        rows = session.rows(
            f"SELECT model, {{now}} - created FROM tsx_jobs WHERE number IN ({first})"
        )
        return {model: max(0.0, seconds) for model, seconds in rows}

    # Jobs, for the servers that run them

    @_transaction
    def request(self, session: Session, id: str) -> StoredRequest | None:
        rows = session.rows(
            f"SELECT {', '.join(StoredRequest._fields)} FROM tsx_requests WHERE id = ?", id
        )
        return StoredRequest(*rows[0]) if rows else None

    @_transaction
    def waiting(self, session: Session) -> tuple[set[JobTarget], set[JobTarget]]:
        """Return the targets with queued jobs, and those with running jobs on any server."""
        rows = session.rows(f"SELECT DISTINCT state, model, version FROM tsx_jobs WHERE {LIVE}")
        queued, running = (
            {(model, version) for state, model, version in rows if state == live_state}
            for live_state in ("queued", "running")
        )
        return queued, running

    @_transaction
    def claim(
        self, session: Session, wanted: Mapping[JobTarget, int], owner: str, seconds: float
    ) -> list[JobRecord]:
        """Claim at most so many jobs of each target for an owner, for so many seconds."""
        claimed = []
        for target, most in wanted.items():
            queued = (
                "WHERE state = 'queued' AND model = ? AND version = ? ORDER BY priority DESC,"
                " number LIMIT ?"
            )
            for (id,) in session.rows(
                f"SELECT id FROM tsx_jobs {queued} {{locked}}", *target, most
            ):
                change = (
                    "state = 'running', attempts = attempts + 1, started = {now}, owner = ?,"
                    " lease = {now} + ?"
                )
                session.run(f"UPDATE tsx_jobs SET {change} WHERE id = ?", owner, seconds, id)
                claimed.append(_get(session, id))
        return [job for job in claimed if job is not None]

    @_transaction
    def renew(
        self, session: Session, held: Collection[Claim], owner: str, seconds: float
    ) -> set[Claim]:
        """Renew leases for so many seconds; return the jobs that the owner has lost."""
        sql = f"UPDATE tsx_jobs SET lease = {{now}} + ? WHERE {HELD}"
        return {claim for claim in held if not session.run(sql, seconds, *claim, owner)}

    @_transaction
    def release(self, session: Session, owner: str) -> None:
        """Queue all running jobs of this owner again."""
        session.run(f"UPDATE tsx_jobs SET {REQUEUE} WHERE state = 'running' AND owner = ?", owner)

    @_transaction
    def finish(
        self,
        session: Session,
        id: str,
        attempts: int,
        owner: str,
        answer: StoredAnswer,
        keep: float,
    ) -> bool:
        """Store an answer for `keep` seconds; return False if the owner has lost the job.

        The job may have been cancelled, or claimed by another server.
        """
        change = "state = 'done', owner = NULL, status = ?, finished = {now}, expires = {now} + ?"
        if not session.run(
            f"UPDATE tsx_jobs SET {change} WHERE {HELD}",
            answer.status,
            keep,
            id,
            attempts,
            owner,
        ):
            return False
        (expires,) = session.row("SELECT expires FROM tsx_jobs WHERE id = ?", id)
        _put(session, AnswerKey(JOB, "", id), answer._replace(expires=expires))
        called = "SELECT id, callback, {now} FROM tsx_jobs WHERE id = ? AND callback <> ''"
        session.run(f"INSERT INTO tsx_callbacks (id, url, due) {called}", id)
        return True

    @_transaction
    def reclaim(self, session: Session) -> None:
        """Queue jobs again whose lease has run out."""
        session.run(f"UPDATE tsx_jobs SET {REQUEUE} WHERE state = 'running' AND lease < {{now}}")

    @_transaction
    def expire(self, session: Session) -> bool:
        """Remove some expired requests and answers; return False if that was all.

        The record of a job goes a day later.
        """
        expired = session.rows(
            "SELECT id, state FROM tsx_jobs WHERE expires < {now} ORDER BY expires LIMIT"
            f" {MAX_EXPIRED}"
        )
        for id, state in expired:
            if state == "expired":
                session.run("DELETE FROM tsx_jobs WHERE id = ?", id)
            else:
                session.run(
                    "UPDATE tsx_jobs SET state = 'expired', expires = {now} + ? WHERE id = ?",
                    TOMBSTONE_S,
                    id,
                )
                session.run("DELETE FROM tsx_requests WHERE id = ?", id)
                session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
        old = (
            f"SELECT kind, scope, name FROM tsx_answers WHERE expires < {{now}} LIMIT {MAX_EXPIRED}"
        )
        removed = session.run(f"DELETE FROM tsx_answers WHERE (kind, scope, name) IN ({old})")
        return max(len(expired), removed) >= MAX_EXPIRED

    # Answers by key

    @_transaction
    def get_answer(self, session: Session, key: AnswerKey) -> StoredAnswer | None:
        """Return an answer, or None if there is none or it has expired."""
        return _answer(session, key)

    @_transaction
    def begin_answer(
        self, session: Session, key: AnswerKey, fingerprint: str, owner: str, seconds: float
    ) -> StoredAnswer | None:
        """Begin work on a key for so many seconds and return None, or return its answer."""
        free = (
            "tsx_answers.expires < {now} OR (tsx_answers.status IS NULL AND tsx_answers.headers ="
            " excluded.headers)"
        )
        values = "?, ?, ?, NULL, ?, ?, ?, {now} + ?"
        sql = (
            f"INSERT INTO tsx_answers (kind, scope, name, {ANSWER}) VALUES ({values}) {REPLACE}"
            f" WHERE {free}"
        )
        if session.run(sql, *key, owner.encode(), b"", fingerprint, seconds):
            return None
        # It is gone by now; the caller tries again.
        gone_meanwhile = StoredAnswer(None, fingerprint=fingerprint)
        return _answer(session, key) or gone_meanwhile

    @_transaction
    def renew_answer(self, session: Session, key: AnswerKey, owner: str, seconds: float) -> None:
        """Extend the work on a key to so many seconds from now."""
        session.run(
            f"UPDATE tsx_answers SET expires = {{now}} + ? WHERE {BEGUN}",
            seconds,
            *key,
            owner.encode(),
        )

    @_transaction
    def end_answer(
        self, session: Session, key: AnswerKey, owner: str, answer: StoredAnswer | None
    ) -> bool:
        """Store the result of the owner's work; return False if the owner has lost the key.

        After None, nothing is stored and the key is free.
        """
        is_owner = session.run(f"DELETE FROM tsx_answers WHERE {BEGUN}", *key, owner.encode()) > 0
        if is_owner and answer is not None:
            _put(session, key, answer)
        return is_owner

    @_transaction
    def put_answer(self, session: Session, key: AnswerKey, answer: StoredAnswer) -> None:
        """Store an answer; it replaces the present one of this key."""
        _put(session, key, answer)

    # Callbacks

    @_transaction
    def claim_callbacks(
        self, session: Session, most: int, seconds: float, closed: Collection[str] = ()
    ) -> list[DueCallback]:
        """Claim due callbacks for so many seconds, unless their URL begins with one of `closed`."""
        condition, values = _receiver_condition(closed)
        claimed = []
        due = (
            f"SELECT id, url, attempts FROM tsx_callbacks WHERE due <= {{now}}{condition} ORDER BY"
            " due LIMIT ? {locked}"
        )
        for id, url, attempts in session.rows(due, *values, most):
            session.run(
                "UPDATE tsx_callbacks SET attempts = attempts + 1, due = {now} + ? WHERE id = ?",
                seconds,
                id,
            )
            job, answer = _get(session, id), _answer(session, AnswerKey(JOB, "", id))
            if job is None or answer is None:  # It has expired.
                session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
            else:
                claimed.append(DueCallback(id, url, attempts + 1, job.request_id, answer))
        return claimed

    @_transaction
    def next_callback(self, session: Session, closed: Collection[str] = ()) -> float | None:
        """Return the seconds until a callback is due, without receivers that are `closed`."""
        condition, values = _receiver_condition(closed)
        sql = f"SELECT min(due) - {{now}} FROM tsx_callbacks WHERE url <> ''{condition}"
        seconds: float | None = (session.rows(sql, *values))[0][0]
        return seconds

    @_transaction
    def end_callback(self, session: Session, id: str, retry_in: float | None, error: str) -> None:
        """Send a callback again in `retry_in` seconds, or remove it for None."""
        if retry_in is None:
            session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
        else:
            session.run(
                "UPDATE tsx_callbacks SET due = {now} + ?, error = ? WHERE id = ?",
                retry_in,
                error,
                id,
            )


def _receiver_condition(closed: Collection[str]) -> tuple[str, list[Any]]:
    """Return a condition on the beginning of a callback's URL, and its values."""
    return " AND substr(url, 1, ?) <> ?" * len(closed), [
        value for start in closed for value in (len(start), start)
    ]


def _check_room(session: Session, client: str, most: int, most_of_client: int) -> None:
    """Check the limits of queued and running jobs.

    Jobs are counted once per commit, since counting many takes time.
    """
    for counted, where, limit in (
        ("", LIVE, most),
        (client, f"client = ? AND {LIVE}", most_of_client),
    ):
        if limit and counted not in session.live:
            count = f"SELECT count(*) FROM (SELECT 1 FROM tsx_jobs WHERE {where} LIMIT ?) AS live"
            session.live[counted] = session.row(count, *([counted] if counted else []), limit)[0]
    if session.live[""] >= most:
        raise JobsFull(
            f"{most} jobs are queued or running (max_queued_jobs). Try again later.", retry_after=5
        )
    if most_of_client and session.live[client] >= most_of_client:
        text = (
            f"{most_of_client} jobs of this client are queued or running (max_jobs_per_client). Try"
            " again later."
        )
        raise TooManyRequests(text, retry_after=5)
    session.live.update(
        {counted: session.live[counted] + 1 for counted in {"", client} if counted in session.live}
    )


def _get(session: Session, id: str) -> JobRecord | None:
    row = session.row(f"SELECT {RECORD} FROM tsx_jobs WHERE id = ?", id)
    return None if row is None else JobRecord(*row)


def _answer(session: Session, key: AnswerKey) -> StoredAnswer | None:
    row = session.row(f"SELECT {ANSWER} FROM tsx_answers WHERE {KEY} AND expires >= {{now}}", *key)
    return None if row is None else StoredAnswer(*row)


def _put(session: Session, key: AnswerKey, answer: StoredAnswer) -> None:
    session.run(
        f"INSERT INTO tsx_answers (kind, scope, name, {ANSWER}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        f" {REPLACE}",
        *key,
        *answer,
    )
