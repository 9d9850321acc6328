"""The shadow of a model: copies a share of its requests to another version, and compares both
answers.

A copy is made once the client has its answer, so that nothing of this is in the client's way, and
it is the first to be given up: where there is more to do than can be done, requests are not copied,
and `ShadowReport.shed` counts why.
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
from tsx_runtime.core.shadowing.report import EXAMPLES, ShadowReport
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import Unavailable
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.settings.traffic_policy import Shadow
from tsx_runtime.wire import Buffer

MOST_COPIES = 32  # under way at a time, until they are compared
MOST_BYTES = 64 << 20  # of their requests' bodies
LONGEST = 1 << 20  # bytes of an answer that is compared
PATIENCE = 10.0  # seconds that a copy may wait for a worker
LAST = -1_000_000  # a priority below all that clients can name
TOLD = b"x-tsx-shadow: 1\r\n"  # so that a handler with effects elsewhere can leave them out

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
    """The observer of one model, and what it has seen.

    `judge` compares two answers, and counts what comes of it in `Copy.report`.
    """

    def __init__(
        self,
        name: str,
        number: str,
        said: Shadow,
        judge: Callable[[ResponsePair], Coroutine[Any, Any, None]],
    ) -> None:
        self.name = name
        self.number = number  # of the version that gets copies
        self.target: ModelVersion | None = None  # which is that, while it is registered
        self.said = said
        self.problem: str | None = None  # why it does nothing, where it never will
        self.observed = False
        self.report = ShadowReport(_examples(said))
        self.under_way: set[Copy] = set()
        self._size = 0  # bytes of the bodies of those
        self._before: ModelVersion | None = None  # the last that was a target
        self._judge = judge
        self._comparisons = (
            TaskGroup()
        )  # those of a shadow that has ended still end, and count in its report

    def change(self, said: Shadow) -> None:
        """Another share, with the same to compare."""
        self.said = said
        self.report.keep_examples(_examples(said))

    def aim(self, target: ModelVersion | None) -> None:
        """Send copies there; None: nowhere, for now. Another version of the same number starts with
        fresh counters.
        """
        if target is not None and self._before not in (None, target):
            self.reset()
        self.target, self._before = target, target or self._before
        self.let_go(but=target)

    def reset(self) -> None:
        """Reset the counters; copies in flight are not counted."""
        self.report = ShadowReport(_examples(self.said))

    def let_go(self, but: ModelVersion | None = None) -> None:
        """Give up copies that were sent to other versions than `but`, so that those need not answer
        them before they end.
        """
        for copy in list(self.under_way):
            if copy.target is not but and not copy.gone:
                copy.target.leave(copy)

    # What the split calls

    def wants(self, draw: float) -> bool:
        return draw * 100 < self.said.share

    def watch(self, job: Job, version: ModelVersion) -> Job:
        target = self.target
        reason = self._reason(target, version, len(job.body))
        if reason is not None:
            self.report.shed[reason] += 1
            return job
        return ObservedJob(job, partial(self._answered, job, version), LONGEST)

    def _reason(
        self, target: ModelVersion | None, version: ModelVersion, size: int
    ) -> Reason | None:
        """Why a request that this version answers is not copied now."""
        if target is version:
            return "same-version"
        if target is None or not target.ready:
            return "not-ready"
        if len(self.under_way) >= MOST_COPIES or (
            self.under_way and self._size + size > MOST_BYTES
        ):
            return "under-way"
        return None

    def _answered(self, job: Job, version: ModelVersion, seen: ObservedAnswer) -> None:
        """The client has its answer (a body of None: it is too large).

        Others of its batch may not have theirs yet, so more is done when they do.
        """
        answer = _compared(seen)
        if seen.error is not None or job.gone:
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
        if not self.observed:  # since this turn of the loop
            return
        target = self.target
        reason = self._reason(target, version, len(job.body)) or self._busy(target, version)
        if reason is not None or target is None:
            self.report.shed[reason or "not-ready"] += 1
            return
        copy = Copy(self, target, job, version.version, answer, seconds)
        self.under_way.add(copy)
        self._size += len(copy.body)
        self.report.copied += 1
        target.submit(copy)

    def _busy(self, target: ModelVersion | None, version: ModelVersion) -> Reason | None:
        ready = sum(worker.state is WorkerState.READY for worker in version.workers)
        if (
            version.pending > version.batch_size * ready
        ):  # what computes beside the workers is in the way of what waits for them
            return "primary-busy"
        return "shadow-busy" if target is not None and target.pending >= target.batch_size else None

    def returned(self, copy: Copy, answer: ComparedAnswer | None) -> None:
        """Its answer; None where there is none that could be compared, and that is counted. Others
        of its batch may wait for theirs.
        """
        if answer is None or copy.gone:
            self._finish(copy)
            return
        pair = ResponsePair(self, copy, answer, time.monotonic() - copy.arrived)
        self._comparisons.begin(self._judge(pair)).add_done_callback(
            lambda task: self._finish(copy)
        )

    def _finish(self, copy: Copy) -> None:
        if copy in self.under_way:
            self.under_way.discard(copy)
            self._size -= len(copy.body)


class Copy(ObservedJob):
    """The job of the shadow: a copy of `job` with its own id."""

    patience = PATIENCE

    def __init__(
        self,
        mirror: Mirror,
        target: ModelVersion,
        job: Job,
        version: str,
        answer: ComparedAnswer,
        seconds: float,
    ) -> None:
        """`answer` is what the client got from `version`, after so many seconds."""
        meta = str(uuid.uuid4()).encode() + job.meta[job.meta.index(b"\r\n") :] + TOLD
        now = time.monotonic()
        due = now + PATIENCE + target.plan.response_timeout
        super().__init__(Job(meta, job.body, now, due, LAST), self._return, LONGEST)
        self.report = mirror.report  # of the time when it was made
        self.target = target
        self.of = job
        self.version = version
        self.first = answer
        self.seconds = seconds
        self._mirror = mirror

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        super().piece(headers, body, flow)
        if self._room < 0:
            self.gone = True  # its further parts are not read

    def _return(self, seen: ObservedAnswer) -> None:
        answer = _compared(seen)
        if isinstance(seen.error, Unavailable):
            self.report.shed["refused"] += 1
        elif seen.error is not None:
            answer = ComparedAnswer(seen.status, {}, seen.error.message.encode()[:LONGEST])
        elif answer is None:
            self.report.uncompared += 1
            self.report.last_problem = f"an answer of the shadow has more than {LONGEST} bytes"
        self._mirror.returned(self, answer)


class ResponsePair(NamedTuple):
    """Two answers to one request, to be compared: that of `copy.version`, and the shadow's, after
    so many seconds.
    """

    mirror: Mirror
    copy: Copy
    second: ComparedAnswer
    seconds: float


def _compared(seen: ObservedAnswer) -> ComparedAnswer | None:
    if seen.body is None:
        return None
    lines = wire.parse_header_block(str(seen.headers, "latin-1"))
    return ComparedAnswer(seen.status, {name.lower(): value for name, value in lines}, seen.body)


def _examples(said: Shadow) -> int:
    return EXAMPLES if said.examples is None else said.examples
