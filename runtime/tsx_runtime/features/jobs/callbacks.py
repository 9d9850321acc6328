"""The sender of signed answers to callback URLs; it repeats an answer until it gets a receipt.

    POST URL
    content-type: the answer's content type
    x-tsx-job: ID
    x-tsx-status: the answer's status
    x-request-id: the request's id
    x-tsx-signature: t=SECONDS,v1=HEX

The signature is the HMAC-SHA256 of "SECONDS.ID.STATUS." and the body, under `job_callback_secret`;
another `v1` follows for `job_callback_old_secret`. A receiver compares signatures in constant
time. It also compares SECONDS (since the epoch) with its clock, so that nobody can replay the
callback later. Any status from 200 to 299 is a receipt. Because a receipt can be lost, a receiver
may get an answer more than once, with the same ID.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.errors import (
    BadRequest,
    DownloadFailed,
    ModelNotFound,
    StoreFull,
    TsxError,
    Unavailable,
)
from tsx_runtime.features.jobs.job_stats import JobStats
from tsx_runtime.features.jobs.receivers import Receivers, receiver_of
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.store import DueCallback, JobRecord
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.sources.urls import AllowList, parse_url
from tsx_runtime.wire import parse_header_block

MAX_CALLS = 8  # callbacks that are sent at the same time
LEASE_S = 300.0  # seconds until another server takes over the callback of a server that died
MAX_ATTEMPTS = 14
MAX_PAUSE_S = 3600.0  # All attempts take about three hours.
POLL_S = 30.0  # between searches for callbacks of servers that died while sending

logger = logging.getLogger("tsx.jobs")


class CallbackSender:
    """Sends due callbacks in a few threads."""

    def __init__(
        self,
        store: SqlStore,
        hosts: AllowList,
        secrets: list[str],
        draw: Callable[[], float] = random.random,
        stats: JobStats | None = None,
    ) -> None:
        self._store = store
        self._hosts = hosts
        self._secrets = [secret.encode() for secret in secrets]
        self._receivers = Receivers()
        self._stats = stats or JobStats()
        self._draw = draw
        self._threads = DaemonThreads(MAX_CALLS, "callbacks")
        self._sending: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    def check(self, url: str) -> str:
        """Return the URL with scheme, host and port in normal form.

        Raises:
            BadRequest: No callback may be sent to the URL.
        """
        if not self._hosts.entries:
            raise BadRequest(
                "This server sends no callbacks: job_callback_hosts is empty. Poll the job, or have"
                " its administrator set it."
            )
        try:
            address = parse_url(url)
            host = f"[{address.host}]" if ":" in address.host else address.host
            netloc = host if address.port is None else f"{host}:{address.port}"
            address = parse_url(
                urlsplit(address.text)._replace(netloc=netloc, path=address.path or "/").geturl()
            )
        except ModelNotFound as error:
            raise BadRequest(
                f"The callback cannot be sent to {redacted(url)}: {error.message}"
            ) from error
        if address.scheme not in ("http", "https") or not self._hosts.allows(address):
            entries = (
                "hosts, each with its port where that is neither 80 nor 443, or regular expressions"
                " for whole URLs"
            )
            raise BadRequest(
                f"The callback cannot be sent to {redacted(url)}: job_callback_hosts does not allow"
                f" it. It has {entries}."
            )
        return address.text

    def notify_answer(self, job: JobRecord) -> None:
        """Note that the answer of a job is stored."""
        if job.callback:
            self._wake.set()

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            for task in self._sending:
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            pause = POLL_S
            # `Runner.tend` logs the problems of the store.
            with suppress(StoreFull, Unavailable):
                while len(self._sending) < MAX_CALLS and (
                    callbacks := await self._store.claim_callbacks(
                        1, LEASE_S, self._receivers.pauses()
                    )
                ):
                    self._receivers.begin(receiver_of(callbacks[0].url))
                    self._sending.add(task := asyncio.create_task(self._send(callbacks[0])))
                    task.add_done_callback(self._forget)
                if len(self._sending) < MAX_CALLS:
                    pauses = self._receivers.pauses()
                    seconds = await self._store.next_callback(pauses)
                    pause = max(
                        0.0, min(POLL_S if seconds is None else seconds, POLL_S, *pauses.values())
                    )
            await wait_for_event(self._wake, pause)

    async def _send(self, callback: DueCallback) -> None:
        status = 0
        try:
            status = await self._threads.call(lambda: self._post(callback))
            failure = "" if 200 <= status < 300 else f"it answered {status}"
        except TsxError as error:
            failure = error.message
        except Exception as error:  # Any exception must count as a failed attempt.
            logger.exception("job %s: its callback failed unexpectedly", callback.id)
            failure = f"{type(error).__name__}: {error}"
        self._receivers.end(receiver_of(callback.url), failed=not 0 < status < 500)
        retry_in = (
            None
            if not failure or callback.attempts >= MAX_ATTEMPTS
            else backoff(callback.attempts, self._draw())
        )
        self._stats.callbacks[
            "delivered" if not failure else "given_up" if retry_in is None else "retried"
        ] += 1
        if failure:
            outcome = (
                "it is given up" if retry_in is None else f"the next try is in {retry_in:.0f} s"
            )
            logger.warning(
                "job %s: its callback to %s failed: %s; %s",
                callback.id,
                redacted(callback.url),
                failure,
                outcome,
            )
        with suppress(StoreFull, Unavailable):  # The callback is sent again after its lease.
            await self._store.end_callback(callback.id, retry_in, failure)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._wake.set()

    def _post(self, callback: DueCallback) -> int:
        """Return the status of the receiver's response, in a thread.

        Raises:
            TsxError: There is no response.
        """
        # urllib3 opens a socket when it is imported.
        from tsx_runtime.sources.http_download import post

        try:
            url = parse_url(callback.url)
            if not self._hosts.allows(url):  # The setting may have changed.
                raise DownloadFailed("job_callback_hosts does not allow it any more")
            return post(
                url,
                callback.answer.body,
                self._headers(callback),
                may_be_private=self._hosts.names_host(url),
            )
        except ModelNotFound as error:
            hint = "name the host in job_callback_hosts, not by a pattern, to allow that"
            raise DownloadFailed(f"its host has an address that is not public; {hint}") from error

    def _headers(self, callback: DueCallback) -> dict[str, str]:
        now, answer = int(time.time()), callback.answer
        signatures = (
            f"v1={signature(secret, now, callback.id, answer.status, answer.body)}"
            for secret in self._secrets
        )
        headers = dict(parse_header_block(answer.headers.decode("latin-1")))
        return {
            "content-type": headers.get("content-type", "application/octet-stream"),
            "user-agent": "tsx",
            "x-tsx-job": callback.id,
            "x-tsx-status": str(answer.status),
            "x-request-id": callback.request_id,
            "x-tsx-signature": ",".join((f"t={now}", *signatures)),
        }


def signature(secret: bytes, now: int, id: str, status: int | None, body: bytes) -> str:
    digest = hmac.new(secret, f"{now}.{id}.{status}.".encode(), hashlib.sha256)
    digest.update(body)
    return digest.hexdigest()


def backoff(attempts: int, random_fraction: float) -> float:
    """Return the seconds until the next attempt.

    They double each time. They vary randomly by half, so that retries do not come together.
    `random_fraction` is between 0 and 1.
    """
    return float(min(2.0**attempts, MAX_PAUSE_S)) * (0.5 + random_fraction)
