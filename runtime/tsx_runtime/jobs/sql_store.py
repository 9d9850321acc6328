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

TOMBSTONE = 86_400.0  # seconds for which an expired job is still known
EXPIRED_AT_ONCE = 500  # jobs, or answers: the thread has other work
LIVE = "state IN ('queued', 'running')"
RECORD = ", ".join(JobRecord._fields)
ANSWER = ", ".join(StoredAnswer._fields)
REPLACE = "ON CONFLICT (kind, scope, name) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in StoredAnswer._fields
)
REQUEUE = "state = 'queued', owner = NULL, started = NULL"
HELD = "id = ? AND attempts = ? AND owner = ? AND state = 'running'"
KEY = "kind = ? AND scope = ? AND name = ?"
BEGUN = f"{KEY} AND status IS NULL AND headers = ?"  # by this owner
Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")


def _transaction(
    work: Callable[Concatenate[Any, Session, Params], ResultT],
) -> Callable[Concatenate[Any, Params], Coroutine[Any, Any, ResultT]]:
    """Make a coroutine of a method that works in a transaction."""

    @wraps(work)
    async def call(self: Any, /, *args: Params.args, **options: Params.kwargs) -> ResultT:
        result: ResultT = await self.do(lambda session: work(self, session, *args, **options))
        return result

    return call


class SqlStore(SqlThread):
    """All methods raise `StoreFull` and `StoreUnavailable`, and none blocks the event loop."""

    @property
    def shared(self) -> bool:
        """Whether other servers may work on the same queue."""
        return True

    def follow(self, seconds: float) -> None:
        """The server that this one replaces works on it too, for at most so long.

        To be called before the store is used.
        """

    def hand_over(self) -> None:
        """Another server replaces this one, which ends what it has begun."""

    def exists(self) -> bool:
        """Whether it may have jobs, without opening it."""
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
        """Accept a job; in the same commit store an `answer` under its key, which `owner` has
        begun.

        Raises `JobsFull` where so many are queued or running, and `TooManyRequests` where so many
        are this client's (0: any number).
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
        if added:  # else an earlier try was committed after all
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
        """How many queued jobs of its model go before it."""
        before = (
            "state = 'queued' AND model = ? AND (priority > ? OR (priority = ? AND number < ?))"
        )
        values = (job.model, job.priority, job.priority, job.number)
        count: int = session.row(f"SELECT count(*) FROM tsx_jobs WHERE {before}", *values)[0]
        return count

    @_transaction
    def cancel(self, session: Session, id: str, keep: float) -> JobRecord | None:
        """Cancel it where it is queued or running; returns it as it is now.

        A server that runs it learns it by `renew`.
        """
        change = "state = 'cancelled', owner = NULL, finished = {now}, expires = {now} + ?"
        session.run(f"UPDATE tsx_jobs SET {change} WHERE id = ? AND {LIVE}", keep, id)
        return _get(session, id)

    @_transaction
    def retry(self, session: Session, id: str) -> JobRecord | None:
        """Queue it again where it is done or cancelled, and forget its answer; returns it as it is
        now.
        """
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
        """The newest first; `before`: the number of the last one of the page before."""
        wanted = {
            "state = ?": state,
            "model = ?": model,
            "status >= ?": least_status,
            "number < ?": before,
        }
        given = {test: value for test, value in wanted.items() if value is not None}
        where = f"WHERE {' AND '.join(given)}" if given else ""
        sql = f"SELECT {RECORD} FROM tsx_jobs {where} ORDER BY number DESC LIMIT ?"
        return [JobRecord(*row) for row in session.rows(sql, *given.values(), limit)]

    @_transaction
    def counts(self, session: Session) -> dict[tuple[str, JobState], int]:
        """Jobs by model and state."""
        rows = session.rows("SELECT model, state, count(*) FROM tsx_jobs GROUP BY state, model")
        return {(model, state): count for model, state, count in rows}

    @_transaction
    def oldest(self, session: Session) -> dict[str, float]:
        """Seconds for which the oldest queued job of each model has waited."""
        # by an index alone
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
        """What has queued jobs, and what has running ones, on whatever server."""
        rows = session.rows(f"SELECT DISTINCT state, model, version FROM tsx_jobs WHERE {LIVE}")
        queued, running = (
            {(model, version) for state, model, version in rows if state == each}
            for each in ("queued", "running")
        )
        return queued, running

    @_transaction
    def claim(
        self, session: Session, wanted: Mapping[JobTarget, int], owner: str, seconds: float
    ) -> list[JobRecord]:
        """At most so many jobs of each target, which from now on are `owner`'s for so many
        seconds.
        """
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
        """Keep jobs for so many seconds from now on. Returns those that are the owner's no more."""
        sql = f"UPDATE tsx_jobs SET lease = {{now}} + ? WHERE {HELD}"
        return {claim for claim in held if not session.run(sql, seconds, *claim, owner)}

    @_transaction
    def release(self, session: Session, owner: str) -> None:
        """Queue all jobs again that this owner runs."""
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
        """Store the answer for so many seconds; False where the job is the owner's no more
        (cancelled, or claimed by another server).
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
        """Queue the jobs again whose lease has run out."""
        session.run(f"UPDATE tsx_jobs SET {REQUEUE} WHERE state = 'running' AND lease < {{now}}")

    @_transaction
    def expire(self, session: Session) -> bool:
        """Remove some of what has passed its `expires`: requests and answers, a day later the
        record of the job. False: that was all.
        """
        gone = session.rows(
            "SELECT id, state FROM tsx_jobs WHERE expires < {now} ORDER BY expires LIMIT"
            f" {EXPIRED_AT_ONCE}"
        )
        for id, state in gone:
            if state == "expired":
                session.run("DELETE FROM tsx_jobs WHERE id = ?", id)
            else:
                session.run(
                    "UPDATE tsx_jobs SET state = 'expired', expires = {now} + ? WHERE id = ?",
                    TOMBSTONE,
                    id,
                )
                session.run("DELETE FROM tsx_requests WHERE id = ?", id)
                session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
        old = (
            "SELECT kind, scope, name FROM tsx_answers WHERE expires < {now} LIMIT"
            f" {EXPIRED_AT_ONCE}"
        )
        removed = session.run(f"DELETE FROM tsx_answers WHERE (kind, scope, name) IN ({old})")
        return max(len(gone), removed) >= EXPIRED_AT_ONCE

    # Answers by key

    @_transaction
    def get_answer(self, session: Session, key: AnswerKey) -> StoredAnswer | None:
        """None where there is none, or it has expired."""
        return _answer(session, key)

    @_transaction
    def begin_answer(
        self, session: Session, key: AnswerKey, fingerprint: str, owner: str, seconds: float
    ) -> StoredAnswer | None:
        """None: there is no answer, and from now on nobody but the caller works on it, for so many
        seconds. Else what there is.
        """
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
        gone_meanwhile = StoredAnswer(
            None, fingerprint=fingerprint
        )  # so that the caller looks again
        return _answer(session, key) or gone_meanwhile

    @_transaction
    def renew_answer(self, session: Session, key: AnswerKey, owner: str, seconds: float) -> None:
        """Work on it for so many seconds from now on."""
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
        """Store what came of the owner's work, or that nothing did; False where it is the owner's
        no more.
        """
        ended = session.run(f"DELETE FROM tsx_answers WHERE {BEGUN}", *key, owner.encode()) > 0
        if ended and answer is not None:
            _put(session, key, answer)
        return ended

    @_transaction
    def put_answer(self, session: Session, key: AnswerKey, answer: StoredAnswer) -> None:
        """Store it, in place of what is there under this key."""
        _put(session, key, answer)

    # Callbacks

    @_transaction
    def claim_callbacks(
        self, session: Session, most: int, seconds: float, closed: Collection[str] = ()
    ) -> list[DueCallback]:
        """Claim due callbacks for so many seconds, unless their URL begins with one of `closed`."""
        others, values = _not_to(closed)
        claimed = []
        due = (
            f"SELECT id, url, attempts FROM tsx_callbacks WHERE due <= {{now}}{others} ORDER BY"
            " due LIMIT ? {locked}"
        )
        for id, url, attempts in session.rows(due, *values, most):
            session.run(
                "UPDATE tsx_callbacks SET attempts = attempts + 1, due = {now} + ? WHERE id = ?",
                seconds,
                id,
            )
            job, answer = _get(session, id), _answer(session, AnswerKey(JOB, "", id))
            if job is None or answer is None:  # it has expired
                session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
            else:
                claimed.append(DueCallback(id, url, attempts + 1, job.request_id, answer))
        return claimed

    @_transaction
    def next_callback(self, session: Session, closed: Collection[str] = ()) -> float | None:
        """Return the seconds until the next is due, of those whose receiver is not `closed`."""
        others, values = _not_to(closed)
        sql = f"SELECT min(due) - {{now}} FROM tsx_callbacks WHERE url <> ''{others}"
        seconds: float | None = (session.rows(sql, *values))[0][0]
        return seconds

    @_transaction
    def end_callback(self, session: Session, id: str, retry_in: float | None, error: str) -> None:
        """It was received or given up (None), or is to be sent again."""
        if retry_in is None:
            session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
        else:
            session.run(
                "UPDATE tsx_callbacks SET due = {now} + ?, error = ? WHERE id = ?",
                retry_in,
                error,
                id,
            )


def _not_to(closed: Collection[str]) -> tuple[str, list[Any]]:
    """Return a condition on the beginning of a callback's URL, and its values."""
    return " AND substr(url, 1, ?) <> ?" * len(closed), [
        value for start in closed for value in (len(start), start)
    ]


def _check_room(session: Session, client: str, most: int, most_of_client: int) -> None:
    """Jobs are counted once for all that are accepted in one commit: it takes time where many are
    queued.
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
        {each: session.live[each] + 1 for each in {"", client} if each in session.live}
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
