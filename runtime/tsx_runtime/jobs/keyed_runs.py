"""Runs of requests under an idempotency key.

All servers of a store run one request of a key at a time. The store keeps the answer.
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

IDEMPOTENCY = "idempotency"  # the kind of the stored answers
LEASE_S = 10.0  # seconds until the key of a server that died is free
MIN_POLL_S, MAX_POLL_S = 0.05, 1.0  # between checks of another server's run


class KeyedRequest(NamedTuple):
    """A request, and the key of its answer."""

    key: AnswerKey
    fingerprint: str


class _Run(NamedTuple):
    fingerprint: str
    ended: asyncio.Event


class KeyedRuns:
    """The runs of one server; `counts` are requests with a key, by outcome."""

    def __init__(
        self,
        store: SqlStore,
        owner: str,
        keep: float,
        largest: int,
        begin: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare to run requests.

        Args:
            store: The store of the answers.
            owner: The random name of this server.
            keep: Seconds for which answers are kept.
            largest: The largest answer that is kept, in bytes.
            begin: Opens and maintains the store.
        """
        self.largest = largest
        self.counts: Counter[str] = Counter()
        self._store = store
        self._owner = owner
        self._keep = keep
        self._begin = begin
        self._runs: dict[AnswerKey, _Run] = {}

    async def claim(self, keyed: KeyedRequest) -> StoredAnswer | None:
        """Return the answer of a key, after the current run, or None.

        After None, the caller must call `run`.

        Raises:
            KeyReused: The key belongs to another request.
        """
        waited = False
        while (run := self._runs.get(keyed.key)) is not None:
            self._check(keyed, run.fingerprint)
            waited = True
            await run.ended.wait()
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
                # Another server works on it, or died. SQLite has no notifications, and a
                # notification per key would slow PostgreSQL down. So one request polls, ever more
                # rarely; the others of this server wait.
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
        """Store the result of `work`; after None, the next request with this key runs again.

        Returns:
            The answer of another server that took this one for dead, to be used instead; or None.
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
            with suppress(TsxError):  # The next attempt may come in time.
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
        self._runs.pop(keyed.key).ended.set()
