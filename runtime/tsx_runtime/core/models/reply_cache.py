"""The reply cache of a version: stands in front of its queue and answers requests that were
answered before (docs/guides/caching.md).
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
from tsx_runtime.core.telemetry.batch_times import NOTHING, Batch
from tsx_runtime.core.telemetry.cold_starts import without_cold_start
from tsx_runtime.errors import ClientLeft, DeadlinePassed, TsxError
from tsx_runtime.wire import Buffer

LONGEST = (
    4 << 20
)  # bytes of a body that is looked up: a longer one would hold up the event loop while it is hashed
OVERHEAD = 500  # bytes of an entry beside its answer
# The headers that are part of every key. Those of the second line come from the path; credentials
# are here where the handler gets them.
TELLING = (
    *(b"accept", b"content-encoding", b"content-type", wire.TENSORS_HEAD),
    *(b"describe", b"explain", b"url_path", b"x-tsx-protocol", wire.NODE_HEADER),
    *map(str.encode, (*CREDENTIAL_HEADERS, *USER_HEADERS)),
)
_NOT_LOOKED_UP = re.compile(
    rb"^(range:|cache-control:.*no-(cache|store))", re.IGNORECASE | re.MULTILINE
)  # in a request's headers
_VARY = re.compile(rb"^vary:(.*)$", re.IGNORECASE | re.MULTILINE)
_NOT_STORED = re.compile(
    rb"^(set-cookie:|cache-control:.*(no-cache|no-store|private))", re.IGNORECASE | re.MULTILINE
)  # an answer's


class _Reply(NamedTuple):
    headers: bytes
    body: bytes
    stored: float  # time.monotonic()
    size: int


class ReplyCache:
    """Answers of one version by their requests; the least recently used go first.

    What equals a running request waits for its answer.
    """

    def __init__(
        self,
        config: CacheConfig,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.size = 0  # bytes of all entries
        self.hits = 0
        self.misses = 0
        self.evictions = 0  # entries that made room for others
        self._dispatcher = dispatcher
        self._clock = clock
        self._submit: Callable[[Job], None] = dispatcher.submit
        self._telling = frozenset([*TELLING, *map(str.encode, config.key)])
        self._replies: OrderedDict[bytes, _Reply] = OrderedDict()
        self._running: dict[bytes, _Miss] = {}
        self._waiting: dict[Job, _Miss] = {}  # by the client's job

    def __len__(self) -> int:
        return len(self._replies)

    def before(self, submit: Callable[[Job], None]) -> Callable[[Job], None]:
        """The entrance of the version: `submit` gets what the cache does not answer."""
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
        """Its client is gone.

        A request that others wait for goes on; one that waits for another is refused at once, and
        not kept.
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

    # What misses call

    def may_store(self, headers: bytes) -> bool:
        """Check that the key of equal requests has all that an answer varies by (RFC 9111, 4.1)."""
        varied = {
            name.strip().lower() for line in _VARY.findall(headers) for name in line.split(b",")
        }
        return varied - {b""} <= self._telling and not _NOT_STORED.search(headers)

    def answered(self, miss: _Miss, headers: bytes, body: bytes) -> None:
        """Others may get the answer too."""
        now = self._clock()
        headers = without_cold_start(headers)
        reply = _Reply(headers, body, now, len(headers) + len(body) + OVERHEAD)
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
        """Its answer is for its own client alone, so each of those that waited for it runs."""
        for job in self.release(miss, over=over):
            self.misses += 1
            self._submit(job)

    def refused(self, miss: _Miss, error: TsxError) -> None:
        """Equal requests would be refused alike, except for what concerned this client alone."""
        for job in self.release(miss):
            if isinstance(error, DeadlinePassed | ClientLeft) and not job.gone:
                self.submit(job)
            else:
                self._dispatcher.stats.add_refusal(job, error, self._clock())
                job.refuse(error)

    def release(self, miss: _Miss, *, over: bool = True) -> list[Job]:
        """The jobs that waited for it: from now on none does."""
        if self._running.get(miss.key) is miss:
            del self._running[miss.key]
        followers, miss.followers = list(miss.followers), {}
        for job in (miss.job, *followers) if over else followers:
            del self._waiting[job]
        return followers

    def _answer(self, job: Job, reply: _Reply, now: float) -> None:
        self.hits += 1
        batch: Batch = (now, now, now, 1, NOTHING, struct.pack("d", job.arrived), None)
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
        """None for a request that the cache is not used for."""
        body = job.body
        _, query, block = job.meta.split(b"\r\n", 2)
        if len(body) > LONGEST or _NOT_LOOKED_UP.search(block):
            return None
        lines = [query]
        for line in block.split(b"\r\n"):
            name, _, value = line.partition(b": ")
            if name.lower() in self._telling:
                lines.append(b"%b: %b" % (name.lower(), value))
        digest = sha256(b"\r\n".join(lines) + b"\r\n\r\n")
        for piece in body.pieces if isinstance(body, wire.Parts) else (body,):
            digest.update(piece)
        return digest.digest()


class _Miss(ObservedJob):
    """A request that runs, and those that wait for its answer."""

    def __init__(self, job: Job, key: bytes, cache: ReplyCache) -> None:
        super().__init__(job, self._end, math.inf)
        self.key = key
        self.followers: dict[Job, None] = {}  # in the order of their arrival
        self.streamed = False
        self._cache = cache

    def is_soon_enough_for(self, job: Job) -> bool:
        """Whether it is as urgent, and will not be given up later than the other."""
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
