"""The records of stored requests and answers, which `SqlStore` keeps.

    queued --claim--> running --finish--> done ------+
      ^  ^               |                  |        |  expire: `expires` has passed
      |  +----release----+ (or its lease    |        v
      |                  |    ran out)      |     expired --> removed
      +-------retry------|------------------+        ^
      +-------retry--- cancelled --------------------+

A method of the store returns when its change is on the disk. A server is an `owner`, identified by
a random name that it draws at its start. It owns a claimed job until the lease runs out, and renews
the lease. The job's number of attempts identifies the claim. An answer is stored only for the
current claim, so that a job is answered once even if several servers have worked on it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

JobState: TypeAlias = Literal["queued", "running", "done", "cancelled", "expired"]
JobTarget: TypeAlias = tuple[str, str]  # a model and its requested version (empty: none)
Claim: TypeAlias = tuple[str, int]  # a job's id and its number of attempts
# The kind of an answer that was computed in advance; its scope is the model.
PRECOMPUTED = "precomputed"
JOB = "job"  # the kind of an answer to a job; its key is the job's id


class StoredRequest(NamedTuple):
    """An HTTP request, without the credentials that are meant for the server only."""

    request_id: str
    method: str
    path: str  # percent-decoded
    query: bytes
    headers: bytes  # a header block, see `wire`; names keep their case
    body: bytes


class NewJob(NamedTuple):
    """A request to accept."""

    id: str  # a random text that nobody can guess
    model: str
    version: str  # empty: the default version, or one chosen by the model's traffic policy
    request: StoredRequest
    priority: int = 0  # Jobs of higher priority run first.
    # Seconds since the epoch; a job that has not started by then is refused.
    deadline: float | None = None
    client: str = ""  # the client whose quota the job counts against
    callback: str = ""  # the URL that gets the answer


class JobRecord(NamedTuple):
    """A job without its request and its answer. Times are seconds since the epoch."""

    number: int  # increases in the order of arrival
    id: str
    state: JobState
    model: str
    version: str
    priority: int
    client: str
    request_id: str
    size: int  # bytes of the request's body
    attempts: int  # number of claims; all but the last ended without an answer
    status: int | None  # the status of the answer
    created: float
    started: float | None
    finished: float | None
    expires: float | None
    deadline: float | None
    callback: str


class AnswerKey(NamedTuple):
    """The key of a stored answer, for example an idempotency key."""

    kind: str
    scope: str
    key: str


class StoredAnswer(NamedTuple):
    """The answer to a request; without a status, a server is working on it."""

    status: int | None
    headers: bytes = b""  # a header block, see `wire`
    body: bytes = b""
    fingerprint: str = ""  # identifies the request that the key belongs to
    expires: float = 0.0  # seconds since the epoch

    @property
    def sound_status(self) -> int:
        """The status, or 500 if it is not valid for a model's answer."""
        return self.status if self.status is not None and 200 <= self.status <= 599 else 500


class DueCallback(NamedTuple):
    """An answer to be sent to its job's callback."""

    id: str
    url: str
    attempts: int  # includes the present one
    request_id: str
    answer: StoredAnswer
