"""`Idempotency-Key`: a request that comes again under the same key gets the answer of the first
one, and runs no model.

The key belongs to its path, its token and all credentials that a handler sees. An answer is sent
once it is kept, so that no client has seen one that a repeated request would not get. The parts of
a stream go out as they come, all but the last. A client that leaves ends nothing: it comes back for
the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from tsx_runtime.api import errors
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access_log import ENDED
from tsx_runtime.api.headers import Pair, answer_headers, stored_headers
from tsx_runtime.api.messages import (
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    read_body,
    request_id_of,
    rest_of,
    send_whole,
    while_client_waits,
)
from tsx_runtime.api.request_options import IDEMPOTENCY_KEY, JOB_SIZE, parse_preference
from tsx_runtime.errors import BadRequest, Conflict, TsxError
from tsx_runtime.jobs.keyed_runs import IDEMPOTENCY, KeyedRequest, KeyedRuns
from tsx_runtime.jobs.store import AnswerKey, StoredAnswer
from tsx_runtime.metrics.response_counts import ResponseCounts

KEYED = "tsx.keyed"  # in a scope: its `KeyedRequest`, until a job has stored the answer
REPLAYED: Pair = (b"idempotent-replayed", b"true")
REQUEST_ID = b"x-request-id"
_OF_ONE = frozenset({REQUEST_ID, b"content-length", b"connection"})  # `send_whole` sets them
_KEY = re.compile(
    rb'"([\x20\x21\x23-\x7e]{1,255})"|([\x21\x23-\x7e]{1,255})'
)  # as the draft quotes it, or bare as most clients send it
_AGAIN = frozenset({404, 408, 409, 425, 429})  # another try may fare better: not kept, as no 5xx is
_METHODS = frozenset({"OPTIONS", "HEAD"})  # that run nothing, or show nothing to keep

App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


def has_key(scope: Scope) -> bool:
    return scope["method"] not in _METHODS and any(
        name == IDEMPOTENCY_KEY for name, _ in scope["headers"]
    )


@dataclass(eq=False)
class Idempotency:
    """The keyed requests of one listener, before they run a model.

    `limit`: bytes of a body; `job_limit`: of a request for later; `credentials`: further headers
    that keep clients apart.
    """

    runs: KeyedRuns | None  # None: nothing is stored
    limit: int
    job_limit: int
    guard: Guard | None
    counts: ResponseCounts
    credentials: Collection[bytes]
    confined: bool = False  # see `answer_headers`

    async def __call__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
        recorder = None
        try:
            if self.guard is not None:
                self.guard.check(scope["headers"])
            key = read_key(scope["headers"])
            if self.runs is None:
                raise BadRequest(
                    "This server stores no answers (jobs_store), so it takes no Idempotency-Key."
                    " Send the request without it."
                )
            if parse_preference(scope["headers"]) is None:
                body = await read_body(scope, receive, self.limit)
            else:
                body = await read_body(scope, receive, self.job_limit, setting=JOB_SIZE)
            scope[KEYED] = keyed = keyed_request(scope, key, body, self.credentials)
            kept = await while_client_waits(self.runs.claim(keyed), receive)
            if kept is None:
                recorder = AnswerRecorder(send, keyed, self.runs)
                kept = await self.runs.run(keyed, recorder.record(app, scope, body, receive))
            if recorder is not None and (kept is None or recorder.begun):
                await recorder.release()
            elif kept is not None:
                await self._replay(kept, scope, send)
        except ClientGone:
            return
        except TsxError as error:
            if recorder is not None and recorder.begun:
                raise  # only closing the connection tells the client
            status, headers, text = errors.fault(error, scope["path"])
            self.counts.add(status)
            await send_whole(
                send, scope, status, headers, request_id, text, rest_of(error, receive)
            )

    async def _replay(self, kept: StoredAnswer, scope: Scope, send: Send) -> None:
        self.counts.add(kept.sound_status)
        pairs = answer_headers(
            kept.sound_status, stored_headers(kept.headers), confined=self.confined
        )
        request_id = dict(pairs).get(REQUEST_ID, b"")
        headers = (*(pair for pair in pairs if pair[0] not in _OF_ONE), REPLAYED)
        await send_whole(send, scope, kept.sound_status, headers, request_id, kept.body)


class AnswerRecorder:
    """A `send` that holds a whole answer, or the last part of a stream, until `release`."""

    def __init__(self, send: Send, keyed: KeyedRequest, runs: KeyedRuns) -> None:
        self.begun = False
        self._send = send
        self._keyed = keyed
        self._runs = runs
        self._start: Message | None = None
        self._last: Message | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._too_large = asyncio.Event()

    async def record(
        self, app: App, scope: Scope, body: bytes, receive: Receive
    ) -> StoredAnswer | None:
        """What is to be kept: none of a stream that broke off, none that another try may better,
        none that is kept already.
        """
        await app(scope, self._replaying(body, receive), self)
        if self._start is None or self._last is None or KEYED not in scope or ENDED in scope:
            return None
        status, headers = self._start["status"], self._start["headers"]
        if status >= 500 or status in _AGAIN:
            return None
        if self._too_large.is_set():
            text = (
                f"The answer to this Idempotency-Key had more than {self._runs.largest} bytes, and"
                " such answers are not kept "
            )
            error = Conflict(
                f"{text}(max_kept_answer). Send the request under a new key to run it again."
            )
            return self._runs.answer(self._keyed, *errors.fault(error, scope["path"]))
        return self._runs.answer(self._keyed, status, headers, b"".join(self._parts))

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        part = message.get("body", b"")
        self._size += len(part)
        if self._size <= self._runs.largest:
            self._parts.append(part)
        else:
            self._parts.clear()
            self._too_large.set()
        if not message.get("more_body", False):
            self._last = message
            return
        await self._begin()
        await self._send(message)

    async def release(self) -> None:
        """Nothing where the client of a stream has to see that it broke off."""
        if self._last is not None:
            await self._begin()
            await self._send(self._last)

    def _replaying(self, body: bytes, receive: Receive) -> Receive:
        """The request as it came.

        That its client has left is told only once nothing can be kept for it any more.
        """
        given = False

        async def receive_again() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self._too_large.wait()
            return await receive()

        return receive_again

    async def _begin(self) -> None:
        if not self.begun:
            assert self._start is not None
            self.begun = True
            await self._send(self._start)


def read_key(headers: list[Pair]) -> str:
    values = [value.strip() for name, value in headers if name == IDEMPOTENCY_KEY]
    found = _KEY.fullmatch(values[0]) if len(values) == 1 else None
    if found is None:
        shown = b", ".join(values)[:100].decode("latin-1")
        raise BadRequest(
            f"Idempotency-Key is {shown!r}: send it once, with 1 to 255 visible ASCII characters"
            " such as a UUID, in quotes or without."
        )
    return (found[1] or found[2]).decode()


def keyed_request(
    scope: Scope, key: str, body: bytes, credentials: Collection[bytes]
) -> KeyedRequest:
    """Keep keys apart by path and credentials, and requests of one key by what they ask for."""
    headers = dict(scope["headers"])
    users = sorted(
        pair for pair in scope["headers"] if pair[0] in credentials and pair[0] != b"authorization"
    )
    tokens = [value for name, value in scope["headers"] if name == b"authorization"] or [b""]
    owner = _digest(scope["path"].encode(), *tokens, *chain.from_iterable(users))
    request = _digest(
        scope["method"].encode(),
        scope["query_string"],
        headers.get(b"content-type", b""),
        headers.get(b"prefer", b""),
        body,
    )
    return KeyedRequest(AnswerKey(IDEMPOTENCY, owner, key), request)


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(b"%d:" % len(part))
        total.update(part)
    return total.hexdigest()
