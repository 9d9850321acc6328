"""Continuous batching: the handler is called again and again with all incomplete requests.

The handler's result for a request is the next part of its response. `context.stopping_criteria` has
a callable for each request, in the batch's order, which gets the result of that request. If it
returns True or None, the response is complete. A handler without criteria answers each request with
one call. See docs/guides/serving-modes.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tsx_runtime.errors import PredictionFailed
from tsx_runtime.features.continuous.members import Membership
from tsx_runtime.wire import Buffer, Frame, Item, Kind
from tsx_runtime.worker.channel import FrameSocket, OutFrame
from tsx_runtime.worker.codecs.responses import (
    GONE,
    NEXT_PART_HEADER,
    Answer,
    check_results,
    encode_answers,
    failure,
    is_device_lost,
    streamed_headers,
)
from tsx_runtime.worker.diagnostics.failures import log_failure
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import Outcome, ServedModel, check_piece, read_requests
from tsx_runtime.worker.execution.step_times import StepTotals
from tsx_runtime.worker.handler_api.context import Context, SendPiece

PARTIAL_STATUS = 100  # the status of a result that is not the last part of its response

logger = logging.getLogger("tsx.worker")

Send = Callable[[Sequence[OutFrame]], None]


@dataclass(eq=False, slots=True)
class BatchMember:
    """A request that takes part in calls until its response is complete.

    Attributes:
        batch: The number of the request's frame.
        meta: The meta of the request.
        row: The inputs of its first call; later calls have none.
        parts: The content types and repeated fields of a form.
        arrived_at: The time of arrival, as `time.monotonic()`.
        earlier_seconds: The total seconds of each step before the request arrived.
        has_started: Whether a part of its response was sent.
        was_called: Whether a call with it has succeeded.
    """

    batch: int
    meta: str
    row: dict[str, Any]
    parts: dict[str, dict[str, str]] | None
    arrived_at: float
    earlier_seconds: list[float]
    has_started: bool = False
    was_called: bool = False

    def headers(self, header_block: Buffer) -> Buffer:
        """Return the header block of the next part; it is empty after the first one."""
        if self.has_started:
            return b""
        self.has_started = True
        return streamed_headers(header_block)

    def rename(self) -> None:
        """Give the request a new id after a failed call.

        Handlers keep state by the id of a request, and the failed call may have left such state.
        """
        id, _, tail = self.meta.partition("\r\n")
        self.meta = f"{id}+\r\n{tail}"


class ContinuousBatch:
    """The requests that a worker is answering."""

    def __init__(self, model: ServedModel, send: Send) -> None:
        self.device_lost = False
        self._model = model
        self._send = send
        self._members: Membership[BatchMember] = Membership(model.retry)
        self._by_batch: dict[int, BatchMember] = {}
        self._step_totals = StepTotals()

    def __bool__(self) -> bool:
        return bool(self._members)

    def join(self, batch: int, items: Sequence[Item]) -> None:
        """Add a request, unless it cannot be read."""
        refused: dict[int, Answer] = {}
        requests = read_requests(items, range(len(items)), self._model, refused)
        if refused:
            self._send([(Kind.REPLY, batch, [refused[0]], b"")])
            return
        earlier_seconds = list(self._step_totals.seconds)
        member = BatchMember(
            batch,
            requests.metas[0],
            requests.rows[0],
            requests.parts.get(0),
            time.monotonic(),
            earlier_seconds,
        )
        self._by_batch[batch] = member
        self._members.join(member)

    def cancel(self, batch: int) -> None:
        """Remove a request whose client has disconnected."""
        member = self._by_batch.pop(batch, None)
        if member is not None:  # Otherwise its last part was already sent.
            self._members.leave(member)
            self._send([self._reply(member, GONE)])

    def step(self) -> None:
        """Call the handler once."""
        members = self._members.next_call()
        if not members:
            return
        model, context = self._model, self._model.context
        parts = {idx: member.parts for idx, member in enumerate(members) if member.parts}
        context.begin([member.meta for member in members], parts, self._sender(members))
        context.stopping_criteria = None
        start, laps = time.monotonic(), step_times.begin()
        try:
            results = model.coroutines.finish(
                model.entry.call([dict(member.row) for member in members], context)
            )
            if wrong_results := check_results(results, len(members), model.entry.name):
                raise wrong_results
        # Even SystemExit from a user's code must not end the worker without a response.
        except BaseException as error:
            self._end_call(start, laps)
            self._on_failure(members, error)
        else:
            self._end_call(start, laps)
            self._on_success(members, results)

    def _end_call(self, start: float, laps: step_times.Laps) -> None:
        self._model.context.end()
        self._step_totals.add(time.monotonic() - start, laps)

    def _on_success(self, members: list[BatchMember], results: list[Any]) -> None:
        context = self._model.context
        answers = encode_answers(
            results, context, self._model.max_response_size, self._model.error_status
        )
        frames: list[OutFrame] = []
        complete: list[BatchMember] = []
        for idx, (member, value, answer) in enumerate(zip(members, results, answers, strict=True)):
            member.row, member.was_called = {}, True
            if answer[0] == 200:
                answer = self._apply_criteria(idx, value, answer)
            if answer[0] == PARTIAL_STATUS:
                frames.append(
                    (Kind.PIECE, member.batch, [(0, member.headers(answer[1]), answer[2])], b"")
                )
            else:
                complete.append(member)
                frames.append(self._reply(member, answer))
                del self._by_batch[member.batch]
        self._members.record_success(complete)
        self._send(frames)

    def _apply_criteria(self, idx: int, value: Any, answer: Answer) -> Answer:
        """Return a part of a response; its status shows whether it is the last one."""
        context = self._model.context
        try:
            is_last = _is_last(context, idx, value)
        except Exception as error:  # A user's stopping criteria may raise anything.
            log_failure([str(context.get_request_id(idx))], error, "the stopping criteria")
            return failure(error, self._model.error_status)
        if is_last:
            return answer
        # Headers that depend on the value's type are only for complete responses.
        processor, body = context.processors.get(idx), answer[2]
        headers = b"" if processor is None else processor.header_block()
        return PARTIAL_STATUS, context.add_content_type(headers, body, part=True), body

    def _on_failure(self, members: list[BatchMember], error: BaseException) -> None:
        self.device_lost = is_device_lost(error)
        failed = members if self.device_lost else self._members.record_failure()
        for member in members:
            if not member.was_called:
                member.rename()
        for member in failed:
            del self._by_batch[member.batch]
        if len(failed) < len(members) and not failed:
            logger.warning(
                "the handler failed for a batch of %d requests; the newest ones are retried"
                " separately: %r",
                len(members),
                error,
            )
        else:
            log_failure([member.meta.partition("\r\n")[0] for member in failed], error)
        self._send(
            [self._reply(member, failure(error, self._model.error_status)) for member in failed]
        )

    def _reply(self, member: BatchMember, answer: Answer) -> OutFrame:
        return (
            Kind.REPLY,
            member.batch,
            [answer],
            self._step_totals.encode_times_since(member.arrived_at, member.earlier_seconds),
        )

    def _sender(self, members: list[BatchMember]) -> SendPiece:
        """Return a function that sends parts of responses during a call, before its result."""

        def send(idx: int, headers: Buffer, body: Buffer) -> None:
            check_piece(body, self._model.max_response_size)
            member = members[idx]
            self._send([(Kind.PIECE, member.batch, [(0, member.headers(headers), body)], b"")])

        return send


def serve(
    channel: FrameSocket,
    model: ServedModel,
    on_control_frame: Callable[[FrameSocket, Frame], None],
    on_request: Callable[[], None],
) -> None:
    """Serve until the front end closes or the device is lost; see `Loop`."""
    batch = ContinuousBatch(
        model, lambda frames: channel.send_all(model.metrics.pending.add_to(frames))
    )
    while not batch.device_lost:
        while not batch or channel.has_frame():
            frame = channel.read()
            if frame is None:
                return
            if frame.kind is Kind.BATCH:
                on_request()
                batch.join(frame.batch, frame.items)
            elif frame.kind is Kind.CANCEL:
                batch.cancel(frame.batch)
            else:
                on_control_frame(channel, frame)
            del frame  # An idle worker keeps no body in memory.
        batch.step()


def answer(model: ServedModel, items: Sequence[Item]) -> Outcome:
    """Answer requests that arrive together, and return the last parts of their responses.

    The function returns early if the device is lost.
    """
    responses: dict[int, Answer] = {}
    batch = ContinuousBatch(
        model,
        lambda frames: responses.update(
            {number: answers[0] for kind, number, answers, _ in frames if kind is Kind.REPLY}
        ),
    )
    for number, item in enumerate(items):
        batch.join(number, [item])
    while batch and not batch.device_lost:
        batch.step()
    return Outcome([responses[number] for number in sorted(responses)], batch.device_lost)


def _is_last(context: Context, idx: int, value: Any) -> bool:
    criteria = context.stopping_criteria
    if criteria is None:
        processor = context.processors.get(idx)
        return processor is None or processor.get_response_header(NEXT_PART_HEADER) != "true"
    try:
        criterion = criteria[idx]
    except (IndexError, KeyError):
        raise PredictionFailed(
            f"context.stopping_criteria has no entry for request {idx} of the batch; it needs one"
            " per request."
        ) from None
    verdict = criterion(value)
    # As in TorchServe, None is the verdict for a request that does not stream.
    return verdict is None or bool(verdict)
