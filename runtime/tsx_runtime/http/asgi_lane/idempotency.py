"""Idempotent requests: a repeated `Idempotency-Key` gets the first response and runs no model.

A key belongs to its path, its token and all credentials that a handler sees. A response is stored
before it is sent, so that a repeated request never gets another one. Of a stream, only the last
part waits for this. A request continues after its client leaves, which may ask again later.
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

# Key of the `KeyedRequest` in a scope, until a job has stored the response.
KEYED_SCOPE_KEY = "tsx.keyed"
REPLAYED: Pair = (b"idempotent-replayed", b"true")
REQUEST_ID = b"x-request-id"
# `send_whole` sets these headers.
_TRANSPORT_HEADERS = frozenset({REQUEST_ID, b"content-length", b"connection"})
# The draft quotes a key; most clients send it without quotes.
_KEY = re.compile(rb'"([\x20\x21\x23-\x7e]{1,255})"|([\x21\x23-\x7e]{1,255})')
# Another try may succeed, so these are not stored; the statuses 5xx are not either.
_RETRYABLE_STATUSES = frozenset({404, 408, 409, 425, 429})
_UNKEYED_METHODS = frozenset({"OPTIONS", "HEAD"})  # They run nothing, or have no body to store.

App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


def has_key(scope: Scope) -> bool:
    return scope["method"] not in _UNKEYED_METHODS and any(
        name == IDEMPOTENCY_KEY for name, _ in scope["headers"]
    )


@dataclass(eq=False)
class Idempotency:
    """The handling of one listener's keyed requests, before they run a model."""

    runs: KeyedRuns | None  # None if nothing is stored
    limit: int  # bytes of a body
    job_limit: int  # bytes of an asynchronous request's body
    guard: Guard | None
    counts: ResponseCounts
    credentials: Collection[bytes]  # further headers that keep clients apart
    confined: bool = False  # See `answer_headers`.

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
            scope[KEYED_SCOPE_KEY] = keyed = keyed_request(scope, key, body, self.credentials)
            stored = await while_client_waits(self.runs.claim(keyed), receive)
            if stored is None:
                recorder = AnswerRecorder(send, keyed, self.runs)
                stored = await self.runs.run(keyed, recorder.record(app, scope, body, receive))
            if recorder is not None and (stored is None or recorder.has_begun):
                await recorder.send_last()
            elif stored is not None:
                await self._replay(stored, scope, send)
        except ClientGone:
            return
        except TsxError as error:
            if recorder is not None and recorder.has_begun:
                raise  # Only closing the connection tells the client.
            status, headers, text = errors.fault(error, scope["path"])
            self.counts.add(status)
            await send_whole(
                send, scope, status, headers, request_id, text, rest_of(error, receive)
            )

    async def _replay(self, stored: StoredAnswer, scope: Scope, send: Send) -> None:
        self.counts.add(stored.sound_status)
        pairs = answer_headers(
            stored.sound_status, stored_headers(stored.headers), confined=self.confined
        )
        request_id = dict(pairs).get(REQUEST_ID, b"")
        headers = (*(pair for pair in pairs if pair[0] not in _TRANSPORT_HEADERS), REPLAYED)
        await send_whole(send, scope, stored.sound_status, headers, request_id, stored.body)


class AnswerRecorder:
    """A `send` that holds a whole response, or the last part of a stream, until `send_last`."""

    def __init__(self, send: Send, keyed: KeyedRequest, runs: KeyedRuns) -> None:
        self.has_begun = False
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
        """Run `app` and return the response to store.

        None is returned for a stream that broke off, for an error that another try may avoid, and
        for a response that a job has stored.
        """
        await app(scope, self._repeat_request(body, receive), self)
        if (
            self._start is None
            or self._last is None
            or KEYED_SCOPE_KEY not in scope
            or ENDED in scope
        ):
            return None
        status, headers = self._start["status"], self._start["headers"]
        if status >= 500 or status in _RETRYABLE_STATUSES:
            return None
        if self._too_large.is_set():
            text = (
                f"The answer to this Idempotency-Key had more than {self._runs.max_size} bytes, and"
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
        if self._size <= self._runs.max_size:
            self._parts.append(part)
        else:
            self._parts.clear()
            self._too_large.set()
        if not message.get("more_body", False):
            self._last = message
            return
        await self._begin()
        await self._send(message)

    async def send_last(self) -> None:
        """Send the held part; a stream that broke off has none, so that its client can tell."""
        if self._last is not None:
            await self._begin()
            await self._send(self._last)

    def _repeat_request(self, body: bytes, receive: Receive) -> Receive:
        """Return a `receive` that gives the body again.

        It reports that the client has left only once the response is too large to store.
        """
        is_delivered = False

        async def receive_again() -> Message:
            nonlocal is_delivered
            if not is_delivered:
                is_delivered = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self._too_large.wait()
            return await receive()

        return receive_again

    async def _begin(self) -> None:
        if not self.has_begun:
            assert self._start is not None
            self.has_begun = True
            await self._send(self._start)


def read_key(headers: list[Pair]) -> str:
    """Return the key of a request.

    Raises:
        BadRequest: The header is not exactly one valid key.
    """
    values = [value.strip() for name, value in headers if name == IDEMPOTENCY_KEY]
    match = _KEY.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        shown = b", ".join(values)[:100].decode("latin-1")
        raise BadRequest(
            f"Idempotency-Key is {shown!r}: send it once, with 1 to 255 visible ASCII characters"
            " such as a UUID, in quotes or without."
        )
    return (match[1] or match[2]).decode()


def keyed_request(
    scope: Scope, key: str, body: bytes, credentials: Collection[bytes]
) -> KeyedRequest:
    """Return a request whose owner is its path and credentials, and the digest of its content."""
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
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()
