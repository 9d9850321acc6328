"""Jobs for job stores, and their responses."""

from __future__ import annotations

from typing import Any

from tsx_runtime.features.jobs.storage.store import NewJob, StoredAnswer, StoredRequest

REQUEST = StoredRequest("r-1", "POST", "/predictions/m", b"a=%20", b"x-own: \xe4\r\n", b"\x00body")
ANSWER = StoredAnswer(200, b"content-type: text/plain\r\n", b"an answer")
# A limit of the queue that no test reaches.
QUEUE_LIMIT = 1000


def a_new_job(id: str, model: str = "m", **fields: Any) -> NewJob:
    return NewJob(id, model, request=REQUEST, **{"version": ""} | fields)
