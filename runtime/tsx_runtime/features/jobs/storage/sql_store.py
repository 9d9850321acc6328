"""The store of jobs and answers, in SQL that SQLite and PostgreSQL both take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tsx_runtime.errors import JobsFull, StoreUnavailable, TooManyRequests
from tsx_runtime.features.jobs.storage.sql_thread import Session, SqlThread
from tsx_runtime.features.jobs.storage.store import (
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
MAX_EXPIRED = 500  # jobs or answers per transaction, since other calls wait for the thread
LIVE = "state IN ('queued', 'running')"
RECORD = ", ".join(JobRecord._fields)
ANSWER = ", ".join(StoredAnswer._fields)
REPLACE = "ON CONFLICT (kind, scope, name) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in StoredAnswer._fields
)
REQUEUE = "state = 'queued', owner = NULL, started = NULL"
CLAIMED = "id = ? AND attempts = ? AND owner = ? AND state = 'running'"
KEY = "kind = ? AND scope = ? AND name = ?"
# An answer on which the owner works; until it is stored, `headers` holds the owner.
OWN_UNANSWERED = f"{KEY} AND status IS NULL AND headers = ?"
Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")


def _transaction(
    work: Callable[Concatenate[Any, Session, Params], ResultT],
) -> Callable[Concatenate[Any, Params], Coroutine[Any, Any, ResultT]]:
    """Make a coroutine function out of a method that works in a transaction."""

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
        """Note that this server replaces another, which uses the store for at most `seconds` more.

        Call it before the first use of the store.
        """

    def hand_over(self) -> None:
        """Note that another server replaces this one, which only finishes its jobs."""

    def exists(self) -> bool:
        """Tell whether the store may have jobs, without opening it."""
        return True

    # Jobs, for clients

    @_transaction
    def add(
        self,
        session: Session,
        job: NewJob,
        limit: int,
        max_client_jobs: int = 0,
        answer: tuple[AnswerKey, StoredAnswer] | None = None,
        owner: str = "",
    ) -> None:
        """Accept a job; in the same commit, store an answer under a key that `owner` has claimed.

        Args:
            session: The transaction.
            job: The job.
            limit: The largest number of queued and running jobs.
            max_client_jobs: The largest number of the client's jobs among them; 0: no limit.
            answer: A key and its answer.
            owner: The server that has claimed the key.

        Raises:
            JobsFull: There are `limit` jobs.
            TooManyRequests: There are `max_client_jobs` jobs of this client.
        """
        _check_room(session, job.client, limit, max_client_jobs)
        if answer is not None:
            if not session.run(
                f"DELETE FROM tsx_answers WHERE {OWN_UNANSWERED}", *answer[0], owner.encode()
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
        if added:  # false if an attempt that seemed to fail was committed
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
    def count_preceding(self, session: Session, job: JobRecord) -> int:
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

        `renew` tells the server that runs the job.
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
        min_status: int | None = None,
        before_number: int | None = None,
        limit: int = 100,
    ) -> list[JobRecord]:
        """Return jobs, newest first; `before_number` is that of the previous page's last job."""
        filters = {
            "state = ?": state,
            "model = ?": model,
            "status >= ?": min_status,
            "number < ?": before_number,
        }
        conditions = {test: value for test, value in filters.items() if value is not None}
        condition = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        sql = f"SELECT {RECORD} FROM tsx_jobs {condition} ORDER BY number DESC LIMIT ?"
        return [JobRecord(*row) for row in session.rows(sql, *conditions.values(), limit)]

    @_transaction
    def counts(self, session: Session) -> dict[tuple[str, JobState], int]:
        """Return the numbers of jobs by model and state."""
        rows = session.rows("SELECT model, state, count(*) FROM tsx_jobs GROUP BY state, model")
        return {(model, state): count for model, state, count in rows}

    @_transaction
    def oldest(self, session: Session) -> dict[str, float]:
        """Return the seconds that the oldest queued job of each model has waited."""
        # This subquery needs only an index.
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
        """Return the targets with queued jobs, and the targets with running jobs on any server."""
        rows = session.rows(f"SELECT DISTINCT state, model, version FROM tsx_jobs WHERE {LIVE}")
        queued, running = (
            {(model, version) for state, model, version in rows if state == live_state}
            for live_state in ("queued", "running")
        )
        return queued, running

    @_transaction
    def claim(
        self, session: Session, limits: Mapping[JobTarget, int], owner: str, seconds: float
    ) -> list[JobRecord]:
        """Claim jobs for an owner, for `seconds`, up to the limit of each target."""
        claimed = []
        for target, limit in limits.items():
            queued = (
                "WHERE state = 'queued' AND model = ? AND version = ? ORDER BY priority DESC,"
                " number LIMIT ?"
            )
            for (id,) in session.rows(
                f"SELECT id FROM tsx_jobs {queued} {{locked}}", *target, limit
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
        self, session: Session, claims: Collection[Claim], owner: str, seconds: float
    ) -> set[Claim]:
        """Renew leases for `seconds`; return the claims that the owner has lost."""
        sql = f"UPDATE tsx_jobs SET lease = {{now}} + ? WHERE {CLAIMED}"
        return {claim for claim in claims if not session.run(sql, seconds, *claim, owner)}

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
            f"UPDATE tsx_jobs SET {change} WHERE {CLAIMED}",
            answer.status,
            keep,
            id,
            attempts,
            owner,
        ):
            return False
        (expires,) = session.row("SELECT expires FROM tsx_jobs WHERE id = ?", id)
        _put(session, AnswerKey(JOB, "", id), answer._replace(expires=expires))
        callback = "SELECT id, callback, {now} FROM tsx_jobs WHERE id = ? AND callback <> ''"
        session.run(f"INSERT INTO tsx_callbacks (id, url, due) {callback}", id)
        return True

    @_transaction
    def reclaim(self, session: Session) -> None:
        """Queue the jobs again whose leases have run out."""
        session.run(f"UPDATE tsx_jobs SET {REQUEUE} WHERE state = 'running' AND lease < {{now}}")

    @_transaction
    def expire(self, session: Session) -> bool:
        """Remove some expired requests and answers; return False if none are left.

        The record of a job is removed a day later.
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
        keys = (
            f"SELECT kind, scope, name FROM tsx_answers WHERE expires < {{now}} LIMIT {MAX_EXPIRED}"
        )
        removed = session.run(f"DELETE FROM tsx_answers WHERE (kind, scope, name) IN ({keys})")
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
        """Claim a key for `seconds` and return None, or return the key's answer.

        An answer without a status means that another owner has the key.
        """
        condition = (
            "tsx_answers.expires < {now} OR (tsx_answers.status IS NULL AND tsx_answers.headers ="
            " excluded.headers)"
        )
        values = "?, ?, ?, NULL, ?, ?, ?, {now} + ?"
        sql = (
            f"INSERT INTO tsx_answers (kind, scope, name, {ANSWER}) VALUES ({values}) {REPLACE}"
            f" WHERE {condition}"
        )
        if session.run(sql, *key, owner.encode(), b"", fingerprint, seconds):
            return None
        # The other owner's row has expired. An answer without a status makes the caller retry.
        empty_answer = StoredAnswer(None, fingerprint=fingerprint)
        return _answer(session, key) or empty_answer

    @_transaction
    def renew_answer(self, session: Session, key: AnswerKey, owner: str, seconds: float) -> None:
        """Renew the claim of a key for `seconds`."""
        session.run(
            f"UPDATE tsx_answers SET expires = {{now}} + ? WHERE {OWN_UNANSWERED}",
            seconds,
            *key,
            owner.encode(),
        )

    @_transaction
    def end_answer(
        self, session: Session, key: AnswerKey, owner: str, answer: StoredAnswer | None
    ) -> bool:
        """Store the owner's answer; return False if the owner has lost the key.

        If the answer is None, nothing is stored and the key is free.
        """
        is_owner = (
            session.run(f"DELETE FROM tsx_answers WHERE {OWN_UNANSWERED}", *key, owner.encode()) > 0
        )
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
        self, session: Session, limit: int, seconds: float, skipped_receivers: Collection[str] = ()
    ) -> list[DueCallback]:
        """Claim due callbacks for `seconds`, except those to `skipped_receivers`."""
        condition, values = _receiver_condition(skipped_receivers)
        claimed = []
        due = (
            f"SELECT id, url, attempts FROM tsx_callbacks WHERE due <= {{now}}{condition} ORDER BY"
            " due LIMIT ? {locked}"
        )
        for id, url, attempts in session.rows(due, *values, limit):
            session.run(
                "UPDATE tsx_callbacks SET attempts = attempts + 1, due = {now} + ? WHERE id = ?",
                seconds,
                id,
            )
            job, answer = _get(session, id), _answer(session, AnswerKey(JOB, "", id))
            if job is None or answer is None:  # The job has expired.
                session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
            else:
                claimed.append(DueCallback(id, url, attempts + 1, job.request_id, answer))
        return claimed

    @_transaction
    def next_callback(
        self, session: Session, skipped_receivers: Collection[str] = ()
    ) -> float | None:
        """Return the seconds until a callback is due that does not go to `skipped_receivers`."""
        condition, values = _receiver_condition(skipped_receivers)
        sql = f"SELECT min(due) - {{now}} FROM tsx_callbacks WHERE url <> ''{condition}"
        seconds: float | None = (session.rows(sql, *values))[0][0]
        return seconds

    @_transaction
    def end_callback(self, session: Session, id: str, retry_in: float | None, error: str) -> None:
        """Schedule a callback again in `retry_in` seconds, or remove it if that is None."""
        if retry_in is None:
            session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
        else:
            session.run(
                "UPDATE tsx_callbacks SET due = {now} + ?, error = ? WHERE id = ?",
                retry_in,
                error,
                id,
            )


def _receiver_condition(skipped_receivers: Collection[str]) -> tuple[str, list[Any]]:
    """Return an SQL condition that excludes receivers by the start of the URL, and its values."""
    return " AND substr(url, 1, ?) <> ?" * len(skipped_receivers), [
        value for start in skipped_receivers for value in (len(start), start)
    ]


def _check_room(session: Session, client: str, limit: int, max_client_jobs: int) -> None:
    """Check the limits of queued and running jobs.

    Jobs are counted once per commit, since counting many takes time.
    """
    for counted_client, condition, max_jobs in (
        ("", LIVE, limit),
        (client, f"client = ? AND {LIVE}", max_client_jobs),
    ):
        if max_jobs and counted_client not in session.job_counts:
            count = (
                f"SELECT count(*) FROM (SELECT 1 FROM tsx_jobs WHERE {condition} LIMIT ?) AS live"
            )
            session.job_counts[counted_client] = session.row(
                count, *([counted_client] if counted_client else []), max_jobs
            )[0]
    if session.job_counts[""] >= limit:
        raise JobsFull(
            f"{limit} jobs are queued or running (max_queued_jobs). Try again later.", retry_after=5
        )
    if max_client_jobs and session.job_counts[client] >= max_client_jobs:
        text = (
            f"{max_client_jobs} jobs of this client are queued or running (max_jobs_per_client)."
            " Try again later."
        )
        raise TooManyRequests(text, retry_after=5)
    session.job_counts.update(
        {
            counted_client: session.job_counts[counted_client] + 1
            for counted_client in {"", client}
            if counted_client in session.job_counts
        }
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
