"""Runs of requests under an idempotency key: one at a time among all servers of a store, which
keeps its answer for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from tsx_runtime.errors import KeyReused, TsxError
from tsx_runtime.jobs.sql_store import SqlStore
from tsx_runtime.jobs.store import AnswerKey, StoredAnswer
from tsx_runtime.wire import header_block

IDEMPOTENCY = "idempotency"  # the kind of these answers
LEASE = 10.0  # seconds for which the key of a server that died stays taken
SHORTEST, LONGEST = 0.05, 1.0  # seconds between two looks at a run of another server


class KeyedRequest(NamedTuple):
    """What an answer is kept under, and the request that it answers."""

    key: AnswerKey
    fingerprint: str


class _Run(NamedTuple):
    fingerprint: str
    ended: asyncio.Event


class KeyedRuns:
    """Those of one server. `counts`: requests with a key, by what became of them."""

    def __init__(
        self,
        store: SqlStore,
        owner: str,
        keep: float,
        largest: int,
        begin: Callable[[], Awaitable[None]],
    ) -> None:
        """`keep`: seconds; `largest`: bytes of an answer; `begin`: from when on the store is looked
        after.
        """
        self.largest = largest
        self.counts: Counter[str] = Counter()
        self._store = store
        self._owner = owner
        self._keep = keep
        self._begin = begin
        self._runs: dict[AnswerKey, _Run] = {}

    async def claim(self, keyed: KeyedRequest) -> StoredAnswer | None:
        """The answer that there is, once it is.

        None: the run is the caller's, who goes on with `run`. Raises KeyReused.
        """
        waited = False
        while (other := self._runs.get(keyed.key)) is not None:
            self._check(keyed, other.fingerprint)
            waited = True
            await other.ended.wait()
        self._runs[keyed.key] = _Run(keyed.fingerprint, asyncio.Event())
        try:
            await self._begin()
            pause = SHORTEST
            while (
                found := await self._store.begin_answer(
                    keyed.key, keyed.fingerprint, self._owner, LEASE
                )
            ) is not None:
                self._check(keyed, found.fingerprint)
                if found.status is not None:
                    break
                # Another server works on it, or one that died did. SQLite tells nobody, and on
                # PostgreSQL a notification for each key would cost every answer one, so one request
                # of this server looks again, ever more rarely; the others wait for it.
                # rarely; the others wait for it.
                waited = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST)
        except BaseException:
            self._end(keyed)
            raise
        if found is not None:
            self._end(keyed)
        self.counts["run" if found is None else "waited" if waited else "replayed"] += 1
        return found

    async def run(
        self, keyed: KeyedRequest, work: Awaitable[StoredAnswer | None]
    ) -> StoredAnswer | None:
        """Keep what comes of it; nothing where that is None, and then the next request with this
        key runs again.

        Returns the answer that is kept instead: of another server, which took this one for dead.
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
        other = await self._store.get_answer(keyed.key)
        return other if other is not None and other.status is not None else None

    def answer(
        self, keyed: KeyedRequest, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> StoredAnswer:
        return StoredAnswer(
            status, header_block(headers), body, keyed.fingerprint, time.time() + self._keep
        )

    async def _renew(self, keyed: KeyedRequest) -> None:
        while True:
            await asyncio.sleep(LEASE / 3)
            with suppress(TsxError):  # the next try may come in time
                await self._store.renew_answer(keyed.key, self._owner, LEASE)

    def _check(self, keyed: KeyedRequest, fingerprint: str) -> None:
        if fingerprint != keyed.fingerprint:
            self.counts["reused"] += 1
            raise KeyReused(
                f"The Idempotency-Key {keyed.key.key!r} belongs to another request to this path:"
                " its method, query, content type or body was another. Send each request under a"
                " key of its own."
            )

    def _end(self, keyed: KeyedRequest) -> None:
        self._runs.pop(keyed.key).ended.set()
