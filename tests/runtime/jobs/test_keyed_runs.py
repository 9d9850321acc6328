"""Runs under a key among the servers of one PostgreSQL database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tsx_runtime.errors import KeyReused
from tsx_runtime.jobs import keyed_runs
from tsx_runtime.jobs.keyed_runs import IDEMPOTENCY, KeyedRequest, KeyedRuns
from tsx_runtime.jobs.store import AnswerKey, StoredAnswer

pytestmark = pytest.mark.slow
KEYED = KeyedRequest(AnswerKey(IDEMPOTENCY, "place", "key"), "request")


def among(database: str, work: Callable[[KeyedRuns, KeyedRuns], Awaitable[None]]) -> None:
    from tsx_runtime.jobs.postgres import PostgresStore  # here, where its driver is needed

    async def main() -> None:
        stores = [PostgresStore(database) for _ in range(2)]
        try:
            one, two = (
                KeyedRuns(store, f"owner {number}", 60, 1000, store.open)
                for number, store in enumerate(stores)
            )
            await asyncio.wait_for(work(one, two), 60)
        finally:
            for store in stores:
                await store.close()

    asyncio.run(main())


def test_one_of_two_servers_gets_a_key(database: str) -> None:
    async def work(one: KeyedRuns, two: KeyedRuns) -> None:
        begun = await asyncio.gather(
            *(
                runs._store.begin_answer(KEYED.key, "request", f"owner {number}", 60)
                for number, runs in enumerate([one, two] * 10)
            )
        )
        assert begun.count(None) == 1

    among(database, work)


def test_a_request_waits_for_the_run_of_another_server(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_runs, "SHORTEST", 0.001)

    async def work(runs: KeyedRuns, waits: KeyedRuns) -> None:
        may = asyncio.Event()

        async def model() -> StoredAnswer:
            await may.wait()
            return runs.answer(KEYED, 200, [(b"a", b"b")], b"answer")

        assert await runs.claim(KEYED) is None
        running = asyncio.create_task(runs.run(KEYED, model()))
        looked, begin = asyncio.Event(), waits._store.begin_answer

        async def watched(*words: Any) -> StoredAnswer | None:
            found = await begin(*words)
            looked.set()
            return found

        monkeypatch.setattr(waits._store, "begin_answer", watched)
        waiting = asyncio.create_task(waits.claim(KEYED))
        await looked.wait()
        with pytest.raises(KeyReused):
            await runs.claim(KEYED._replace(fingerprint="another"))
        may.set()
        assert await running is None
        found = await waiting
        assert found is not None
        assert (found.status, found.headers, found.body) == (200, b"a: b\r\n", b"answer")
        assert waits.counts["waited"] == 1

    among(database, work)


def test_the_key_of_a_server_that_died_is_free_after_its_lease(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_runs, "LEASE", 0.2)
    monkeypatch.setattr(keyed_runs, "SHORTEST", 0.01)

    async def work(dead: KeyedRuns, other: KeyedRuns) -> None:
        assert await dead.claim(KEYED) is None  # and it never goes on
        assert await other.claim(KEYED) is None

        async def model() -> StoredAnswer:
            return other.answer(KEYED, 200, [], b"other")

        async def late() -> StoredAnswer:
            return dead.answer(KEYED, 200, [], b"late")

        assert await other.run(KEYED, model()) is None
        found = await dead.run(
            KEYED, late()
        )  # it was not dead, only slow: its client gets what others got
        assert found is not None
        assert found.body == b"other"

    among(database, work)
