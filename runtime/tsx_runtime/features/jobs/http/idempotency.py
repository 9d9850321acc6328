"""Idempotent requests: a repeated `Idempotency-Key` gets the first response and runs no model.

The same key may be used for another path, token, or other credentials that handlers see. A response
is stored before it is sent, so that a repeated request never gets a different one. The parts of a
stream are sent at once, except for the last one. If the client leaves, its request continues,
because the client may repeat it later.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from tsx_runtime.api import errors
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access_log import BREAK_REASON
from tsx_runtime.api.headers import Pair, answer_headers, stored_headers
from tsx_runtime.api.messages import (
    App,
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    read_body,
    request_id_of,
    send_whole,
    unread_body_of,
    while_client_waits,
    with_body,
)
from tsx_runtime.api.request_options import IDEMPOTENCY_KEY
from tsx_runtime.errors import BadRequest, Conflict, TsxError
from tsx_runtime.features.jobs.http.preference import JOB_SIZE, parse_preference
from tsx_runtime.features.jobs.keyed_runs import IDEMPOTENCY, KeyedRequest, KeyedRuns
from tsx_runtime.features.jobs.storage.store import AnswerKey, StoredAnswer
from tsx_runtime.metrics.response_counts import ResponseCounts

# Key of a scope: its `KeyedRequest`, which is removed once a job has stored the response.
KEYED_SCOPE_KEY = "tsx.keyed"
REPLAYED_HEADER: Pair = (b"idempotent-replayed", b"true")
REQUEST_ID = b"x-request-id"
# `send_whole` sets these headers.
_TRANSPORT_HEADERS = frozenset({REQUEST_ID, b"content-length", b"connection"})
# The IETF draft requires quotes, but most clients send the key without them.
_KEY = re.compile(rb'"([\x20\x21\x23-\x7e]{1,255})"|([\x21\x23-\x7e]{1,255})')
# Responses with these statuses, or with 5xx, are not stored, because another try may succeed.
_RETRYABLE_STATUSES = frozenset({404, 408, 409, 425, 429})
_UNKEYED_METHODS = frozenset(
    {"OPTIONS", "HEAD"}
)  # OPTIONS runs no model, and a response to HEAD has no body to store.


def has_key(scope: Scope) -> bool:
    return scope["method"] not in _UNKEYED_METHODS and any(
        name == IDEMPOTENCY_KEY for name, _ in scope["headers"]
    )


@dataclass(eq=False)
class Idempotency:
    """The app that a listener's requests with a key pass before the app that runs them."""

    runs: KeyedRuns | None  # None if nothing is stored
    limit: int  # largest body in bytes
    job_limit: int  # largest body of an asynchronous request in bytes
    guard: Guard | None
    counts: ResponseCounts
    credentials: Collection[bytes]  # further headers that identify clients
    is_confined: bool = False  # See `answer_headers`.

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
            scope[KEYED_SCOPE_KEY] = keyed_request = build_keyed_request(
                scope, key, body, self.credentials
            )
            stored_answer = await while_client_waits(self.runs.claim(keyed_request), receive)
            if stored_answer is None:
                recorder = AnswerRecorder(send, keyed_request, self.runs)
                stored_answer = await self.runs.run(
                    keyed_request, recorder.record(app, scope, body, receive)
                )
            if recorder is not None and (stored_answer is None or recorder.has_begun):
                await recorder.send_last()
            elif stored_answer is not None:
                await self._replay(stored_answer, scope, send)
        except ClientGone:
            return
        except TsxError as error:
            if recorder is not None and recorder.has_begun:
                # The client has a part of the response, so only closing the connection helps.
                raise
            status, headers, text = errors.error_response(error, scope["path"])
            self.counts.add(status)
            await send_whole(
                send, scope, status, headers, request_id, text, unread_body_of(error, receive)
            )

    async def _replay(self, stored_answer: StoredAnswer, scope: Scope, send: Send) -> None:
        self.counts.add(stored_answer.sound_status)
        pairs = answer_headers(
            stored_answer.sound_status,
            stored_headers(stored_answer.headers),
            is_confined=self.is_confined,
        )
        request_id = dict(pairs).get(REQUEST_ID, b"")
        headers = (*(pair for pair in pairs if pair[0] not in _TRANSPORT_HEADERS), REPLAYED_HEADER)
        await send_whole(
            send, scope, stored_answer.sound_status, headers, request_id, stored_answer.body
        )


class AnswerRecorder:
    """A `send` that holds back a whole response, or a stream's last part, until `send_last`."""

    def __init__(self, send: Send, keyed_request: KeyedRequest, runs: KeyedRuns) -> None:
        self.has_begun = False
        self._send = send
        self._keyed_request = keyed_request
        self._runs = runs
        self._start_message: Message | None = None
        self._last_message: Message | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._too_large = asyncio.Event()

    async def record(
        self, app: App, scope: Scope, body: bytes, receive: Receive
    ) -> StoredAnswer | None:
        """Run `app` and return the response to store.

        The result is None for a stream that broke off, for an error that may not occur again, and
        for a response that a job has stored.
        """
        await app(scope, self._receive_again(body, receive), self)
        if (
            self._start_message is None
            or self._last_message is None
            or KEYED_SCOPE_KEY not in scope
            or BREAK_REASON in scope
        ):
            return None
        status, headers = self._start_message["status"], self._start_message["headers"]
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
            return self._runs.answer(
                self._keyed_request, *errors.error_response(error, scope["path"])
            )
        return self._runs.answer(self._keyed_request, status, headers, b"".join(self._parts))

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start_message = message
            return
        part = message.get("body", b"")
        self._size += len(part)
        if self._size <= self._runs.max_size:
            self._parts.append(part)
        else:
            self._parts.clear()
            self._too_large.set()
        if not message.get("more_body", False):
            self._last_message = message
            return
        await self._send_start()
        await self._send(message)

    async def send_last(self) -> None:
        """Send the part that was held back; for a stream that broke off, send nothing."""
        if self._last_message is not None:
            await self._send_start()
            await self._send(self._last_message)

    def _receive_again(self, body: bytes, receive: Receive) -> Receive:
        """Return a `receive` that returns the body again.

        While the response may still be stored, the client's disconnect is not reported.
        """

        async def receive_later() -> Message:
            await self._too_large.wait()
            return await receive()

        return with_body(body, receive_later)

    async def _send_start(self) -> None:
        if not self.has_begun:
            assert self._start_message is not None
            self.has_begun = True
            await self._send(self._start_message)


def read_key(headers: list[Pair]) -> str:
    """Return the key of a request.

    Raises:
        BadRequest: The header is not exactly one valid key.
    """
    values = [value.strip() for name, value in headers if name == IDEMPOTENCY_KEY]
    match = _KEY.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        header_text = b", ".join(values)[:100].decode("latin-1")
        raise BadRequest(
            f"Idempotency-Key is {header_text!r}: send it once, with 1 to 255 visible ASCII"
            " characters such as a UUID, in quotes or without."
        )
    return (match[1] or match[2]).decode()


def build_keyed_request(
    scope: Scope, key: str, body: bytes, credentials: Collection[bytes]
) -> KeyedRequest:
    """Return the key with its owner (path and credentials), and a digest of the request."""
    headers = dict(scope["headers"])
    credential_headers = sorted(
        pair for pair in scope["headers"] if pair[0] in credentials and pair[0] != b"authorization"
    )
    tokens = [value for name, value in scope["headers"] if name == b"authorization"] or [b""]
    owner = _digest(scope["path"].encode(), *tokens, *chain.from_iterable(credential_headers))
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
