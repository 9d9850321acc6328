"""Continuous batching: calls the handler repeatedly with the current requests, until each answer is
complete.

The handler's result for a request is the next part of its answer. `context.stopping_criteria` says
whether it was the last: one callable a request, in the batch's order, which gets the handler's
result for it; True or None end the answer. A handler that sets none answers each request with one
call. Contract section 6.4.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tsx_runtime.errors import PredictionFailed
from tsx_runtime.wire import Buffer, Frame, Item, Kind
from tsx_runtime.worker.channel import FrameSocket, OutFrame
from tsx_runtime.worker.codecs.responses import (
    GONE,
    NEXT,
    Answer,
    encode_answers,
    failure,
    is_device_lost,
    mismatch,
    streamed_headers,
)
from tsx_runtime.worker.diagnostics.failures import log_failure
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import Outcome, ServedModel, check_piece, read_requests
from tsx_runtime.worker.execution.continuous_members import Membership
from tsx_runtime.worker.execution.step_times import StepTotals
from tsx_runtime.worker.handler_api.context import Context, SendPiece

MORE = 100  # in place of a status: the result is a part of the answer, not the last

logger = logging.getLogger("tsx.worker")

Send = Callable[[Sequence[OutFrame]], None]


@dataclass(eq=False, slots=True)
class BatchMember:
    """One request, from its first call to its last."""

    batch: int
    meta: str
    row: dict[str, Any]  # for its first call; what follows has no inputs
    parts: dict[str, dict[str, str]] | None
    came: float  # time.monotonic()
    before: list[float]  # seconds that the steps had taken until then
    begun: bool = False  # whether a piece of its answer was sent
    called: bool = False  # whether a call with it has succeeded

    def headers(self, block: Buffer) -> Buffer:
        """Of a part: only the first one's count."""
        if self.begun:
            return b""
        self.begun = True
        return streamed_headers(block)

    def rename(self) -> None:
        """Handlers keep the state of a request by its id, so after a failed call it gets a new
        id.
        """
        id, _, rest = self.meta.partition("\r\n")
        self.meta = f"{id}+\r\n{rest}"


class ContinuousBatch:
    """All requests that a worker is answering."""

    def __init__(self, model: ServedModel, send: Send) -> None:
        self.lost = False  # whether the device is
        self._model = model
        self._send = send
        self._members: Membership[BatchMember] = Membership(model.retry)
        self._by_batch: dict[int, BatchMember] = {}
        self._spent = StepTotals()

    def __bool__(self) -> bool:
        return bool(self._members)

    def join(self, batch: int, items: Sequence[Item]) -> None:
        refused: dict[int, Answer] = {}
        requests = read_requests(items, range(len(items)), self._model, refused)
        if refused:
            self._send([(Kind.REPLY, batch, [refused[0]], b"")])
            return
        before = list(self._spent.seconds)
        member = BatchMember(
            batch,
            requests.metas[0],
            requests.rows[0],
            requests.parts.get(0),
            time.monotonic(),
            before,
        )
        self._by_batch[batch] = member
        self._members.join(member)

    def cancel(self, batch: int) -> None:
        member = self._by_batch.pop(batch, None)
        if member is not None:  # else its last part was already sent
            self._members.leave(member)
            self._send([self._reply(member, GONE)])

    def step(self) -> None:
        """Call the handler once."""
        members = self._members.next()
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
            if problem := mismatch(results, len(members), model.entry.name):
                raise problem
        # the boundary to a user's code: even SystemExit must not end the worker unanswered
        except BaseException as error:
            self._end_call(start, laps)
            self._on_failure(members, error)
        else:
            self._end_call(start, laps)
            self._on_success(members, results)

    def _end_call(self, start: float, laps: step_times.Laps) -> None:
        self._model.context.end()
        self._spent.add(time.monotonic() - start, laps)

    def _on_success(self, members: list[BatchMember], results: list[Any]) -> None:
        context = self._model.context
        answers = encode_answers(
            results, context, self._model.max_response_size, self._model.error_status
        )
        frames: list[OutFrame] = []
        over: list[BatchMember] = []
        for idx, (member, value, answer) in enumerate(zip(members, results, answers, strict=True)):
            member.row, member.called = {}, True
            if answer[0] == 200:
                answer = self._judged(idx, value, answer)
            if answer[0] == MORE:
                frames.append(
                    (Kind.PIECE, member.batch, [(0, member.headers(answer[1]), answer[2])], b"")
                )
            else:
                over.append(member)
                frames.append(self._reply(member, answer))
                del self._by_batch[member.batch]
        self._members.called(over)
        self._send(frames)

    def _judged(self, idx: int, value: Any, answer: Answer) -> Answer:
        """The answer, or a part of it where the stopping criteria say that more follows."""
        context = self._model.context
        try:
            last = _is_last(context, idx, value)
        except Exception as error:  # the boundary to a user's stopping criteria
            log_failure([str(context.get_request_id(idx))], error, "the stopping criteria")
            return failure(error, self._model.error_status)
        if last:
            return answer
        # what the encoder adds to its headers belongs to a whole answer
        processor, body = context.processors.get(idx), answer[2]
        headers = b"" if processor is None else processor.header_block()
        return MORE, context.typed(headers, body, part=True), body

    def _on_failure(self, members: list[BatchMember], error: BaseException) -> None:
        self.lost = is_device_lost(error)
        failed = members if self.lost else self._members.failed()
        for member in members:
            if not member.called:
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
        return (Kind.REPLY, member.batch, [answer], self._spent.since(member.came, member.before))

    def _sender(self, members: list[BatchMember]) -> SendPiece:
        """For parts that the handler sends within a call; they are sent before its result."""

        def send(idx: int, headers: Buffer, body: Buffer) -> None:
            check_piece(body, self._model.max_response_size)
            member = members[idx]
            self._send([(Kind.PIECE, member.batch, [(0, member.headers(headers), body)], b"")])

        return send


def serve(
    channel: FrameSocket,
    model: ServedModel,
    on_other: Callable[[FrameSocket, Frame], None],
    on_request: Callable[[], None],
) -> None:
    """Serve until the front end closes or the device is lost.

    `on_other` gets frames that are neither requests nor cancellations.
    """
    batch = ContinuousBatch(model, lambda frames: channel.send_all(with_metrics(model, frames)))
    while not batch.lost:
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
                on_other(channel, frame)
            del frame  # an idle worker keeps no body in memory
        batch.step()


def answer(model: ServedModel, items: Sequence[Item]) -> Outcome:
    """The last parts of the answers to requests that arrive together, once all are complete or the
    device is lost.
    """
    last: dict[int, Answer] = {}
    batch = ContinuousBatch(
        model,
        lambda frames: last.update(
            {number: sent[0] for kind, number, sent, _ in frames if kind is Kind.REPLY}
        ),
    )
    for number, item in enumerate(items):
        batch.join(number, [item])
    while batch and not batch.lost:
        batch.step()
    return Outcome([last[number] for number in sorted(last)], batch.lost)


def with_metrics(model: ServedModel, frames: Sequence[OutFrame]) -> list[OutFrame]:
    """Reported metrics go with the next reply."""
    out = list(frames)
    for idx, (kind, batch, items, times) in enumerate(out):
        if kind is Kind.REPLY and times and model.metrics.pending:
            out[idx] = (
                kind,
                batch,
                items,
                bytes(times) + json.dumps(model.metrics.pending.take()).encode(),
            )
            break
    return out


def _is_last(context: Context, idx: int, value: Any) -> bool:
    criteria = context.stopping_criteria
    if criteria is None:
        processor = context.processors.get(idx)
        return processor is None or processor.get_response_header(NEXT) != "true"
    try:
        criterion = criteria[idx]
    except (IndexError, KeyError):
        raise PredictionFailed(
            f"context.stopping_criteria has no entry for request {idx} of the batch; it needs one"
            " per request."
        ) from None
    verdict = criterion(value)
    return verdict is None or bool(
        verdict
    )  # None: a request that does not stream, in TorchServe's words
