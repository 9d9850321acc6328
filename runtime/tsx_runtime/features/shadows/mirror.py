"""The shadow of a model, which copies a fraction of its requests to another version.

A copy is made after the client has its response, so it does not delay the client. Under load,
requests are not copied, and `ShadowReport.shed` counts the reasons.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, NamedTuple

from tsx_runtime import wire
from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Flow, Job, ObservedAnswer, ObservedJob
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import Unavailable
from tsx_runtime.features.shadows.report import DEFAULT_EXAMPLES, ShadowReport
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.settings.traffic_policy import Shadow
from tsx_runtime.wire import Buffer

MAX_COPIES = 32  # copies that are not compared yet
MAX_BODY_BYTES = 64 << 20  # total size of the bodies of these copies
MAX_ANSWER_BYTES = 1 << 20  # larger responses are not compared
MAX_WAIT_S = 10.0  # longest wait of a copy for a worker
LOWEST_PRIORITY = -1_000_000  # lower than clients can request
SHADOW_HEADER = b"x-tsx-shadow: 1\r\n"  # A handler can leave out side effects.

Reason = Literal[
    "not-ready",
    "same-version",
    "under-way",
    "size",
    "unanswered",
    "primary-busy",
    "shadow-busy",
    "refused",
]


class Mirror:
    """The observer of one model: it copies requests, and keeps the report.

    `compare` compares two responses and counts the result in `Copy.report`.
    """

    def __init__(
        self,
        name: str,
        number: str,
        config: Shadow,
        compare: Callable[[ResponsePair], Coroutine[Any, Any, None]],
    ) -> None:
        self.name = name
        self.number = number  # number of the version that gets copies
        self.target: ModelVersion | None = None  # this version, while it is registered
        self.config = config
        self.problem: str | None = None  # why this shadow never copies
        self.is_observed = False
        self.report = ShadowReport(_max_examples(config))
        self.copies_in_flight: set[Copy] = set()
        self._size = 0  # bytes of the bodies in `copies_in_flight`
        self._last_target: ModelVersion | None = None  # the last target that was not None
        self._compare = compare
        # When a shadow ends, its running comparisons still finish, and count in its report.
        self._comparisons = TaskGroup()

    def change(self, config: Shadow) -> None:
        """Change the percentage of requests or the number of examples; the comparison stays."""
        self.config = config
        self.report.limit_examples(_max_examples(config))

    def set_target(self, target: ModelVersion | None) -> None:
        """Send copies to a version, or to none for now.

        The counters are reset if another version with the same number replaces the target.
        """
        if target is not None and self._last_target not in (None, target):
            self.reset()
        self.target, self._last_target = target, target or self._last_target
        self.withdraw(kept_target=target)

    def reset(self) -> None:
        """Reset the counters; copies in flight are not counted."""
        self.report = ShadowReport(_max_examples(self.config))

    def withdraw(self, kept_target: ModelVersion | None = None) -> None:
        """Withdraw copies from all versions except one, so that the others can end."""
        for copy in list(self.copies_in_flight):
            if copy.target is not kept_target and not copy.gone:
                copy.target.leave(copy)

    # The methods below are called by the splitter.

    def should_observe(self, draw: float) -> bool:
        return draw * 100 < self.config.share

    def wrap_job(self, job: Job, version: ModelVersion) -> Job:
        target = self.target
        reason = self._reason(target, version, len(job.body))
        if reason is not None:
            self.report.shed[reason] += 1
            return job
        return ObservedJob(job, partial(self._on_answer, job, version), MAX_ANSWER_BYTES)

    def _reason(
        self, target: ModelVersion | None, version: ModelVersion, size: int
    ) -> Reason | None:
        """Return why a request to this version is not copied now, or None."""
        if target is version:
            return "same-version"
        if target is None or not target.ready:
            return "not-ready"
        if len(self.copies_in_flight) >= MAX_COPIES or (
            self.copies_in_flight and self._size + size > MAX_BODY_BYTES
        ):
            return "under-way"
        return None

    def _on_answer(self, job: Job, version: ModelVersion, observed: ObservedAnswer) -> None:
        """Copy a request whose client has its response.

        The copy is made in the next event-loop iteration, after the whole batch is answered.
        """
        answer = _compared_answer(observed)
        if observed.error is not None or job.gone:
            self.report.shed["unanswered"] += 1
        elif answer is None:
            self.report.shed["size"] += 1
        else:
            asyncio.get_running_loop().call_soon(
                self._copy, job, version, answer, time.monotonic() - job.arrived
            )

    def _copy(
        self, job: Job, version: ModelVersion, answer: ComparedAnswer, seconds: float
    ) -> None:
        if not self.is_observed:  # The shadow may have ended meanwhile.
            return
        target = self.target
        reason = self._reason(target, version, len(job.body)) or self._busy(target, version)
        if reason is not None or target is None:
            self.report.shed[reason or "not-ready"] += 1
            return
        copy = Copy(self, target, job, version.version, answer, seconds)
        self.copies_in_flight.add(copy)
        self._size += len(copy.body)
        self.report.copied += 1
        target.submit(copy)

    def _busy(self, target: ModelVersion | None, version: ModelVersion) -> Reason | None:
        ready = sum(worker.state is WorkerState.READY for worker in version.workers)
        # While requests wait for workers, copying others would delay them.
        if version.pending > version.batch_size * ready:
            return "primary-busy"
        return "shadow-busy" if target is not None and target.pending >= target.batch_size else None

    def on_returned(self, copy: Copy, answer: ComparedAnswer | None) -> None:
        """Start to compare the response to a copy; None means that there is no response."""
        if answer is None or copy.gone:
            self._finish(copy)
            return
        pair = ResponsePair(self, copy, answer, time.monotonic() - copy.arrived)
        self._comparisons.begin(self._compare(pair)).add_done_callback(
            lambda task: self._finish(copy)
        )

    def _finish(self, copy: Copy) -> None:
        if copy in self.copies_in_flight:
            self.copies_in_flight.discard(copy)
            self._size -= len(copy.body)


class Copy(ObservedJob):
    """A copy of a job for the shadow, with an id of its own."""

    patience = MAX_WAIT_S

    def __init__(
        self,
        mirror: Mirror,
        target: ModelVersion,
        job: Job,
        version: str,
        answer: ComparedAnswer,
        seconds: float,
    ) -> None:
        """Copy a job whose client got `answer` from `version` after `seconds`."""
        meta = str(uuid.uuid4()).encode() + job.meta[job.meta.index(b"\r\n") :] + SHADOW_HEADER
        now = time.monotonic()
        deadline = now + MAX_WAIT_S + target.plan.response_timeout
        super().__init__(
            Job(meta, job.body, now, deadline, LOWEST_PRIORITY), self._return, MAX_ANSWER_BYTES
        )
        self.report = mirror.report  # The report may be reset for later copies.
        self.target = target
        self.original = job
        self.version = version
        self.primary_answer = answer
        self.seconds = seconds
        self._mirror = mirror

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        super().piece(headers, body, flow)
        if self._remaining_bytes < 0:
            self.gone = True  # No more parts are read.

    def _return(self, observed: ObservedAnswer) -> None:
        answer = _compared_answer(observed)
        if isinstance(observed.error, Unavailable):
            self.report.shed["refused"] += 1
        elif observed.error is not None:
            answer = ComparedAnswer(
                observed.status, {}, observed.error.message.encode()[:MAX_ANSWER_BYTES]
            )
        elif answer is None:
            self.report.uncompared += 1
            self.report.last_problem = (
                f"an answer of the shadow has more than {MAX_ANSWER_BYTES} bytes"
            )
        self._mirror.on_returned(self, answer)


class ResponsePair(NamedTuple):
    """The responses to one request: of `copy.version`, and of the shadow after `seconds`."""

    mirror: Mirror
    copy: Copy
    shadow_answer: ComparedAnswer
    seconds: float


def _compared_answer(observed: ObservedAnswer) -> ComparedAnswer | None:
    if observed.body is None:
        return None
    lines = wire.parse_header_block(str(observed.headers, "latin-1"))
    return ComparedAnswer(
        observed.status, {name.lower(): value for name, value in lines}, observed.body
    )


def _max_examples(config: Shadow) -> int:
    return DEFAULT_EXAMPLES if config.examples is None else config.examples
