"""The store of jobs, in SQLite and in PostgreSQL: commits last, and each job has one answer."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.stored_jobs import ANSWER, MOST, REQUEST, a_new_job
from tsx_runtime.errors import (
    BadRequest,
    JobsFull,
    SettingError,
    StoreFull,
    StoreUnavailable,
    TooManyRequests,
)
from tsx_runtime.jobs import sql_store
from tsx_runtime.jobs.service import postgres_store
from tsx_runtime.jobs.sql_store import SqlStore
from tsx_runtime.jobs.sqlite import SqliteStore
from tsx_runtime.jobs.store import JOB, AnswerKey, JobRecord, NewJob, StoredAnswer

pytestmark = pytest.mark.anyio

MakeStore = Callable[[], SqlStore]


def run(store: SqlStore, test: Callable[[SqlStore], Awaitable[None]]) -> None:
    """Run a test with a store and close the store in the same event loop."""

    async def main() -> None:
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


def as_postgres(database: str, *statements: str) -> list[Any] | None:
    """Run SQL and return the rows of the last statement."""
    # The driver is an extra.
    import psycopg

    with psycopg.connect(database, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else None


async def state_of(store: SqlStore, id: str) -> str | None:
    job = await store.get(id)
    return None if job is None else job.state


async def claim(
    store: SqlStore, most: int = 10, owner: str = "me", seconds: float = 60
) -> list[JobRecord]:
    return await store.claim({("m", ""): most}, owner, seconds)


def test_an_accepted_job_is_there_as_it_came_for_the_next_server_too(make_store: MakeStore) -> None:
    async def accept(store: SqlStore) -> None:
        fields = {"priority": 3, "callback": "http://x/", "client": "me", "deadline": 5.0}
        await store.add(a_new_job("a", **fields), MOST)

    async def look(store: SqlStore) -> None:
        job = await store.get("a")
        assert job is not None
        assert (job.state, job.priority, job.callback) == ("queued", 3, "http://x/")
        assert (job.client, job.deadline) == ("me", 5.0)
        assert (job.size, job.attempts, job.request_id) == (5, 0, "r-1")
        assert await store.request("a") == REQUEST
        assert await store.request("b") is None

    run(make_store(), accept)
    run(make_store(), look)


async def test_jobs_are_claimed_once_by_priority_and_then_by_arrival(store: SqlStore) -> None:
    for id, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -1)):
        await store.add(a_new_job(id, priority=priority), MOST)
    await store.add(a_new_job("other", version="2.0"), MOST)
    assert await store.waiting() == ({("m", ""), ("m", "2.0")}, set())
    third = await store.get("c")
    assert third is not None
    assert await store.count_preceding(third) == 2
    assert [job.id for job in await claim(store, 3)] == ["b", "a", "c"]
    (last,) = await claim(store, 3)
    assert (last.id, last.state, last.attempts) == ("d", "running", 1)
    assert await claim(store) == []


async def test_a_job_is_answered_by_the_claim_that_is_in_force_and_once(store: SqlStore) -> None:
    await store.add(a_new_job("a", callback="http://x/"), MOST)
    await claim(store, owner="slow", seconds=-1)
    await store.reclaim()
    await claim(store, owner="quick")
    assert await store.renew([("a", 1)], "slow", 60) == {("a", 1)}
    assert await store.renew([("a", 2)], "quick", 60) == set()
    late = StoredAnswer(500)
    assert not await store.finish("a", 1, "slow", late, 60)
    assert not await store.finish("a", 1, "quick", late, 60)
    assert await store.finish("a", 2, "quick", ANSWER, 60)
    assert not await store.finish("a", 2, "quick", late, 60)
    answer = await store.get_answer(AnswerKey(JOB, "", "a"))
    assert answer is not None
    assert answer[:3] == ANSWER[:3]
    assert await store.counts() == {("m", "done"): 1}
    assert len(await store.claim_callbacks(5, 60)) == 1


async def test_a_job_can_be_released_cancelled_and_run_again(store: SqlStore) -> None:
    for id in ("a", "b"):
        await store.add(a_new_job(id), MOST)
    await claim(store, 1)
    await claim(store, owner="you")
    await store.release("me")
    assert [await state_of(store, id) for id in ("a", "b")] == ["queued", "running"]
    assert [(await store.get(id)).started is None for id in ("a", "b")] == [True, False]  # type: ignore[union-attr]
    await store.release("you")
    await claim(store)
    cancelled = [await store.cancel(id, 60) for id in ("a", "b", "c")]
    assert [job and job.state for job in cancelled] == ["cancelled", "cancelled", None]
    assert await store.renew([("b", 2)], "me", 60) == {("b", 2)}
    assert not await store.finish("b", 2, "me", ANSWER, 60)
    assert (await store.retry("b") or cancelled[0]).state == "queued"  # type: ignore[union-attr]
    [again] = await claim(store)
    assert await store.finish("b", again.attempts, "me", ANSWER, 60)
    assert (await store.cancel("b", 60)).state == "done"  # type: ignore[union-attr]


async def test_an_expired_job_is_removed_and_known_for_a_while(store: SqlStore) -> None:
    await store.add(a_new_job("a", callback="http://x/"), MOST)
    await claim(store)
    await store.finish("a", 1, "me", ANSWER, -1)
    await store.expire()
    assert await state_of(store, "a") == "expired"
    assert await store.request("a") is None
    assert await store.next_callback() is None
    assert (await store.retry("a")).state == "expired"  # type: ignore[union-attr]


async def test_one_client_and_all_together_have_a_bound_of_jobs(store: SqlStore) -> None:
    await store.add(a_new_job("a", client="me"), 2, 1)
    with pytest.raises(TooManyRequests, match="max_jobs_per_client"):
        await store.add(a_new_job("b", client="me"), 2, 1)
    await store.add(a_new_job("c", client="you"), 2, 1)
    with pytest.raises(JobsFull, match="max_queued_jobs"):
        await store.add(a_new_job("d", client="they"), 2, 1)
    await claim(store)
    await store.finish("a", 1, "me", ANSWER, 60)
    await store.add(a_new_job("d", client="me"), 2, 1)
    # The bound holds within one commit, too.
    adding = (store.add(a_new_job(str(n), client="they"), 9, 3) for n in range(8))
    results = await asyncio.gather(*adding, return_exceptions=True)
    assert [type(result) for result in results if result] == [TooManyRequests] * 5


async def test_jobs_are_listed_by_pages_the_newest_first(store: SqlStore) -> None:
    for number in range(5):
        await store.add(a_new_job(str(number), model="n" if number == 4 else "m"), MOST)
    page = await store.list_jobs(limit=2)
    assert [job.id for job in page] == ["4", "3"]
    page = await store.list_jobs(before_number=page[-1].number, model="m")
    assert [job.id for job in page] == ["2", "1", "0"]
    assert await store.list_jobs(state="done") == []


async def test_many_at_once_share_commits_and_one_that_fails_fails_alone(store: SqlStore) -> None:
    await store.add(a_new_job("x"), MOST)
    # The table refuses an answer without headers.
    bad = store.put_answer(AnswerKey("k", "", "bad"), StoredAnswer(200, None))  # type: ignore[arg-type]
    adding = (store.add(a_new_job(str(n)), MOST) for n in range(50))
    results = await asyncio.gather(*adding, bad, return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [StoreUnavailable]
    assert await store.counts() == {("m", "queued"): 51}
    claims = await asyncio.gather(*(claim(store, 7) for _ in range(9)))
    assert sorted(map(len, claims)) == [0, 2, *[7] * 7]
    assert len({job.id for jobs in claims for job in jobs}) == 51


async def test_an_answer_by_key_is_begun_by_one_and_forgotten_when_it_expires(
    store: SqlStore,
) -> None:
    key = AnswerKey("idempotency", "m", "k")
    assert await store.begin_answer(key, "f", "me", 60) is None
    begun = await store.begin_answer(key, "g", "you", 60)
    assert begun is not None
    assert (begun.status, begun.fingerprint) == (None, "f")
    # The client left while its request was stored, and comes again.
    assert await store.begin_answer(key, "f", "me", 60) is None
    answer = ANSWER._replace(fingerprint="f", expires=begun.expires)
    await store.put_answer(key, answer)
    assert await store.begin_answer(key, "f", "you", 60) == answer
    await store.put_answer(key, ANSWER._replace(expires=1.0))
    assert await store.get_answer(key) is None
    assert await store.begin_answer(key, "f", "you", 60) is None
    accepted = (key, StoredAnswer(202, expires=1e12))
    with pytest.raises(StoreUnavailable, match="Another server works on"):
        await store.add(a_new_job("a"), MOST, 0, accepted, "me")
    assert await store.counts() == {}
    await store.add(a_new_job("a"), MOST, 0, accepted, "you")
    assert await store.begin_answer(key, "f", "me", 60) == accepted[1]


async def test_expired_answers_are_removed_in_steps(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_store, "MAX_EXPIRED", 2)
    for number in range(5):
        await store.put_answer(AnswerKey("k", "", str(number)), ANSWER._replace(expires=1.0))
    assert [await store.expire() for _ in range(3)] == [True, True, False]
    assert await store.do(lambda session: session.rows("SELECT * FROM tsx_answers")) == []


async def test_callbacks_of_closed_receivers_stay_where_they_are(store: SqlStore) -> None:
    x, y, z = "http://x/", "http://x.y/", "http://z/"
    for id, receiver in (("a", x), ("b", y), ("c", z)):
        await store.add(a_new_job(id, callback=f"{receiver}1"), MOST)
        await claim(store)
        await store.finish(id, 1, "me", ANSWER, 60)
    assert await store.next_callback([x, y, z]) is None
    assert (await store.next_callback([x]) or 0.0) <= 0
    assert [due.id for due in await store.claim_callbacks(5, 60, [x, z])] == ["b"]
    assert [due.id for due in await store.claim_callbacks(5, 60)] == ["a", "c"]


async def test_a_callback_is_claimed_once_and_comes_again_after_a_while(store: SqlStore) -> None:
    await store.add(a_new_job("a", callback="http://x/"), MOST)
    await claim(store)
    await store.finish("a", 1, "me", ANSWER, 60)
    assert (await store.next_callback() or 0.0) <= 0
    [due] = await store.claim_callbacks(5, 60)
    assert (due.id, due.url, due.attempts, due.answer.body) == ("a", "http://x/", 1, b"an answer")
    assert await store.claim_callbacks(5, 60) == []
    await store.end_callback("a", 0.0, "it answered 500")
    [due] = await store.claim_callbacks(5, 60)
    assert due.attempts == 2
    await store.end_callback("a", None, "")
    assert await store.next_callback() is None


async def test_a_server_that_replaces_another_shares_its_file_until_that_one_has_ended(
    file_store: SqlStore, tmp_path: Path
) -> None:
    store = file_store
    key = AnswerKey("idempotency", "m", "k")
    for id in ("a", "b"):
        await store.add(a_new_job(id), MOST)
    [first] = await claim(store, 1)
    assert await store.begin_answer(key, "f", "me", 60) is None
    following = SqliteStore(tmp_path / "jobs.sqlite")
    following.follow(60)
    claiming = asyncio.ensure_future(claim(following, owner="other"))
    await asyncio.sleep(0)
    store.hand_over()
    assert [job.id for job in await claiming] == ["b"]
    # The run under the key goes on.
    assert (await following.begin_answer(key, "f", "other", 60)).status is None  # type: ignore[union-attr]
    await store.add(a_new_job("c"), MOST)
    assert await store.finish(first.id, first.attempts, "me", ANSWER, 60)
    assert (await following.get_answer(AnswerKey(JOB, "", "a"))).body == ANSWER.body  # type: ignore[union-attr]
    assert [job.id for job in await claim(following, owner="other")] == ["c"]
    assert store.shared
    assert following.shared
    with pytest.raises(StoreUnavailable, match="in use by another running server"):
        await SqliteStore(tmp_path / "jobs.sqlite").get("a")
    await following.close()


async def test_a_job_of_a_replaced_server_is_not_run_again_where_its_successor_was_killed(
    file_store: SqlStore, tmp_path: Path
) -> None:
    await file_store.add(a_new_job("a"), MOST)
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


async def test_a_server_that_is_replaced_while_it_waits_for_its_file_does_not_keep_it(
    file_store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        goes_on.wait()

    monkeypatch.setattr(time, "sleep", sleep)
    await file_store.open()
    waiting, last = (SqliteStore(tmp_path / "jobs.sqlite") for _ in range(2))
    waiting.follow(60)
    opened = asyncio.ensure_future(waiting.open())
    await asyncio.to_thread(waits.wait)
    waiting.hand_over()
    file_store.hand_over()
    goes_on.set()
    await opened
    await last.add(a_new_job("a"), MOST)
    assert await state_of(waiting, "a") == "queued"
    await last.close()
    await waiting.close()


def test_a_killed_server_leaves_its_file_and_its_jobs_to_the_next_one(tmp_path: Path) -> None:
    key = AnswerKey("idempotency", "m", "k")

    async def test(store: SqlStore) -> None:
        await store.add(a_new_job("a"), MOST)
        await claim(store)
        assert await store.begin_answer(key, "f", "me", 60) is None
        with pytest.raises(StoreUnavailable, match="in use by another running server"):
            await SqliteStore(tmp_path / "jobs.sqlite").get("a")

    async def look(store: SqlStore) -> None:
        assert [job.attempts for job in await claim(store)] == [2]
        assert await store.begin_answer(key, "f", "me", 60) is None

    run(SqliteStore(tmp_path / "jobs.sqlite"), test)
    run(SqliteStore(tmp_path / "jobs.sqlite"), look)
    assert (tmp_path / "jobs.sqlite").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_an_error_that_says_what_to_do_and_passes(tmp_path: Path) -> None:
    async def test(store: SqlStore) -> None:
        await store.add(a_new_job("a"), MOST)
        large = a_new_job("b")._replace(request=REQUEST._replace(body=bytes(1 << 20)))
        with pytest.raises(StoreFull, match="max_jobs_size") as raised:
            await store.add(large, MOST)
        assert raised.value.status == 507
        await store.add(a_new_job("c"), MOST)
        assert await store.counts() == {("m", "queued"): 2}

    run(SqliteStore(tmp_path / "jobs.sqlite", 1 << 18), test)


def test_a_file_that_is_no_store_and_a_path_that_cannot_be_written_are_errors(
    tmp_path: Path,
) -> None:
    (tmp_path / "other.sqlite").write_bytes(b"no database" * 100)
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    for name in ("other.sqlite", "file/jobs.sqlite", "directory"):
        store = SqliteStore(tmp_path / name)
        # The first attempt gives its lock back.
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"cannot be (used|written)"):
                asyncio.run(store.get("a"))


def test_a_url_that_postgresql_cannot_read_is_an_error_without_its_password() -> None:
    with pytest.raises(SettingError, match="postgresql://USER:PASSWORD@HOST") as caught:
        postgres_store("postgresql://me:100%zzz@host/jobs")
    assert "zzz" not in str(caught.value)


def test_calls_that_wait_for_one_connection_fail_together(tmp_path: Path) -> None:
    class Unreachable(SqliteStore):
        attempts = 0

        def connect(self) -> sqlite3.Connection:
            self.attempts += 1
            raise sqlite3.OperationalError("it may take ten seconds to find out")

    async def test(store: SqlStore) -> None:
        results = await asyncio.gather(*(store.get("a") for _ in range(50)), return_exceptions=True)
        assert {type(result) for result in results} == {StoreUnavailable}

    store = Unreachable(tmp_path / "jobs.sqlite")
    run(store, test)
    assert store.attempts < 5


@pytest.mark.usefixtures("processes")
def test_a_lost_connection_is_made_again(database: str) -> None:
    async def test(store: SqlStore) -> None:
        await store.add(a_new_job("a"), MOST)
        as_postgres(
            database,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'tsx' AND datname = current_database()",
        )
        await store.add(a_new_job("b"), MOST)
        bad = REQUEST._replace(path="/predictions/m/1.0/\0")
        with pytest.raises(BadRequest, match="cannot be stored"):
            await store.add(a_new_job("c")._replace(request=bad), MOST)
        assert await store.counts() == {("m", "queued"): 2}

    run(postgres_store(database), test)
    with pytest.raises(StoreUnavailable, match=r"postgresql://nowhere\.invalid/jobs") as caught:
        asyncio.run(postgres_store("postgresql://tsx:secret@nowhere.invalid/jobs").get("a"))
    assert "secret" not in caught.value.message


@pytest.mark.usefixtures("processes")
async def test_servers_of_one_queue_claim_each_job_once(database: str) -> None:
    stores = [postgres_store(database) for _ in range(3)]
    await asyncio.gather(*(stores[n % 3].add(a_new_job(str(n)), MOST) for n in range(60)))
    claimed: list[str] = []

    async def work(store: SqlStore, owner: str) -> None:
        while jobs := await claim(store, 4, owner):
            claimed.extend(job.id for job in jobs)
            await asyncio.gather(
                *(store.finish(job.id, job.attempts, owner, ANSWER, 60) for job in jobs)
            )

    await asyncio.gather(*(work(store, str(number)) for number, store in enumerate(stores)))
    assert sorted(map(int, claimed)) == list(range(60))
    assert await stores[0].counts() == {("m", "done"): 60}
    for store in stores:
        await store.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "planted", ["tsx_schema", ""], ids=["a table of another user", "a schema open to all"]
)
def test_a_database_in_which_others_could_run_sql_as_the_server_is_refused(
    database: str, planted: str
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
    as_postgres(database, closed if planted else "DROP TABLE tsx_schema")

    async def test(store: SqlStore) -> None:
        reason = f"the table {planted} " if planted else "any user of the database"
        with pytest.raises(StoreUnavailable, match=reason):
            await store.open()

    run(postgres_store(database.replace("tsx@", "app@")), test)
    assert as_postgres(database, "SELECT * FROM loot") == []
    as_postgres(database, "DROP OWNED BY app, thief; DROP ROLE app, thief")


async def test_names_are_never_sql(store: SqlStore) -> None:
    name = "x'); DROP TABLE tsx_jobs; -- {now} ? %s %(a)s {locked} \\ $$ \U0001f600"
    await store.add(NewJob(name, name, name, REQUEST, client=name, callback=name), MOST, MOST)
    (job,) = await store.claim({(name, name): 1}, name, 60)
    assert (job.id, job.model, job.version, job.client) == (name,) * 4
    assert await store.finish(name, job.attempts, name, ANSWER, 60)
    assert [job.id for job in await store.list_jobs(model=name, before_number=10**15)] == [name]
    key = AnswerKey(name, name, name)
    await store.put_answer(key, ANSWER._replace(expires=time.time() + 60))
    assert await store.get_answer(key) is not None


def test_a_store_of_another_release_is_left_alone(make_store: MakeStore) -> None:
    async def change(store: SqlStore) -> None:
        await store.do(lambda session: session.run("UPDATE tsx_schema SET version = version + 1"))

    async def test(store: SqlStore) -> None:
        with pytest.raises(StoreUnavailable, match="tables of another release"):
            await store.add(a_new_job("a"), MOST)

    run(make_store(), change)
    run(make_store(), test)


def test_an_error_of_the_database_quotes_no_row(processes: None, database: str) -> None:
    async def test(store: SqlStore) -> None:
        await store.add(a_new_job("a", callback="https://host/hook?key=a-secret"), MOST)
        with pytest.raises(StoreUnavailable, match="not-null constraint") as caught:
            await store.do(lambda session: session.run("UPDATE tsx_jobs SET model = NULL"))
        assert "a-secret" not in caught.value.message

    run(postgres_store(database), test)
