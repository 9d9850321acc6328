"""The reply cache of a version (docs/guides/caching.md).

It precedes the queue, and answers requests that were answered before.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from tsx_archiver.metadata.modelconfig import CacheConfig
from tsx_runtime import wire
from tsx_runtime.core.isolation.hidden_credentials import CREDENTIAL_HEADERS, USER_HEADERS
from tsx_runtime.core.scheduling.dispatcher import Dispatcher
from tsx_runtime.core.scheduling.job import Flow, Job, ObservedAnswer, ObservedJob
from tsx_runtime.core.telemetry.batch_times import NO_TIMES, Batch
from tsx_runtime.core.telemetry.cold_starts import without_cold_start
from tsx_runtime.errors import ClientLeft, DeadlinePassed, TsxError
from tsx_runtime.wire import Buffer

# Bytes. Hashing a larger body would block the event loop for too long.
MAX_BODY_BYTES = 4 << 20
ENTRY_OVERHEAD_BYTES = 500  # memory of an entry besides its answer
# The headers that are part of every key. Those of the second line come from the path; credentials
# belong to it if the handler gets them.
KEY_HEADERS = (
    *(b"accept", b"content-encoding", b"content-type", wire.TENSORS_HEAD),
    *(b"describe", b"explain", b"url_path", b"x-tsx-protocol", wire.NODE_HEADER),
    *map(str.encode, (*CREDENTIAL_HEADERS, *USER_HEADERS)),
)
# The headers of a request that is not cached.
_UNCACHED_REQUEST = re.compile(
    rb"^(range:|cache-control:.*no-(cache|store))", re.IGNORECASE | re.MULTILINE
)
_VARY = re.compile(rb"^vary:(.*)$", re.IGNORECASE | re.MULTILINE)
# The headers of an answer that is not cached.
_UNCACHED_RESPONSE = re.compile(
    rb"^(set-cookie:|cache-control:.*(no-cache|no-store|private))", re.IGNORECASE | re.MULTILINE
)


class _Reply(NamedTuple):
    headers: bytes
    body: bytes
    stored: float  # time.monotonic()
    size: int


class ReplyCache:
    """The answers of a version by their requests; the least recently used are dropped first.

    A request that equals a running one waits for its answer.
    """

    def __init__(
        self,
        config: CacheConfig,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.size = 0  # total bytes of the entries
        self.hits = 0
        self.misses = 0
        self.evictions = 0  # entries dropped for others
        self._dispatcher = dispatcher
        self._clock = clock
        self._submit: Callable[[Job], None] = dispatcher.submit
        self._key_headers = frozenset([*KEY_HEADERS, *map(str.encode, config.key)])
        self._replies: OrderedDict[bytes, _Reply] = OrderedDict()
        self._running: dict[bytes, _Miss] = {}
        self._waiting: dict[Job, _Miss] = {}  # keys: the jobs of clients

    def __len__(self) -> int:
        return len(self._replies)

    def before(self, submit: Callable[[Job], None]) -> Callable[[Job], None]:
        """Return the version's entry point; `submit` gets requests that the cache cannot answer."""
        self._submit = submit
        return self.submit

    def submit(self, job: Job) -> None:
        key = self._key(job)
        if key is None:
            self._submit(job)
            return
        now = self._clock()
        reply = self._replies.get(key)
        if reply is not None and now - reply.stored < self.config.ttl:
            self._replies.move_to_end(key)
            self._answer(job, reply, now)
            return
        running = self._running.get(key)
        if running is not None and running.is_soon_enough_for(job):
            running.followers[job] = None
            self._waiting[job] = running
            return
        self.misses += 1
        miss = _Miss(job, key, self)
        if running is None:
            self._running[key] = miss
        self._waiting[job] = miss
        self._submit(miss)

    def leave(self, job: Job) -> None:
        """Note that a client has left.

        A request that others wait for goes on. A request that waits for another is refused at once.
        """
        job.gone = True
        miss = self._waiting.get(job)
        if miss is None or miss.gone:
            self._dispatcher.leave(miss or job)
        elif job in miss.followers:
            del miss.followers[job], self._waiting[job]
            error = ClientLeft(
                "The client disconnected while its request waited for the answer of an equal one."
            )
            self._dispatcher.stats.add_refusal(job, error, self._clock())
            job.refuse(error)

    def clear(self) -> None:
        self._replies.clear()
        self.size = 0

    # The methods that misses call

    def may_store(self, headers: bytes) -> bool:
        """Check that the key of equal requests has all that an answer varies by (RFC 9111, 4.1)."""
        varied = {
            name.strip().lower() for line in _VARY.findall(headers) for name in line.split(b",")
        }
        return varied - {b""} <= self._key_headers and not _UNCACHED_RESPONSE.search(headers)

    def answered(self, miss: _Miss, headers: bytes, body: bytes) -> None:
        """Store an answer, and give it to the requests that wait for it."""
        now = self._clock()
        headers = without_cold_start(headers)
        reply = _Reply(headers, body, now, len(headers) + len(body) + ENTRY_OVERHEAD_BYTES)
        for job in self.release(miss):
            self._answer(job, reply, now)
        if reply.size <= self.config.size:
            self._drop(miss.key)
            self._replies[miss.key] = reply
            self.size += reply.size
        while self.size > self.config.size:
            self._drop(next(iter(self._replies)))
            self.evictions += 1

    def not_shared(self, miss: _Miss, *, over: bool = True) -> None:
        """Run each request that waited for an answer, which is for its own client only."""
        for job in self.release(miss, over=over):
            self.misses += 1
            self._submit(job)

    def refused(self, miss: _Miss, error: TsxError) -> None:
        """Refuse equal requests too, unless the error concerns only this client."""
        for job in self.release(miss):
            if isinstance(error, DeadlinePassed | ClientLeft) and not job.gone:
                self.submit(job)
            else:
                self._dispatcher.stats.add_refusal(job, error, self._clock())
                job.refuse(error)

    def release(self, miss: _Miss, *, over: bool = True) -> list[Job]:
        """End the waiting for a miss, and return the jobs that waited."""
        if self._running.get(miss.key) is miss:
            del self._running[miss.key]
        followers, miss.followers = list(miss.followers), {}
        for job in (miss.job, *followers) if over else followers:
            del self._waiting[job]
        return followers

    def _answer(self, job: Job, reply: _Reply, now: float) -> None:
        self.hits += 1
        batch: Batch = (now, now, now, 1, NO_TIMES, struct.pack("d", job.arrived), None)
        job.answer(
            200,
            b"%bage: %d\r\nx-cache: hit\r\n" % (reply.headers, now - reply.stored),
            reply.body,
            batch,
        )

    def _drop(self, key: bytes) -> None:
        if reply := self._replies.pop(key, None):
            self.size -= reply.size

    def _key(self, job: Job) -> bytes | None:
        """Return the key of a request, or None if it is not cached."""
        body = job.body
        _, query, block = job.meta.split(b"\r\n", 2)
        if len(body) > MAX_BODY_BYTES or _UNCACHED_REQUEST.search(block):
            return None
        lines = [query]
        for line in block.split(b"\r\n"):
            name, _, value = line.partition(b": ")
            if name.lower() in self._key_headers:
                lines.append(b"%b: %b" % (name.lower(), value))
        digest = sha256(b"\r\n".join(lines) + b"\r\n\r\n")
        for piece in body.pieces if isinstance(body, wire.Parts) else (body,):
            digest.update(piece)
        return digest.digest()


class _Miss(ObservedJob):
    """A running request, and the requests that wait for its answer."""

    def __init__(self, job: Job, key: bytes, cache: ReplyCache) -> None:
        super().__init__(job, self._end, math.inf)
        self.key = key
        self.followers: dict[Job, None] = {}  # ordered by arrival
        self.streamed = False
        self._cache = cache

    def is_soon_enough_for(self, job: Job) -> bool:
        """Tell whether it is as urgent as another job, and ends by the other's deadline."""
        due = self.job.deadline
        return job.priority <= self.priority and (
            job.deadline is None or (due is not None and due <= job.deadline)
        )

    @property
    def gone(self) -> bool:
        return self.job.gone and all(job.gone for job in self.followers)

    @gone.setter
    def gone(self, gone: bool) -> None:
        self.job.gone = gone

    def _end(self, seen: ObservedAnswer) -> None:
        if seen.error is not None:
            self._cache.refused(self, seen.error)
        elif seen.status == 200 and not self.streamed and self._cache.may_store(seen.headers):
            assert seen.body is not None
            self._cache.answered(self, seen.headers, seen.body)
        else:
            self._cache.not_shared(self)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        if not self.streamed:
            self.streamed = True
            self._cache.not_shared(self, over=False)
        super().piece(headers, body, flow)
