"""Asynchronous handlers: each request is a task on one event loop, answered when it is done.

`async def handle(self, data, context)` gets one request at a time, with its own context. This
context shares the attributes that the handler set on the context when it was loaded. See
docs/guides/serving-modes.md.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from tsx_runtime.wire import Buffer, Frame, Item, Kind
from tsx_runtime.worker.channel import FrameSocket, OutFrame
from tsx_runtime.worker.codecs.responses import (
    CANCELLED,
    GONE,
    Answer,
    check_results,
    encode_answers,
    failure_of,
    is_device_lost,
)
from tsx_runtime.worker.codecs.v2_binary import tensor_responses
from tsx_runtime.worker.diagnostics import printing
from tsx_runtime.worker.diagnostics.failures import log_failure
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import (
    Outcome,
    Pieces,
    ServedModel,
    read_requests,
    send_nowhere,
)
from tsx_runtime.worker.execution.continuous import with_metrics
from tsx_runtime.worker.execution.prefetch import copy_items
from tsx_runtime.worker.execution.step_times import Laps
from tsx_runtime.worker.handler_api.context import SendPiece

REPORT_INTERVAL_S = 1.0

logger = logging.getLogger("tsx.worker")


class ConcurrentRequests:
    """The tasks of running requests."""

    def __init__(
        self,
        channel: FrameSocket,
        model: ServedModel,
        on_other: Callable[[FrameSocket, Frame], None],
        on_request: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._model = model
        self._on_other = on_other
        self._on_request = on_request
        self._tasks: dict[int, asyncio.Task[Answer]] = {}
        self._called_off: set[int] = set()  # requests whose clients have left
        self._next_report: asyncio.TimerHandle | None = None  # set while requests run
        self._joins_pieces = bool(getattr(model.entry.instance, "joins_pieces", False))
        self._pieces: list[OutFrame] = []  # the parts of this turn of the loop
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the front end closes or the device is lost, and raise errors of reading."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="tsx-read", daemon=True).start()
        try:
            await self._closed
        finally:
            for task in list(self._tasks.values()):
                task.cancel()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while (frame := self._channel.read()) is not None:
                loop.call_soon_threadsafe(
                    self._on_frame, frame._replace(items=copy_items(frame.items))
                )
                del frame
        # Any error that ends this thread ends the worker, which raises it.
        except BaseException as error:
            loop.call_soon_threadsafe(self._end, error)
        else:
            loop.call_soon_threadsafe(self._end, None)

    def _on_frame(self, frame: Frame) -> None:
        try:
            if frame.kind is Kind.BATCH:
                self._on_request()
                # The task copies the laps with its context.
                began, laps = time.monotonic(), step_times.begin()
                task = self._tasks[frame.batch] = asyncio.ensure_future(
                    self._answer(frame.batch, frame.items)
                )
                task.add_done_callback(partial(self._reply, frame.batch, began, laps))
                if self._next_report is None:
                    self._next_report = task.get_loop().call_later(REPORT_INTERVAL_S, self._report)
            elif frame.kind is Kind.CANCEL:
                if frame.batch in self._tasks:  # Otherwise its response was already sent.
                    self._called_off.add(frame.batch)
                    self._tasks[frame.batch].cancel()
            else:
                # It runs on the loop, since a blocked loop must answer no heartbeat.
                self._on_other(self._channel, frame)
        # The loop would log the error and continue. It ends the worker, which raises it.
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._closed.done():
            return
        if error is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(error)

    async def _answer(self, batch: int, items: list[Item]) -> Answer:
        try:
            return await _answer_of(self._model, items, partial(self._send_piece, batch))
        except asyncio.CancelledError:  # The front end or a library of the handler cancels.
            raise
        # Even SystemExit from a user's code must not end the worker without a response.
        except BaseException as error:
            answer = _logged_failure(error, items[0], self._model)
            if is_device_lost(error):
                logger.error("the device no longer responds to this process, so the worker exits")
                self._end(None)
            return answer

    def _reply(self, batch: int, began: float, laps: Laps, task: asyncio.Task[Answer]) -> None:
        """Send the response of a task, even of one that was cancelled before it started."""
        del self._tasks[batch]
        answer = (
            task.result()
            if not task.cancelled()
            else GONE
            if batch in self._called_off
            else CANCELLED
        )
        self._called_off.discard(batch)
        times = step_times.times(began, time.monotonic(), laps)
        frames = with_metrics(self._model, [(Kind.REPLY, batch, [answer], times)])
        with suppress(ConnectionError):  # The reading thread reports that the front end has gone.
            self._channel.send_all(self._pieces + frames)
        self._pieces.clear()

    def _report(self) -> None:
        """Report what a long task has counted so far."""
        self._next_report = (
            asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._report)
            if self._tasks
            else None
        )
        if self._model.metrics.pending:
            metrics = self._model.metrics.pending.take()
            facts = {"errors": [], "lines": [], "lost": 0, "metrics": metrics}
            with suppress(ConnectionError):
                self._channel.send(Kind.REPORT, 0, extra=json.dumps(facts).encode())

    def _send_piece(self, batch: int, position: int, headers: Buffer, body: Buffer) -> None:
        """Send a part of a response, or collect the parts of one turn of the loop.

        They are collected if the handler sets `joins_pieces`: it sends them on the loop, which it
        never blocks. A call costs more than all else that a token does here.
        """
        if not self._joins_pieces:
            self._channel.send(Kind.PIECE, batch, [(position, headers, body)])
            return
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self._send_pieces)
        self._pieces.append((Kind.PIECE, batch, [(position, headers, body)], b""))

    def _send_pieces(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces:  # A response may have taken the parts along.
            with suppress(ConnectionError):
                self._channel.send_all(pieces)


def serve(
    channel: FrameSocket,
    model: ServedModel,
    on_other: Callable[[FrameSocket, Frame], None],
    on_request: Callable[[], None],
) -> None:
    """Serve on the loop of a coroutine `initialize`, so that its tasks go on."""

    async def run() -> None:  # A ConcurrentRequests is made on its loop.
        await ConcurrentRequests(channel, model, on_other, on_request).run()

    model.coroutines.finish(run())


def answer(model: ServedModel, items: Sequence[Item]) -> Outcome:
    """Answer requests that arrive together, and return once all are complete."""
    lost = False

    async def answer_one(item: Item) -> Answer:
        nonlocal lost
        try:
            return await _answer_of(model, [item], send_nowhere)
        except Exception as error:  # A user's code may raise anything.
            lost = lost or is_device_lost(error)
            return _logged_failure(error, item, model)

    async def run() -> list[Answer]:
        return await asyncio.gather(*map(answer_one, items))

    answers: list[Answer] = model.coroutines.finish(run())
    return Outcome(answers, lost)


async def _answer_of(model: ServedModel, items: Sequence[Item], send: SendPiece) -> Answer:
    refused: dict[int, Answer] = {}
    requests = read_requests(items, range(1), model, refused)
    if refused:
        return refused[0]
    context = copy.copy(model.context)
    pieces = Pieces([0], send, model.max_response_size)
    context.begin(requests.metas, requests.parts, pieces.send)
    printing.task_context.set(context)
    try:
        result = model.entry.call(requests.rows, context)
        if inspect.isawaitable(result):
            result = await result
    finally:
        context.end()
    if problem := check_results(result, 1, model.entry.name):
        raise problem
    if requests.parts:
        result = tensor_responses(result, requests.parts, context, model.version, pieces.begun)
    return encode_answers(result, context, model.max_response_size, model.error_status)[0]


def _logged_failure(error: BaseException, item: Item, model: ServedModel) -> Answer:
    meta = str(item[1], "latin-1")
    error, answer = failure_of(error, meta, item[2], model.error_status)
    log_failure([meta.partition("\r\n")[0]], error)
    return answer
