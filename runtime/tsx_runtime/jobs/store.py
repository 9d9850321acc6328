"""The records of stored requests and answers, and the protocol of a store.

    queued --claim--> running --finish--> done ------+
      ^  ^               |                  |        |  expire: `expires` has passed
      |  +----release----+ (or its lease    |        v
      |                  |    ran out)      |     expired --> removed
      +-------retry------|------------------+        ^
      +-------retry--- cancelled --------------------+

What a method of a store returns is on the disk. A server is an `owner`, a random name that it draws at its start. A job that it
claims is its own until the lease runs out, which it renews. A claim is known by the job's number of attempts: an answer is stored
only for the claim that is in force, so that a job is answered once, whoever else has worked on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, Protocol, TypeAlias

JobState: TypeAlias = Literal["queued", "running", "done", "cancelled", "expired"]
JobTarget: TypeAlias = tuple[str, str]  # a model, and the version that was requested (empty: none)
PRECOMPUTED = "precomputed"  # the kind of an answer that was computed in advance: its scope is the model
JOB = "job"  # the kind of an answer to a job: its key is the job's id


class StoredRequest(NamedTuple):
    """An HTTP request, without the credentials that its model does not get."""

    request_id: str
    method: str
    path: str  # percent-decoded
    query: bytes
    headers: bytes  # a header block, see `wire`; names as the client wrote them
    body: bytes


class NewJob(NamedTuple):
    """A request to accept."""

    id: str  # nobody can guess it
    model: str
    version: str  # as requested; empty for the default, or what the model's traffic picks
    request: StoredRequest
    priority: int = 0  # greater goes first
    deadline: float | None = None  # seconds since the epoch: a job that is not started by then is refused
    client: str = ""  # by which jobs are counted for quotas
    callback: str = ""  # URL


class JobRecord(NamedTuple):
    """A job without its request and its answer. Times are seconds since the epoch."""

    number: int  # in the order of arrival
    id: str
    state: JobState
    model: str
    version: str
    priority: int
    client: str
    request_id: str
    size: int  # bytes of the request's body
    attempts: int  # claims, of which all but the last ended without an answer
    status: int | None  # of the answer
    created: float
    started: float | None
    finished: float | None
    expires: float | None
    deadline: float | None
    callback: str


class AnswerKey(NamedTuple):
    """What an answer is stored under: an idempotency key of a model's, say, or the key of a precomputed answer."""

    kind: str
    scope: str
    key: str


class StoredAnswer(NamedTuple):
    """The answer to a request, or the note that a server is working on it: then it has no status."""

    status: int | None
    headers: bytes = b""  # a header block, see `wire`
    body: bytes = b""
    fingerprint: str = ""  # of the request: the same key with another one is a client's mistake
    expires: float = 0.0  # seconds since the epoch


class DueCallback(NamedTuple):
    """An answer that is to be sent to its job's callback."""

    id: str
    url: str
    attempts: int  # so far, with this one
    request_id: str
    answer: StoredAnswer


class JobStore(Protocol):
    """All methods raise `StoreFull` and `StoreUnavailable`, and none blocks the event loop."""

    shared: bool  # whether other servers may work on the same queue

    def exists(self) -> bool:
        """Whether it may have jobs, without opening it."""

    async def open(self) -> None:
        """Connect, and make what is not there. Any other method does it too."""

    async def close(self) -> None: ...

    # Jobs, for clients

    async def add(self, job: NewJob, most: int, most_of_client: int = 0, answer: tuple[AnswerKey, StoredAnswer] | None = None) -> None:
        """Accept a job; in the same commit store an `answer` under its key.

        Raises `JobsFull` where so many are queued or running, and `TooManyRequests` where so many are this client's (0: any number).
        """

    async def get(self, id: str) -> JobRecord | None: ...

    async def ahead(self, job: JobRecord) -> int:
        """How many queued jobs of its model go before it."""

    async def cancel(self, id: str, keep: float) -> JobRecord | None:
        """Cancel it where it is queued or running; returns it as it is now. A server that runs it learns it by `renew`."""

    async def retry(self, id: str) -> JobRecord | None:
        """Queue it again where it is done or cancelled, and forget its answer; returns it as it is now."""

    async def list_jobs(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        client: str | None = None,
        least_status: int | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[JobRecord]:
        """The newest first; `before`: the number of the last one of the page before."""

    async def counts(self) -> dict[tuple[str, JobState], int]:
        """Jobs by model and state."""

    async def oldest(self) -> dict[str, float]:
        """Seconds for which the oldest queued job of each model has waited."""

    # Jobs, for the servers that run them

    async def request(self, id: str) -> StoredRequest | None: ...

    async def waiting(self) -> set[JobTarget]:
        """What has queued jobs."""

    async def claim(self, wanted: Mapping[JobTarget, int], owner: str, seconds: float) -> list[JobRecord]:
        """At most so many jobs of each target, which from now on are `owner`'s for so many seconds."""

    async def renew(self, held: Collection[tuple[str, int]], owner: str, seconds: float) -> set[str]:
        """Keep jobs, given as (id, attempts), for so many seconds from now on. Returns the ids of those that are the owner's no more."""

    async def release(self, held: Collection[tuple[str, int]], owner: str) -> None:
        """Queue jobs again that were claimed and are not answered."""

    async def finish(self, id: str, attempts: int, owner: str, answer: StoredAnswer, keep: float) -> bool:
        """Store the answer for so many seconds; False where the job is the owner's no more (cancelled, or claimed by another server)."""

    async def reclaim(self) -> None:
        """Queue the jobs again whose lease has run out."""

    async def expire(self) -> None:
        """Remove what has passed its `expires`: first requests and answers, a day later the record of the job."""

    # Answers by key

    async def get_answer(self, key: AnswerKey) -> StoredAnswer | None:
        """None where there is none, or it has expired."""

    async def begin_answer(self, key: AnswerKey, fingerprint: str, owner: str, seconds: float) -> StoredAnswer | None:
        """None: there is no answer and nobody works on it, and from now on the caller does, for so many seconds. Else what there is."""

    async def renew_answer(self, key: AnswerKey, owner: str, seconds: float) -> None:
        """Work on it for so many seconds from now on."""

    async def end_answer(self, key: AnswerKey, owner: str, answer: StoredAnswer | None) -> bool:
        """Store what came of the owner's work, or that nothing did; False where it is the owner's no more."""

    async def put_answer(self, key: AnswerKey, answer: StoredAnswer) -> None:
        """Store it, in place of what is there under this key."""

    async def drop_answer(self, key: AnswerKey) -> bool:
        """Forget it, or that somebody works on it. Returns whether there was any."""

    # Callbacks

    async def claim_callbacks(self, most: int, seconds: float) -> list[DueCallback]:
        """Callbacks whose time has come; no other server gets them for so many seconds."""

    async def next_callback(self) -> float | None:
        """Seconds until the next is due; None where there is none."""

    async def end_callback(self, id: str, retry_in: float | None, error: str) -> None:
        """It was received or given up (None), or is to be sent again."""
