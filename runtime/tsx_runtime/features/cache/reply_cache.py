"""The reply cache of a version (docs/guides/caching.md).

It receives requests before the queue does, and repeats the answers to equal earlier requests.
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
from tsx_runtime.core.hidden_credentials import CREDENTIAL_HEADERS, USER_HEADERS
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Flow, Job, ObservedAnswer, ObservedJob
from tsx_runtime.core.scheduling.strategies import EntryPoint
from tsx_runtime.core.telemetry.batch_times import NO_TIMES, Batch
from tsx_runtime.core.telemetry.cold_starts import without_cold_start
from tsx_runtime.errors import ClientLeft, DeadlinePassed, TsxError
from tsx_runtime.wire import Buffer

# Bytes. Hashing a larger body would block the event loop for too long.
MAX_BODY_BYTES = 4 << 20
ENTRY_OVERHEAD_BYTES = 500  # memory of an entry in addition to its answer
# The headers that are part of every key, as far as the handler receives them. In the second line
# are headers that the server derives from the path.
KEY_HEADERS = (
    *(b"accept", b"content-encoding", b"content-type", wire.TENSORS_HEAD),
    *(b"describe", b"explain", b"url_path", b"x-tsx-protocol", wire.NODE_HEADER),
    *map(str.encode, (*CREDENTIAL_HEADERS, *USER_HEADERS)),
)
# Headers that exclude a request from the cache.
_UNCACHED_REQUEST = re.compile(
    rb"^(range:|cache-control:.*no-(cache|store))", re.IGNORECASE | re.MULTILINE
)
_VARY = re.compile(rb"^vary:(.*)$", re.IGNORECASE | re.MULTILINE)
# Headers that exclude an answer from the cache.
_UNCACHED_RESPONSE = re.compile(
    rb"^(set-cookie:|cache-control:.*(no-cache|no-store|private))", re.IGNORECASE | re.MULTILINE
)


class _Reply(NamedTuple):
    headers: bytes
    body: bytes
    stored_at: float  # time.monotonic()
    size: int


class ReplyCache:
    """The answers of a version by request; the least recently used ones are dropped first.

    A request that equals a running one waits for its answer.
    """

    def __init__(
        self,
        config: CacheConfig,
        version: ModelVersion,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.size = 0  # total bytes of the entries
        self.hits = 0
        self.misses = 0
        self.evictions = 0  # entries that were dropped to make room
        self._version = version
        self._clock = clock
        self._entry: EntryPoint
        self._key_headers = frozenset([*KEY_HEADERS, *map(str.encode, config.key)])
        self._replies: OrderedDict[bytes, _Reply] = OrderedDict()
        self._running_misses: dict[bytes, _Miss] = {}
        self._miss_by_job: dict[Job, _Miss] = {}  # keys: jobs of clients, including followers

    def __len__(self) -> int:
        return len(self._replies)

    def around(self, entry: EntryPoint) -> EntryPoint:
        """Return the version's entry point; `entry` gets requests that the cache cannot answer."""
        self._entry = entry
        return EntryPoint(self.submit, self.leave)

    def submit(self, job: Job) -> None:
        key = self._key(job)
        if key is None:
            self._entry.submit(job)
            return
        now = self._clock()
        reply = self._replies.get(key)
        if reply is not None and now - reply.stored_at < self.config.ttl:
            self._replies.move_to_end(key)
            self._answer(job, reply, now)
            return
        running = self._running_misses.get(key)
        if running is not None and running.can_answer(job):
            running.followers[job] = None
            self._miss_by_job[job] = running
            return
        self.misses += 1
        miss = _Miss(job, key, self)
        if running is None:
            self._running_misses[key] = miss
        self._miss_by_job[job] = miss
        self._entry.submit(miss)

    def leave(self, job: Job) -> None:
        """Note that a client has left.

        A request continues if others wait for its answer. A request that waits for another one's
        answer is refused at once.
        """
        job.gone = True
        miss = self._miss_by_job.get(job)
        if miss is None or miss.gone:
            self._entry.leave(miss or job)
        elif job in miss.followers:
            del miss.followers[job], self._miss_by_job[job]
            error = ClientLeft(
                "The client disconnected while its request waited for the answer of an equal one."
            )
            self._version.stats.add_refusal(job, error, self._clock())
            job.refuse(error)

    def clear(self) -> None:
        self._replies.clear()
        self.size = 0

    # The methods below are called by `_Miss`.

    def may_store(self, headers: bytes) -> bool:
        """Check that the key includes all headers by which an answer varies (RFC 9111, 4.1)."""
        vary_names = {
            name.strip().lower() for line in _VARY.findall(headers) for name in line.split(b",")
        }
        return vary_names - {b""} <= self._key_headers and not _UNCACHED_RESPONSE.search(headers)

    def store_answer(self, miss: _Miss, headers: bytes, body: bytes) -> None:
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

    def run_followers(self, miss: _Miss, *, has_ended: bool = True) -> None:
        """Run each request that waited for an answer, because the answer must not be shared."""
        for job in self.release(miss, has_ended=has_ended):
            self.misses += 1
            self._entry.submit(job)

    def refuse_followers(self, miss: _Miss, error: TsxError) -> None:
        """Refuse the requests that waited, unless the error concerns only this client."""
        for job in self.release(miss):
            if isinstance(error, DeadlinePassed | ClientLeft) and not job.gone:
                self.submit(job)
            else:
                self._version.stats.add_refusal(job, error, self._clock())
                job.refuse(error)

    def release(self, miss: _Miss, *, has_ended: bool = True) -> list[Job]:
        """Forget a miss, and return the jobs that waited for its answer."""
        if self._running_misses.get(miss.key) is miss:
            del self._running_misses[miss.key]
        followers, miss.followers = list(miss.followers), {}
        for job in (miss.job, *followers) if has_ended else followers:
            del self._miss_by_job[job]
        return followers

    def _answer(self, job: Job, reply: _Reply, now: float) -> None:
        self.hits += 1
        batch: Batch = (now, now, now, 1, NO_TIMES, struct.pack("d", job.arrived), None)
        job.answer(
            200,
            b"%bage: %d\r\nx-cache: hit\r\n" % (reply.headers, now - reply.stored_at),
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
    """A running request that the cache could not answer, and those that wait for its answer."""

    def __init__(self, job: Job, key: bytes, cache: ReplyCache) -> None:
        super().__init__(job, self._end, math.inf)
        self.key = key
        self.followers: dict[Job, None] = {}  # ordered by arrival
        self.is_streamed = False
        self._cache = cache

    def can_answer(self, job: Job) -> bool:
        """Tell whether it is at least as urgent as a job, and ends before the job's deadline."""
        deadline = self.job.deadline
        return job.priority <= self.priority and (
            job.deadline is None or (deadline is not None and deadline <= job.deadline)
        )

    @property
    def gone(self) -> bool:
        return self.job.gone and all(job.gone for job in self.followers)

    @gone.setter
    def gone(self, gone: bool) -> None:
        self.job.gone = gone

    def _end(self, answer: ObservedAnswer) -> None:
        if answer.error is not None:
            self._cache.refuse_followers(self, answer.error)
        elif (
            answer.status == 200 and not self.is_streamed and self._cache.may_store(answer.headers)
        ):
            assert answer.body is not None
            self._cache.store_answer(self, answer.headers, answer.body)
        else:
            self._cache.run_followers(self)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        if not self.is_streamed:
            self.is_streamed = True
            self._cache.run_followers(self, has_ended=False)
        super().piece(headers, body, flow)
