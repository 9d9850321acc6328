"""Runs under an idempotency key on several servers of one PostgreSQL database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tsx_runtime.errors import KeyReused
from tsx_runtime.features.jobs import keyed_runs
from tsx_runtime.features.jobs.keyed_runs import IDEMPOTENCY, KeyedRequest, KeyedRuns
from tsx_runtime.features.jobs.service import postgres_store
from tsx_runtime.features.jobs.storage.store import AnswerKey, StoredAnswer

pytestmark = pytest.mark.slow
KEYED = KeyedRequest(AnswerKey(IDEMPOTENCY, "place", "key"), "request")


def run_on_two_servers(
    database: str, test: Callable[[KeyedRuns, KeyedRuns], Awaitable[None]]
) -> None:
    async def main() -> None:
        stores = [postgres_store(database) for _ in range(2)]
        try:
            first, second = (
                KeyedRuns(job_store, f"owner {number}", 60, 1000, job_store.open)
                for number, job_store in enumerate(stores)
            )
            await asyncio.wait_for(test(first, second), 60)
        finally:
            for job_store in stores:
                await job_store.close()

    asyncio.run(main())


def test_only_one_of_two_servers_gets_a_key(database: str) -> None:
    async def test(first: KeyedRuns, second: KeyedRuns) -> None:
        claims = (
            runs._store.begin_answer(KEYED.key, "request", f"owner {number}", 60)
            for number, runs in enumerate([first, second] * 10)
        )
        assert (await asyncio.gather(*claims)).count(None) == 1

    run_on_two_servers(database, test)


def test_a_request_waits_for_a_run_on_another_server(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_runs, "MIN_POLL_S", 0.001)

    async def test(runs: KeyedRuns, waiting_runs: KeyedRuns) -> None:
        may_answer = asyncio.Event()

        async def model() -> StoredAnswer:
            await may_answer.wait()
            return runs.answer(KEYED, 200, [(b"a", b"b")], b"answer")

        assert await runs.claim(KEYED) is None
        run_task = asyncio.create_task(runs.run(KEYED, model()))
        has_polled, begin_answer = asyncio.Event(), waiting_runs._store.begin_answer

        async def begin_watched(*arguments: Any) -> StoredAnswer | None:
            answer = await begin_answer(*arguments)
            has_polled.set()
            return answer

        monkeypatch.setattr(waiting_runs._store, "begin_answer", begin_watched)
        waiting_task = asyncio.create_task(waiting_runs.claim(KEYED))
        await has_polled.wait()
        with pytest.raises(KeyReused):
            await runs.claim(KEYED._replace(fingerprint="another"))
        may_answer.set()
        assert await run_task is None
        answer = await waiting_task
        assert answer is not None
        assert (answer.status, answer.headers, answer.body) == (200, b"a: b\r\n", b"answer")
        assert waiting_runs.counts["waited"] == 1

    run_on_two_servers(database, test)


def test_the_key_of_a_dead_server_is_freed_after_its_lease(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_runs, "LEASE_S", 0.2)
    monkeypatch.setattr(keyed_runs, "MIN_POLL_S", 0.01)

    async def test(slow_server: KeyedRuns, quick_server: KeyedRuns) -> None:
        async def model(runs: KeyedRuns, body: bytes) -> StoredAnswer:
            return runs.answer(KEYED, 200, [], body)

        assert await slow_server.claim(KEYED) is None
        assert await quick_server.claim(KEYED) is None
        assert await quick_server.run(KEYED, model(quick_server, b"other")) is None
        # The first server was only slow: its client gets the answer that other clients got.
        answer = await slow_server.run(KEYED, model(slow_server, b"late"))
        assert answer is not None
        assert answer.body == b"other"

    run_on_two_servers(database, test)
