"""The records of stored requests and answers, which `SqlStore` keeps.

    queued --claim--> running --finish--> done ------+
      ^  ^               |                  |        |  expire: `expires` has passed
      |  +----release----+ (or its lease    |        v
      |                  |    ran out)      |     expired --> removed
      +-------retry------|------------------+        ^
      +-------retry--- cancelled --------------------+

What a method of the store returns is on the disk. A server is an `owner`, a random name that it
draws at its start. A job that it claims is its own until the lease runs out, which it renews. A
claim is known by the job's number of attempts: an answer is stored only for the claim that is in
force, so that a job is answered once, whoever else has worked on it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

JobState: TypeAlias = Literal["queued", "running", "done", "cancelled", "expired"]
JobTarget: TypeAlias = tuple[str, str]  # a model, and the version that was requested (empty: none)
Claim: TypeAlias = tuple[str, int]  # a job's id and its number of attempts
# The kind of an answer that was computed in advance: its scope is the model.
PRECOMPUTED = "precomputed"
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
    # Seconds since the epoch: a job that is not started by then is refused.
    deadline: float | None = None
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
    """What an answer is stored under: an idempotency key of a model's, say, or the key of a
    precomputed answer.
    """

    kind: str
    scope: str
    key: str


class StoredAnswer(NamedTuple):
    """The answer to a request, or the note that a server is working on it: then it has no
    status.
    """

    status: int | None
    headers: bytes = b""  # a header block, see `wire`
    body: bytes = b""
    fingerprint: str = ""  # of the request: the same key with another one is a client's mistake
    expires: float = 0.0  # seconds since the epoch

    @property
    def sound_status(self) -> int:
        """The status, or 500 for one that no answer of a model has."""
        return self.status if self.status is not None and 200 <= self.status <= 599 else 500


class DueCallback(NamedTuple):
    """An answer that is to be sent to its job's callback."""

    id: str
    url: str
    attempts: int  # so far, with this one
    request_id: str
    answer: StoredAnswer
