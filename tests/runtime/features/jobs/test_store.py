"""The job store in SQLite and PostgreSQL: commits are durable and each job has one answer."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.features.jobs.stored_jobs import ANSWER, QUEUE_LIMIT, REQUEST, a_new_job
from tsx_runtime.errors import (
    BadRequest,
    JobsFull,
    SettingError,
    StoreFull,
    StoreUnavailable,
    TooManyRequests,
)
from tsx_runtime.features.jobs.storage import sql_store, sqlite
from tsx_runtime.features.jobs.storage.location import postgres_store
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.sqlite import SqliteStore
from tsx_runtime.features.jobs.storage.store import JOB, AnswerKey, JobRecord, NewJob, StoredAnswer

pytestmark = pytest.mark.anyio

MakeStore = Callable[[], SqlStore]


def run(job_store: SqlStore, test: Callable[[SqlStore], Awaitable[None]]) -> None:
    """Run a test with a store and close the store in the same event loop."""

    async def main() -> None:
        try:
            await test(job_store)
        finally:
            await job_store.close()

    asyncio.run(main())


def as_postgres(database: str, *statements: str) -> list[Any] | None:
    """Run SQL and return the rows of the last statement."""
    # The driver is an optional dependency.
    import psycopg

    with psycopg.connect(database, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else None


async def state_of(job_store: SqlStore, id: str) -> str | None:
    job = await job_store.get(id)
    return None if job is None else job.state


async def claim(
    job_store: SqlStore, max_jobs: int = 10, owner: str = "me", seconds: float = 60
) -> list[JobRecord]:
    return await job_store.claim({("m", ""): max_jobs}, owner, seconds)


def test_an_accepted_job_is_stored_unchanged_for_the_next_server(make_store: MakeStore) -> None:
    async def accept(job_store: SqlStore) -> None:
        fields = {"priority": 3, "callback": "http://x/", "client": "me", "deadline": 5.0}
        await job_store.add(a_new_job("a", **fields), QUEUE_LIMIT)

    async def read_back(job_store: SqlStore) -> None:
        job = await job_store.get("a")
        assert job is not None
        assert (job.state, job.priority, job.callback) == ("queued", 3, "http://x/")
        assert (job.client, job.deadline) == ("me", 5.0)
        assert (job.size, job.attempts, job.request_id) == (5, 0, "r-1")
        assert await job_store.request("a") == REQUEST
        assert await job_store.request("b") is None

    run(make_store(), accept)
    run(make_store(), read_back)


async def test_jobs_are_claimed_once_in_order_of_priority_and_arrival(job_store: SqlStore) -> None:
    for id, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -1)):
        await job_store.add(a_new_job(id, priority=priority), QUEUE_LIMIT)
    await job_store.add(a_new_job("other", version="2.0"), QUEUE_LIMIT)
    assert await job_store.waiting() == ({("m", ""), ("m", "2.0")}, set())
    third = await job_store.get("c")
    assert third is not None
    assert await job_store.count_preceding(third) == 2
    assert [job.id for job in await claim(job_store, 3)] == ["b", "a", "c"]
    (last,) = await claim(job_store, 3)
    assert (last.id, last.state, last.attempts) == ("d", "running", 1)
    assert await claim(job_store) == []


async def test_a_job_is_answered_once_and_only_by_its_current_claim(job_store: SqlStore) -> None:
    await job_store.add(a_new_job("a", callback="http://x/"), QUEUE_LIMIT)
    await claim(job_store, owner="slow", seconds=-1)
    await job_store.reclaim()
    await claim(job_store, owner="quick")
    assert await job_store.renew([("a", 1)], "slow", 60) == {("a", 1)}
    assert await job_store.renew([("a", 2)], "quick", 60) == set()
    late_answer = StoredAnswer(500)
    assert not await job_store.finish("a", 1, "slow", late_answer, 60)
    assert not await job_store.finish("a", 1, "quick", late_answer, 60)
    assert await job_store.finish("a", 2, "quick", ANSWER, 60)
    assert not await job_store.finish("a", 2, "quick", late_answer, 60)
    answer = await job_store.get_answer(AnswerKey(JOB, "", "a"))
    assert answer is not None
    assert answer[:3] == ANSWER[:3]
    assert await job_store.counts() == {("m", "done"): 1}
    assert len(await job_store.claim_callbacks(5, 60)) == 1


async def test_a_job_can_be_released_cancelled_and_run_again(job_store: SqlStore) -> None:
    for id in ("a", "b"):
        await job_store.add(a_new_job(id), QUEUE_LIMIT)
    await claim(job_store, 1)
    await claim(job_store, owner="you")
    await job_store.release("me")
    assert [await state_of(job_store, id) for id in ("a", "b")] == ["queued", "running"]
    assert [(await job_store.get(id)).started is None for id in ("a", "b")] == [True, False]  # type: ignore[union-attr]
    await job_store.release("you")
    await claim(job_store)
    cancelled = [await job_store.cancel(id, 60) for id in ("a", "b", "c")]
    assert [job and job.state for job in cancelled] == ["cancelled", "cancelled", None]
    assert await job_store.renew([("b", 2)], "me", 60) == {("b", 2)}
    assert not await job_store.finish("b", 2, "me", ANSWER, 60)
    assert (await job_store.retry("b") or cancelled[0]).state == "queued"  # type: ignore[union-attr]
    [reclaimed] = await claim(job_store)
    assert await job_store.finish("b", reclaimed.attempts, "me", ANSWER, 60)
    assert (await job_store.cancel("b", 60)).state == "done"  # type: ignore[union-attr]


async def test_an_expired_job_is_removed_but_remembered_for_a_while(job_store: SqlStore) -> None:
    await job_store.add(a_new_job("a", callback="http://x/"), QUEUE_LIMIT)
    await claim(job_store)
    await job_store.finish("a", 1, "me", ANSWER, -1)
    await job_store.expire()
    assert await state_of(job_store, "a") == "expired"
    assert await job_store.request("a") is None
    assert await job_store.next_callback() is None
    assert (await job_store.retry("a")).state == "expired"  # type: ignore[union-attr]


async def test_jobs_are_limited_per_client_and_in_total(job_store: SqlStore) -> None:
    await job_store.add(a_new_job("a", client="me"), 2, 1)
    with pytest.raises(TooManyRequests, match="max_jobs_per_client"):
        await job_store.add(a_new_job("b", client="me"), 2, 1)
    await job_store.add(a_new_job("c", client="you"), 2, 1)
    with pytest.raises(JobsFull, match="max_queued_jobs"):
        await job_store.add(a_new_job("d", client="they"), 2, 1)
    await claim(job_store)
    await job_store.finish("a", 1, "me", ANSWER, 60)
    await job_store.add(a_new_job("d", client="me"), 2, 1)
    # The limit also applies within one commit.
    adding = (job_store.add(a_new_job(str(n), client="they"), 9, 3) for n in range(8))
    results = await asyncio.gather(*adding, return_exceptions=True)
    assert [type(result) for result in results if result] == [TooManyRequests] * 5


async def test_jobs_are_listed_in_pages_newest_first(job_store: SqlStore) -> None:
    for number in range(5):
        await job_store.add(a_new_job(str(number), model="n" if number == 4 else "m"), QUEUE_LIMIT)
    page = await job_store.list_jobs(limit=2)
    assert [job.id for job in page] == ["4", "3"]
    page = await job_store.list_jobs(before_number=page[-1].number, model="m")
    assert [job.id for job in page] == ["2", "1", "0"]
    assert await job_store.list_jobs(state="done") == []


async def test_concurrent_calls_share_commits_but_fail_separately(job_store: SqlStore) -> None:
    await job_store.add(a_new_job("x"), QUEUE_LIMIT)
    # The table refuses an answer without headers.
    bad = job_store.put_answer(AnswerKey("k", "", "bad"), StoredAnswer(200, None))  # type: ignore[arg-type]
    adding = (job_store.add(a_new_job(str(n)), QUEUE_LIMIT) for n in range(50))
    results = await asyncio.gather(*adding, bad, return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [StoreUnavailable]
    assert await job_store.counts() == {("m", "queued"): 51}
    claim_lists = await asyncio.gather(*(claim(job_store, 7) for _ in range(9)))
    assert sorted(map(len, claim_lists)) == [0, 2, *[7] * 7]
    assert len({job.id for jobs in claim_lists for job in jobs}) == 51


async def test_an_answer_key_has_one_owner_and_is_forgotten_on_expiry(job_store: SqlStore) -> None:
    key = AnswerKey("idempotency", "m", "k")
    assert await job_store.begin_answer(key, "f", "me", 60) is None
    existing_answer = await job_store.begin_answer(key, "g", "you", 60)
    assert existing_answer is not None
    assert (existing_answer.status, existing_answer.fingerprint) == (None, "f")
    # The client left while its request was stored, and repeats it.
    assert await job_store.begin_answer(key, "f", "me", 60) is None
    answer = ANSWER._replace(fingerprint="f", expires=existing_answer.expires)
    await job_store.put_answer(key, answer)
    assert await job_store.begin_answer(key, "f", "you", 60) == answer
    await job_store.put_answer(key, ANSWER._replace(expires=1.0))
    assert await job_store.get_answer(key) is None
    assert await job_store.begin_answer(key, "f", "you", 60) is None
    accepted = (key, StoredAnswer(202, expires=1e12))
    with pytest.raises(StoreUnavailable, match="Another server works on"):
        await job_store.add(a_new_job("a"), QUEUE_LIMIT, 0, accepted, "me")
    assert await job_store.counts() == {}
    await job_store.add(a_new_job("a"), QUEUE_LIMIT, 0, accepted, "you")
    assert await job_store.begin_answer(key, "f", "me", 60) == accepted[1]


async def test_expired_answers_are_removed_in_steps(
    job_store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_store, "MAX_EXPIRED", 2)
    for number in range(5):
        await job_store.put_answer(AnswerKey("k", "", str(number)), ANSWER._replace(expires=1.0))
    assert [await job_store.expire() for _ in range(3)] == [True, True, False]
    assert await job_store.do(lambda session: session.rows("SELECT * FROM tsx_answers")) == []


async def test_callbacks_of_paused_receivers_are_not_claimed(job_store: SqlStore) -> None:
    x, y, z = "http://x/", "http://x.y/", "http://z/"
    for id, receiver in (("a", x), ("b", y), ("c", z)):
        await job_store.add(a_new_job(id, callback=f"{receiver}1"), QUEUE_LIMIT)
        await claim(job_store)
        await job_store.finish(id, 1, "me", ANSWER, 60)
    assert await job_store.next_callback([x, y, z]) is None
    assert (await job_store.next_callback([x]) or 0.0) <= 0
    assert [due.id for due in await job_store.claim_callbacks(5, 60, [x, z])] == ["b"]
    assert [due.id for due in await job_store.claim_callbacks(5, 60)] == ["a", "c"]


async def test_a_callback_is_claimed_once_and_retried_later(job_store: SqlStore) -> None:
    await job_store.add(a_new_job("a", callback="http://x/"), QUEUE_LIMIT)
    await claim(job_store)
    await job_store.finish("a", 1, "me", ANSWER, 60)
    assert (await job_store.next_callback() or 0.0) <= 0
    [due] = await job_store.claim_callbacks(5, 60)
    assert (due.id, due.url, due.attempts, due.answer.body) == ("a", "http://x/", 1, b"an answer")
    assert await job_store.claim_callbacks(5, 60) == []
    await job_store.end_callback("a", 0.0, "it answered 500")
    [due] = await job_store.claim_callbacks(5, 60)
    assert due.attempts == 2
    await job_store.end_callback("a", None, "")
    assert await job_store.next_callback() is None


async def test_a_replacement_server_shares_the_file_until_the_old_one_ends(
    file_store: SqlStore, tmp_path: Path
) -> None:
    job_store = file_store
    key = AnswerKey("idempotency", "m", "k")
    for id in ("a", "b"):
        await job_store.add(a_new_job(id), QUEUE_LIMIT)
    [first] = await claim(job_store, 1)
    assert await job_store.begin_answer(key, "f", "me", 60) is None
    next_store = SqliteStore(tmp_path / "jobs.sqlite")
    next_store.follow(60)
    claim_task = asyncio.ensure_future(claim(next_store, owner="other"))
    await asyncio.sleep(0)
    job_store.hand_over()
    assert [job.id for job in await claim_task] == ["b"]
    # The run under the key is still in progress.
    assert (await next_store.begin_answer(key, "f", "other", 60)).status is None  # type: ignore[union-attr]
    await job_store.add(a_new_job("c"), QUEUE_LIMIT)
    assert await job_store.finish(first.id, first.attempts, "me", ANSWER, 60)
    assert (await next_store.get_answer(AnswerKey(JOB, "", "a"))).body == ANSWER.body  # type: ignore[union-attr]
    assert [job.id for job in await claim(next_store, owner="other")] == ["c"]
    assert job_store.shared
    assert next_store.shared
    with pytest.raises(StoreUnavailable, match="in use by another running server"):
        await SqliteStore(tmp_path / "jobs.sqlite").get("a")
    await next_store.close()


async def test_a_killed_successor_does_not_rerun_jobs_of_the_old_server(
    file_store: SqlStore, tmp_path: Path
) -> None:
    await file_store.add(a_new_job("a"), QUEUE_LIMIT)
    assert [job.id for job in await claim(file_store)] == ["a"]
    killed, third = SqliteStore(tmp_path / "jobs.sqlite"), SqliteStore(tmp_path / "jobs.sqlite")
    killed.follow(60)
    file_store.hand_over()
    await killed.open()
    await killed.close()
    assert await claim(third, owner="third") == []
    await third.close()
    await file_store.close()
    assert [job.id for job in await claim(third, owner="third")] == ["a"]
    await third.close()


async def test_a_server_replaced_while_it_waits_for_the_file_releases_it(
    file_store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting, may_continue = threading.Event(), threading.Event()
    real_sleep = time.sleep

    def sleep(seconds: float) -> None:
        if seconds == sqlite.POLL_S:
            is_waiting.set()
            may_continue.wait()
        else:  # Another thread of the process sleeps.
            real_sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    await file_store.open()
    waiting_store, last = (SqliteStore(tmp_path / "jobs.sqlite") for _ in range(2))
    waiting_store.follow(60)
    open_task = asyncio.ensure_future(waiting_store.open())
    await asyncio.to_thread(is_waiting.wait)
    waiting_store.hand_over()
    file_store.hand_over()
    may_continue.set()
    await open_task
    await last.add(a_new_job("a"), QUEUE_LIMIT)
    assert await state_of(waiting_store, "a") == "queued"
    await last.close()
    await waiting_store.close()


def test_the_next_server_takes_the_file_and_jobs_of_a_killed_one(tmp_path: Path) -> None:
    key = AnswerKey("idempotency", "m", "k")

    async def test(job_store: SqlStore) -> None:
        await job_store.add(a_new_job("a"), QUEUE_LIMIT)
        await claim(job_store)
        assert await job_store.begin_answer(key, "f", "me", 60) is None
        with pytest.raises(StoreUnavailable, match="in use by another running server"):
            await SqliteStore(tmp_path / "jobs.sqlite").get("a")

    async def read_back(job_store: SqlStore) -> None:
        assert [job.attempts for job in await claim(job_store)] == [2]
        assert await job_store.begin_answer(key, "f", "me", 60) is None

    run(SqliteStore(tmp_path / "jobs.sqlite"), test)
    run(SqliteStore(tmp_path / "jobs.sqlite"), read_back)
    assert (tmp_path / "jobs.sqlite").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_a_temporary_error_with_advice(tmp_path: Path) -> None:
    async def test(job_store: SqlStore) -> None:
        await job_store.add(a_new_job("a"), QUEUE_LIMIT)
        large_job = a_new_job("b")._replace(request=REQUEST._replace(body=bytes(1 << 20)))
        with pytest.raises(StoreFull, match="max_jobs_size") as exc_info:
            await job_store.add(large_job, QUEUE_LIMIT)
        assert exc_info.value.status == 507
        await job_store.add(a_new_job("c"), QUEUE_LIMIT)
        assert await job_store.counts() == {("m", "queued"): 2}

    run(SqliteStore(tmp_path / "jobs.sqlite", 1 << 18), test)


def test_invalid_store_files_and_unwritable_paths_are_errors(tmp_path: Path) -> None:
    (tmp_path / "other.sqlite").write_bytes(b"no database" * 100)
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    for name in ("other.sqlite", "file/jobs.sqlite", "directory"):
        job_store = SqliteStore(tmp_path / name)
        # The first attempt must release its lock.
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"cannot be (used|written)"):
                asyncio.run(job_store.get("a"))


def test_an_invalid_postgresql_url_is_reported_without_its_password() -> None:
    with pytest.raises(SettingError, match="postgresql://USER:PASSWORD@HOST") as exc_info:
        postgres_store("postgresql://me:100%zzz@host/jobs")
    assert "zzz" not in str(exc_info.value)


def test_calls_that_wait_for_a_failed_connection_all_fail(tmp_path: Path) -> None:
    class Unreachable(SqliteStore):
        attempts = 0

        def connect(self) -> sqlite3.Connection:
            self.attempts += 1
            raise sqlite3.OperationalError("it may take ten seconds to find out")

    async def test(job_store: SqlStore) -> None:
        results = await asyncio.gather(
            *(job_store.get("a") for _ in range(50)), return_exceptions=True
        )
        assert {type(result) for result in results} == {StoreUnavailable}

    job_store = Unreachable(tmp_path / "jobs.sqlite")
    run(job_store, test)
    assert job_store.attempts < 5


@pytest.mark.usefixtures("processes")
def test_a_lost_connection_is_reestablished(database: str) -> None:
    async def test(job_store: SqlStore) -> None:
        await job_store.add(a_new_job("a"), QUEUE_LIMIT)
        as_postgres(
            database,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'tsx' AND datname = current_database()",
        )
        await job_store.add(a_new_job("b"), QUEUE_LIMIT)
        bad = REQUEST._replace(path="/predictions/m/1.0/\0")
        with pytest.raises(BadRequest, match="cannot be stored"):
            await job_store.add(a_new_job("c")._replace(request=bad), QUEUE_LIMIT)
        assert await job_store.counts() == {("m", "queued"): 2}

    run(postgres_store(database), test)
    with pytest.raises(StoreUnavailable, match=r"postgresql://nowhere\.invalid/jobs") as exc_info:
        asyncio.run(postgres_store("postgresql://tsx:secret@nowhere.invalid/jobs").get("a"))
    assert "secret" not in exc_info.value.message


@pytest.mark.usefixtures("processes")
async def test_servers_of_one_queue_claim_each_job_once(database: str) -> None:
    stores = [postgres_store(database) for _ in range(3)]
    await asyncio.gather(*(stores[n % 3].add(a_new_job(str(n)), QUEUE_LIMIT) for n in range(60)))
    claimed_ids: list[str] = []

    async def claim_all(job_store: SqlStore, owner: str) -> None:
        while jobs := await claim(job_store, 4, owner):
            claimed_ids.extend(job.id for job in jobs)
            await asyncio.gather(
                *(job_store.finish(job.id, job.attempts, owner, ANSWER, 60) for job in jobs)
            )

    await asyncio.gather(
        *(claim_all(job_store, str(number)) for number, job_store in enumerate(stores))
    )
    assert sorted(map(int, claimed_ids)) == list(range(60))
    assert await stores[0].counts() == {("m", "done"): 60}
    for job_store in stores:
        await job_store.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "hostile_sql", ["tsx_schema", ""], ids=["a table of another user", "a schema open to all"]
)
def test_a_database_where_others_could_run_sql_as_the_server_is_refused(
    database: str, hostile_sql: str
) -> None:
    as_postgres(
        database,
        "DROP ROLE IF EXISTS app; DROP ROLE IF EXISTS thief",
        "CREATE ROLE app LOGIN; CREATE ROLE thief LOGIN",
        "CREATE TABLE loot (run_as text); GRANT ALL ON loot TO PUBLIC",
        "GRANT CREATE ON SCHEMA public TO PUBLIC",
    )
    body = "BEGIN INSERT INTO loot SELECT current_user; RETURN NEW; END"
    as_postgres(
        database.replace("tsx@", "thief@"),
        f"CREATE FUNCTION steal() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
        "CREATE TABLE tsx_schema (version INTEGER NOT NULL); GRANT ALL ON tsx_schema TO PUBLIC",
        "CREATE TRIGGER steal AFTER INSERT ON tsx_schema FOR EACH ROW EXECUTE FUNCTION steal()",
    )
    closed = "REVOKE CREATE ON SCHEMA public FROM PUBLIC; GRANT CREATE ON SCHEMA public TO app"
    as_postgres(database, closed if hostile_sql else "DROP TABLE tsx_schema")

    async def test(job_store: SqlStore) -> None:
        reason = f"the table {hostile_sql} " if hostile_sql else "any user of the database"
        with pytest.raises(StoreUnavailable, match=reason):
            await job_store.open()

    run(postgres_store(database.replace("tsx@", "app@")), test)
    assert as_postgres(database, "SELECT * FROM loot") == []
    as_postgres(database, "DROP OWNED BY app, thief; DROP ROLE app, thief")


async def test_names_are_never_interpreted_as_sql(job_store: SqlStore) -> None:
    name = "x'); DROP TABLE tsx_jobs; -- {now} ? %s %(a)s {locked} \\ $$ \U0001f600"
    await job_store.add(
        NewJob(name, name, name, REQUEST, client=name, callback=name), QUEUE_LIMIT, QUEUE_LIMIT
    )
    (job,) = await job_store.claim({(name, name): 1}, name, 60)
    assert (job.id, job.model, job.version, job.client) == (name,) * 4
    assert await job_store.finish(name, job.attempts, name, ANSWER, 60)
    assert [job.id for job in await job_store.list_jobs(model=name, before_number=10**15)] == [name]
    key = AnswerKey(name, name, name)
    await job_store.put_answer(key, ANSWER._replace(expires=time.time() + 60))
    assert await job_store.get_answer(key) is not None


def test_a_store_of_another_release_is_refused_unchanged(make_store: MakeStore) -> None:
    async def change(job_store: SqlStore) -> None:
        await job_store.do(
            lambda session: session.run("UPDATE tsx_schema SET version = version + 1")
        )

    async def test(job_store: SqlStore) -> None:
        with pytest.raises(StoreUnavailable, match="tables of another release"):
            await job_store.add(a_new_job("a"), QUEUE_LIMIT)

    run(make_store(), change)
    run(make_store(), test)


def test_database_errors_do_not_quote_rows(processes: None, database: str) -> None:
    async def test(job_store: SqlStore) -> None:
        await job_store.add(a_new_job("a", callback="https://host/hook?key=a-secret"), QUEUE_LIMIT)
        with pytest.raises(StoreUnavailable, match="not-null constraint") as exc_info:
            await job_store.do(lambda session: session.run("UPDATE tsx_jobs SET model = NULL"))
        assert "a-secret" not in exc_info.value.message

    run(postgres_store(database), test)
