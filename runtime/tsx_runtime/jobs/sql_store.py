"""The store in SQL, the same for SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tsx_runtime.errors import JobsFull, TooManyRequests
from tsx_runtime.jobs.sql_thread import Session, SqlThread
from tsx_runtime.jobs.store import JOB, AnswerKey, DueCallback, JobRecord, JobState, JobTarget, NewJob, StoredAnswer, StoredRequest

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


class SqlStore(SqlThread):
    """A `JobStore`; what databases do differently is in `sqlite.py` and `postgres.py`."""

    shared: bool

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

        await self.do(work)

    async def get(self, id: str) -> JobRecord | None:
        return await self.do(lambda session: _get(session, id))

    async def ahead(self, job: JobRecord) -> int:
        before = "state = 'queued' AND model = ? AND (priority > ? OR (priority = ? AND number < ?))"
        values = (job.model, job.priority, job.priority, job.number)
        count: int = (await self.do(lambda session: session.row(f"SELECT count(*) FROM tsx_jobs WHERE {before}", *values)))[0]
        return count

    async def cancel(self, id: str, keep: float) -> JobRecord | None:
        def work(session: Session) -> JobRecord | None:
            change = "state = 'cancelled', owner = NULL, finished = {now}, expires = {now} + ?"
            session.run(f"UPDATE tsx_jobs SET {change} WHERE id = ? AND {LIVE}", keep, id)
            return _get(session, id)

        return await self.do(work)

    async def retry(self, id: str) -> JobRecord | None:
        def work(session: Session) -> JobRecord | None:
            change = "state = 'queued', status = NULL, started = NULL, finished = NULL, expires = NULL, deadline = NULL"
            if session.run(f"UPDATE tsx_jobs SET {change} WHERE id = ? AND state IN ('done', 'cancelled')", id):
                session.run("DELETE FROM tsx_answers WHERE kind = ? AND scope = '' AND name = ?", JOB, id)
                session.run("DELETE FROM tsx_callbacks WHERE id = ?", id)
            return _get(session, id)

        return await self.do(work)

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
        return [JobRecord(*row) for row in await self.do(lambda session: session.rows(sql, *given.values(), limit))]

    async def counts(self) -> dict[tuple[str, JobState], int]:
        sql = "SELECT model, state, count(*) FROM tsx_jobs GROUP BY state, model"
        return {(model, state): count for model, state, count in await self.do(lambda session: session.rows(sql))}

    async def oldest(self) -> dict[str, float]:
        sql = "SELECT model, {now} - min(created) FROM tsx_jobs WHERE state = 'queued' GROUP BY model"
        return {model: max(0.0, seconds) for model, seconds in await self.do(lambda session: session.rows(sql))}

    # Jobs, for the servers that run them

    async def request(self, id: str) -> StoredRequest | None:
        sql = "SELECT request_id, method, path, query, headers, body FROM tsx_requests WHERE id = ?"
        row = await self.do(lambda session: session.row(sql, id))
        return None if row is None else StoredRequest(*row)

    async def waiting(self) -> set[JobTarget]:
        sql = "SELECT DISTINCT model, version FROM tsx_jobs WHERE state = 'queued'"
        return {(model, version) for model, version in await self.do(lambda session: session.rows(sql))}

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

        return await self.do(work)

    async def renew(self, held: Collection[tuple[str, int]], owner: str, seconds: float) -> set[str]:
        def work(session: Session) -> set[str]:
            sql = f"UPDATE tsx_jobs SET lease = {{now}} + ? WHERE {HELD}"
            return {id for id, attempts in held if not session.run(sql, seconds, id, attempts, owner)}

        return await self.do(work)

    async def release(self, held: Collection[tuple[str, int]], owner: str) -> None:
        def work(session: Session) -> None:
            for id, attempts in held:
                session.run(f"UPDATE tsx_jobs SET state = 'queued', owner = NULL WHERE {HELD}", id, attempts, owner)

        await self.do(work)

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

        return await self.do(work)

    async def reclaim(self) -> None:
        sql = "UPDATE tsx_jobs SET state = 'queued', owner = NULL WHERE state = 'running' AND lease < {now}"
        await self.do(lambda session: session.run(sql))

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

        await self.do(work)

    # Answers by key

    async def get_answer(self, key: AnswerKey) -> StoredAnswer | None:
        return await self.do(lambda session: _answer(session, key))

    async def begin_answer(self, key: AnswerKey, fingerprint: str, owner: str, seconds: float) -> StoredAnswer | None:
        fields = "kind, scope, name, status, fingerprint, expires, headers, body"
        insert = (
            f"INSERT INTO tsx_answers ({fields}) VALUES (?, ?, ?, NULL, ?, {{now}} + ?, ?, ?) ON CONFLICT (kind, scope, name) DO NOTHING"
        )

        def work(session: Session) -> StoredAnswer | None:
            while True:  # again where what is there expires between two of these statements
                session.run("DELETE FROM tsx_answers WHERE kind = ? AND scope = ? AND name = ? AND expires < {now}", *key)
                if session.run(insert, *key, fingerprint, seconds, owner.encode(), b""):
                    return None
                if (found := _answer(session, key)) is not None:
                    return found

        return await self.do(work)

    async def renew_answer(self, key: AnswerKey, owner: str, seconds: float) -> None:
        sql = f"UPDATE tsx_answers SET expires = {{now}} + ? WHERE {BEGUN}"
        await self.do(lambda session: session.run(sql, seconds, *key, owner.encode()))

    async def end_answer(self, key: AnswerKey, owner: str, answer: StoredAnswer | None) -> bool:
        def work(session: Session) -> bool:
            ended = session.run(f"DELETE FROM tsx_answers WHERE {BEGUN}", *key, owner.encode()) > 0
            if ended and answer is not None:
                _put(session, key, answer)
            return ended

        return await self.do(work)

    async def put_answer(self, key: AnswerKey, answer: StoredAnswer) -> None:
        await self.do(lambda session: _put(session, key, answer))

    async def drop_answer(self, key: AnswerKey) -> bool:
        sql = "DELETE FROM tsx_answers WHERE kind = ? AND scope = ? AND name = ?"
        return await self.do(lambda session: session.run(sql, *key) > 0)

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

        return await self.do(work)

    async def next_callback(self) -> float | None:
        seconds: float | None = (await self.do(lambda session: session.row("SELECT min(due) - {now} FROM tsx_callbacks")))[0]
        return seconds

    async def end_callback(self, id: str, retry_in: float | None, error: str) -> None:
        if retry_in is None:
            await self.do(lambda session: session.run("DELETE FROM tsx_callbacks WHERE id = ?", id))
        else:
            sql = "UPDATE tsx_callbacks SET due = {now} + ?, error = ? WHERE id = ?"
            await self.do(lambda session: session.run(sql, retry_in, error, id))


def _check_room(session: Session, client: str, most: int, most_of_client: int) -> None:
    count = f"SELECT count(*) FROM (SELECT 1 FROM tsx_jobs WHERE {LIVE} LIMIT ?) AS live"
    if session.row(count, most)[0] >= most:
        raise JobsFull(f"{most} jobs are queued or running (max_queued_jobs). Try again later.", retry_after=5)
    count = f"SELECT count(*) FROM tsx_jobs WHERE client = ? AND {LIVE}"
    if most_of_client and session.row(count, client)[0] >= most_of_client:
        text = f"{most_of_client} jobs of this client are queued or running (max_jobs_per_client). Try again later."
        raise TooManyRequests(text, retry_after=5)


def _get(session: Session, id: str) -> JobRecord | None:
    row = session.row(f"SELECT {RECORD} FROM tsx_jobs WHERE id = ?", id)
    return None if row is None else JobRecord(*row)


def _answer(session: Session, key: AnswerKey) -> StoredAnswer | None:
    row = session.row(f"SELECT {ANSWER} FROM tsx_answers WHERE kind = ? AND scope = ? AND name = ? AND expires >= {{now}}", *key)
    return None if row is None else StoredAnswer(*row)


def _put(session: Session, key: AnswerKey, answer: StoredAnswer) -> None:
    session.run("DELETE FROM tsx_answers WHERE kind = ? AND scope = ? AND name = ?", *key)
    session.run(f"INSERT INTO tsx_answers (kind, scope, name, {ANSWER}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *key, *answer)
