"""The dispatcher of a version with `splitRows`.

A request of many rows goes to workers in parts, and gets one answer.
"""

from __future__ import annotations

import re

from tsx_runtime.core.scheduling.dispatcher import Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import Flow, Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue
from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.errors import ClientLeft, PayloadTooLarge, PredictionFailed, QueueFull, TsxError
from tsx_runtime.features.split_rows.tensors import MAX_JSON_BYTES, RowsPart, join, split
from tsx_runtime.wire import TENSORS_HEAD, V2_META, Buffer, Item

# Patterns of header lines.
_HEAD = re.compile(rb"^(%b: *)(\d{1,15})(?=\r?$)" % TENSORS_HEAD, re.IGNORECASE | re.MULTILINE)
_COST = re.compile(rb"^(x-tsx-cost: *)(\d{1,15})(?=\r?$)", re.IGNORECASE | re.MULTILINE)
# The header lines of a request for an explanation or a description.
_NOT_PREDICTION = re.compile(rb"^(explain|describe): true\r?$", re.IGNORECASE | re.MULTILINE)


class RowsDispatcher(Dispatcher):
    """A dispatcher whose queue holds parts of requests.

    If a part fails, its error is the answer to the request, and the other parts are given up.
    """

    def __init__(
        self,
        label: str,
        limits: BatchLimits,
        bounds: Bounds,
        rows: int,
        max_response_size: int,
        queue: RequestQueue | None = None,
    ) -> None:
        """Split requests into parts of `rows` rows."""
        super().__init__(label, limits, bounds, queue)
        self._rows = rows
        self.max_response_size = max_response_size
        self._requests: dict[Job, SplitRequest] = {}

    def submit(self, job: Job) -> None:
        try:
            parts = self._parts(job)
        except (PayloadTooLarge, QueueFull) as error:
            self._reject(job, error)
            return
        if parts is None:
            super().submit(job)
        else:
            request = self._requests[job] = SplitRequest(self, job, parts)
            for part in request.parts:
                super().submit(part)
                if request.has_ended:  # The part was refused, since no worker will serve.
                    return
                # `on_reply` checks which answers are counted only if `_deadlines` has entries.
                self._deadlines.setdefault(part, NEVER)
                # The parts count as one request.
                self.stats.ended -= part is not request.parts[0]

    def leave(self, job: Job) -> None:
        request = self._requests.get(job)
        if request is None:
            super().leave(job)
        else:
            job.gone = True
            self.fail(
                request,
                ClientLeft(
                    f"{self.label} did not answer the request before its client disconnected."
                ),
            )

    def fail(self, request: SplitRequest, error: TsxError) -> None:
        self.end(request)
        self._reject(request.job, error)

    def end(self, request: SplitRequest, excluded: RowsJob | None = None) -> None:
        """End a request, and give up its remaining parts, except for `excluded`."""
        request.has_ended = True
        del self._requests[request.job]
        for part in request.parts:
            if part is excluded or part in request.answers:
                continue
            if self._is_running(part):
                self._give_up(part)
            else:
                super().leave(part)

    def _refuse(self, job: Job, error: TsxError) -> None:
        if isinstance(job, RowsJob) and job.request.has_ended:
            self._deadlines.pop(job, None)
            self._restarted.discard(job)
            self._close(1)
        else:
            super()._refuse(job, error)

    def _parts(self, job: Job) -> list[RowsPart] | None:
        """Return the parts of a request, or None if it is not split.

        Raises:
            PayloadTooLarge: The parts can never fit into the queue.
            QueueFull: The parts do not fit now. Either all are accepted, or none.
        """
        head = _HEAD.search(job.meta)
        if (head is None and V2_META not in job.meta) or _NOT_PREDICTION.search(job.meta):
            return None
        bounds, queue = self.bounds, self.queue
        parts = split(job.body, None if head is None else int(head[2]), self._rows, bounds.items)
        if parts is None:
            return None
        if self._flush_due:
            self._flush()
        size = sum(len(part.body) for part in parts)
        if size > bounds.size:
            text = (
                f"The parts of the request (splitRows) have {size} bytes, and the queue holds"
                f" {bounds.size} (maxQueueBytes)."
            )
            raise PayloadTooLarge(f"{text} Send fewer rows, or raise maxQueueBytes.")
        # Requests of a lower priority can be displaced.
        displaceable = sum(queued.priority < job.priority for queued in queue.jobs)
        if (
            len(queue.jobs) - displaceable + len(parts) > bounds.items
            or queue.size + size > bounds.size
        ):
            seconds = self._seconds_to_empty()
            text = (
                f"{self.label} takes the request in {len(parts)} parts of {self._rows} rows"
                f" (splitRows), and {len(queue.jobs)} of"
            )
            text = f"{text} {bounds.items} requests (jobQueueSize) wait; try again in {seconds} s."
            raise QueueFull(text, retry_after=seconds, status=bounds.overload_status)
        return parts


class SplitRequest:
    """A request whose parts are in the queue or with workers."""

    def __init__(self, dispatcher: RowsDispatcher, job: Job, parts: list[RowsPart]) -> None:
        self.dispatcher = dispatcher
        self.job = job
        self.has_ended = False
        self.parts = [
            RowsJob(self, part, sum(row_part.rows for row_part in parts)) for part in parts
        ]
        # The headers and the answers of finished parts.
        self.answers: dict[RowsJob, tuple[bytes, RowsPart]] = {}
        self.size = 0  # bytes of the bodies of `answers`


class RowsJob(Job):
    """A part of a request, in the queue or with a worker."""

    def __init__(self, request: SplitRequest, part: RowsPart, rows: int) -> None:
        """Make a job for a part of a request that has `rows` rows."""
        job = request.job
        meta = _HEAD.sub(rb"\g<1>%d" % (part.head or 0), job.meta)
        meta = _COST.sub(
            lambda match: b"%b%d" % (match[1], -(-int(match[2]) * part.rows // rows)), meta
        )
        super().__init__(meta, part.body, job.arrived, job.deadline, job.priority)
        self.request = request
        self.rows = part.rows
        self._final: tuple[Buffer, Buffer] | None = None  # headers and body of the request's answer

    def consumes(self, item: Item) -> bool:
        """Collect the answer to a part; return False if it completes the request, or fails it."""
        request = self.request
        status, headers, body = item
        if request.has_ended:
            return True
        if not 200 <= status < 300:
            self._final = headers, body
            request.dispatcher.end(request, self)
            return False
        head = _HEAD.search(bytes(headers))
        request.answers[self] = (
            bytes(headers),
            RowsPart(self.rows, None if head is None else int(head[2]), bytes(body)),
        )
        request.size += len(body)
        if len(request.answers) < len(request.parts):
            # The joined answer has only one part's JSON.
            self._check_size(request.size - MAX_JSON_BYTES)
            return True
        try:
            length, joined = join([request.answers[part][1] for part in request.parts])
        except ValueError as error:
            text = (
                f"The answers to the parts of the request cannot be joined: {error}. Remove"
                " splitRows from the model's configuration."
            )
            request.dispatcher.fail(request, PredictionFailed(text))
            return True
        if self._check_size(len(joined)):
            return True
        self._final = _HEAD.sub(rb"\g<1>%d" % length, request.answers[request.parts[0]][0]), joined
        request.dispatcher.end(request, self)
        return False

    def _check_size(self, size: int) -> bool:
        dispatcher = self.request.dispatcher
        if (limit := dispatcher.max_response_size) >= size:
            return False
        text = (
            f"The answer to all rows has {size} bytes or more, but max_response_size is {limit}."
            " Raise it, or send fewer rows."
        )
        dispatcher.fail(self.request, PredictionFailed(text))
        return True

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        if self._final is not None or not self.consumes((status, headers, body)):
            assert self._final is not None
            self.request.job.answer(status, *self._final, batch)

    def refuse(self, error: TsxError) -> None:
        self.request.dispatcher.end(self.request, self)
        self.request.job.refuse(error)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        if not self.request.has_ended:
            text = (
                "The handler streams its answer, and answers to parts of a request can only be"
                " joined whole."
            )
            error = PredictionFailed(f"{text} Remove splitRows from the model's configuration.")
            self.request.dispatcher.fail(self.request, error)
