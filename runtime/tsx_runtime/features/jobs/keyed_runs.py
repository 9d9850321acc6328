"""Runs of requests under an idempotency key.

The servers that share a store run only one request of a key at a time. The store keeps its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from tsx_runtime.errors import KeyReused, TsxError
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.store import AnswerKey, StoredAnswer
from tsx_runtime.wire import header_block

IDEMPOTENCY = "idempotency"  # the kind of these answers in the store
LEASE_S = 10.0  # seconds until a key that a dead server has claimed is free again
MIN_POLL_S, MAX_POLL_S = 0.05, 1.0  # between checks whether another server's run has ended


class KeyedRequest(NamedTuple):
    """A request, and the key of its answer."""

    key: AnswerKey
    fingerprint: str


class _Run(NamedTuple):
    fingerprint: str
    end_event: asyncio.Event


class KeyedRuns:
    """The runs of one server; `counts` holds the number of requests with a key, by outcome."""

    def __init__(
        self,
        store: SqlStore,
        owner: str,
        keep: float,
        max_size: int,
        begin: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare to run requests.

        Args:
            store: The store of the answers.
            owner: The random name of this server.
            keep: Seconds for which answers are kept.
            max_size: The size of the largest answer that is kept.
            begin: Opens the store and starts its maintenance.
        """
        self.max_size = max_size
        self.counts: Counter[str] = Counter()
        self._store = store
        self._owner = owner
        self._keep = keep
        self._begin = begin
        self._runs: dict[AnswerKey, _Run] = {}

    async def claim(self, keyed: KeyedRequest) -> StoredAnswer | None:
        """Return the answer of a key, after waiting for its current run, or None.

        None means that the caller has claimed the key and must call `run`.

        Raises:
            KeyReused: The key belongs to another request.
        """
        waited = False
        while (run := self._runs.get(keyed.key)) is not None:
            self._check(keyed, run.fingerprint)
            waited = True
            await run.end_event.wait()
        self._runs[keyed.key] = _Run(keyed.fingerprint, asyncio.Event())
        try:
            await self._begin()
            pause = MIN_POLL_S
            while (
                stored := await self._store.begin_answer(
                    keyed.key, keyed.fingerprint, self._owner, LEASE_S
                )
            ) is not None:
                self._check(keyed, stored.fingerprint)
                if stored.status is not None:
                    break
                # Another server runs a request of this key, or has died. SQLite has no
                # notifications, and a notification per key would slow PostgreSQL down. Therefore
                # a single request polls, ever more rarely. This server's other requests wait.
                waited = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_POLL_S)
        except BaseException:
            self._end(keyed)
            raise
        if stored is not None:
            self._end(keyed)
        self.counts["run" if stored is None else "waited" if waited else "replayed"] += 1
        return stored

    async def run(
        self, keyed: KeyedRequest, work: Awaitable[StoredAnswer | None]
    ) -> StoredAnswer | None:
        """Store the result of `work`; if it is None, the next request with this key runs again.

        Returns:
            An answer to use instead, from another server that took this one for dead; or None.
        """
        renewing = asyncio.create_task(self._renew(keyed))
        answer: StoredAnswer | None = None
        try:
            answer = await work
        finally:
            renewing.cancel()
            try:
                is_kept = await self._store.end_answer(keyed.key, self._owner, answer)
            finally:
                self._end(keyed)
        if answer is None or is_kept:
            return None
        stored = await self._store.get_answer(keyed.key)
        return stored if stored is not None and stored.status is not None else None

    def answer(
        self, keyed: KeyedRequest, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> StoredAnswer:
        return StoredAnswer(
            status, header_block(headers), body, keyed.fingerprint, time.time() + self._keep
        )

    async def _renew(self, keyed: KeyedRequest) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with suppress(TsxError):  # The next attempt may still be in time.
                await self._store.renew_answer(keyed.key, self._owner, LEASE_S)

    def _check(self, keyed: KeyedRequest, fingerprint: str) -> None:
        if fingerprint != keyed.fingerprint:
            self.counts["reused"] += 1
            raise KeyReused(
                f"The Idempotency-Key {keyed.key.key!r} belongs to another request to this path:"
                " its method, query, content type or body was another. Send each request under a"
                " key of its own."
            )

    def _end(self, keyed: KeyedRequest) -> None:
        self._runs.pop(keyed.key).end_event.set()
