"""Asynchronous handlers: each request runs as a task of one event loop.

Each call of `async def handle(self, data, context)` gets one request, with a context of its own.
Attributes that the handler has set on the context while loading are in all of these contexts. See
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
from tsx_runtime.worker.exceptions import LoadError, describe_error
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import (
    Outcome,
    Pieces,
    ServedModel,
    read_requests,
    send_nowhere,
)
from tsx_runtime.worker.execution.prefetch import copy_items
from tsx_runtime.worker.execution.step_times import Laps
from tsx_runtime.worker.handler_api.context import SendPiece

REPORT_INTERVAL_S = 1.0

logger = logging.getLogger("tsx.worker")


class ConcurrentRequests:
    """The loop that runs each request as a task, and sends its response when it is done."""

    def __init__(
        self,
        channel: FrameSocket,
        model: ServedModel,
        on_control_frame: Callable[[FrameSocket, Frame], None],
        on_request: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._model = model
        self._on_control_frame = on_control_frame
        self._on_request = on_request
        self._tasks: dict[int, asyncio.Task[Answer]] = {}
        self._cancelled_batches: set[int] = set()  # requests whose clients have disconnected
        self._next_report: asyncio.TimerHandle | None = None  # set while requests run
        self._adapter_change: asyncio.Task[None] | None = None  # the last one
        self._joins_pieces = bool(getattr(model.entry.instance, "joins_pieces", False))
        # parts that are sent at the end of this iteration of the loop
        self._pieces: list[OutFrame] = []
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the front end closes or the device is lost, and raise errors of reading."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="tsx-read", daemon=True).start()
        try:
            await self._finished
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
        # Any error that ends this thread is raised in the main thread, and ends the worker.
        except BaseException as error:
            loop.call_soon_threadsafe(self._finish, error)
        else:
            loop.call_soon_threadsafe(self._finish, None)

    def _on_frame(self, frame: Frame) -> None:
        try:
            if frame.kind is Kind.BATCH:
                self._on_request()
                # The task copies this context variable, and so records its steps in these laps.
                start, laps = time.monotonic(), step_times.begin()
                task = self._tasks[frame.batch] = asyncio.ensure_future(
                    self._answer(frame.batch, frame.items)
                )
                task.add_done_callback(partial(self._reply, frame.batch, start, laps))
                if self._next_report is None:
                    self._next_report = task.get_loop().call_later(REPORT_INTERVAL_S, self._report)
            elif frame.kind is Kind.CANCEL:
                if frame.batch in self._tasks:  # Otherwise its response was already sent.
                    self._cancelled_batches.add(frame.batch)
                    self._tasks[frame.batch].cancel()
            elif frame.kind is Kind.ADAPTER:
                order = json.loads(bytes(frame.extra))
                self._adapter_change = asyncio.ensure_future(self._set_adapter(order))
            else:
                # This runs on the loop, so that a blocked loop does not answer heartbeats.
                self._on_control_frame(self._channel, frame)
        # The loop would only log the error and continue. Instead, the error ends the worker.
        except BaseException as error:
            self._finish(error)

    async def _set_adapter(self, order: dict[str, str | None]) -> None:
        error = None
        try:
            await self._model.entry.instance.set_adapter(**order)
        except LoadError as failure:
            error = str(failure)
        except Exception as failure:  # the boundary to the code of a handler
            logger.exception("the adapter %s cannot be changed", order["name"])
            error = f"The adapter {order['name']} cannot be used: {describe_error(failure)}"
        with suppress(ConnectionError):
            self._channel.send(Kind.ADAPTER, 0, extra=json.dumps({"error": error}).encode())

    def _finish(self, error: BaseException | None) -> None:
        if self._finished.done():
            return
        if error is None:
            self._finished.set_result(None)
        else:
            self._finished.set_exception(error)

    async def _answer(self, batch: int, items: list[Item]) -> Answer:
        try:
            return await _run_handler(self._model, items, partial(self._send_piece, batch))
        # The front end, or a library of the handler, has cancelled the task.
        except asyncio.CancelledError:
            raise
        # Even SystemExit from a user's code must not end the worker without a response.
        except BaseException as error:
            answer = _log_and_encode_failure(error, items[0], self._model)
            if is_device_lost(error):
                logger.error("the device no longer responds to this process, so the worker exits")
                self._finish(None)
            return answer

    def _reply(self, batch: int, start: float, laps: Laps, task: asyncio.Task[Answer]) -> None:
        """Send the response of a task; a task that was cancelled has one, too."""
        del self._tasks[batch]
        answer = (
            task.result()
            if not task.cancelled()
            else GONE
            if batch in self._cancelled_batches
            else CANCELLED
        )
        self._cancelled_batches.discard(batch)
        times = step_times.encode_times(start, time.monotonic(), laps)
        frames = self._model.metrics.pending.add_to([(Kind.REPLY, batch, [answer], times)])
        with suppress(ConnectionError):  # If the front end has gone, the reading thread notices it.
            self._channel.send_all(self._pieces + frames)
        self._pieces.clear()

    def _report(self) -> None:
        """Report the metrics of tasks that are still running."""
        self._next_report = (
            asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._report)
            if self._tasks
            else None
        )
        if self._model.metrics.pending:
            metrics = self._model.metrics.pending.take()
            report = {"errors": [], "lines": [], "lost": 0, "metrics": metrics}
            with suppress(ConnectionError):
                self._channel.send(Kind.REPORT, 0, extra=json.dumps(report).encode())

    def _send_piece(self, batch: int, position: int, headers: Buffer, body: Buffer) -> None:
        """Send a part of a response, or collect the parts of one iteration of the loop.

        Parts are collected if the handler sets `joins_pieces`, which means that it sends them on
        the loop and never blocks it. For a generated token, the system call is the largest cost.
        """
        if not self._joins_pieces:
            self._channel.send(Kind.PIECE, batch, [(position, headers, body)])
            return
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self._send_pieces)
        self._pieces.append((Kind.PIECE, batch, [(position, headers, body)], b""))

    def _send_pieces(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces:  # A reply may have sent the pieces already.
            with suppress(ConnectionError):
                self._channel.send_all(pieces)


def serve(
    channel: FrameSocket,
    model: ServedModel,
    on_control_frame: Callable[[FrameSocket, Frame], None],
    on_request: Callable[[], None],
) -> None:
    """Serve on the loop that has run a coroutine `initialize`, so that its tasks continue."""

    async def run() -> None:  # A ConcurrentRequests must be created on its loop.
        await ConcurrentRequests(channel, model, on_control_frame, on_request).run()

    model.coroutines.finish(run())


def answer(model: ServedModel, items: Sequence[Item]) -> Outcome:
    """Answer requests that arrive together, and return once all are complete."""
    device_lost = False

    async def answer_one(item: Item) -> Answer:
        nonlocal device_lost
        try:
            return await _run_handler(model, [item], send_nowhere)
        except Exception as error:  # A user's code may raise anything.
            device_lost = device_lost or is_device_lost(error)
            return _log_and_encode_failure(error, item, model)

    async def run() -> list[Answer]:
        return await asyncio.gather(*map(answer_one, items))

    answers: list[Answer] = model.coroutines.finish(run())
    return Outcome(answers, device_lost)


async def _run_handler(model: ServedModel, items: Sequence[Item], send: SendPiece) -> Answer:
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
        result = tensor_responses(result, requests.parts, context, model.version, pieces.started)
    return encode_answers(result, context, model.max_response_size, model.error_status)[0]


def _log_and_encode_failure(error: BaseException, item: Item, model: ServedModel) -> Answer:
    meta = str(item[1], "latin-1")
    error, answer = failure_of(error, meta, item[2], model.error_status)
    log_failure([meta.partition("\r\n")[0]], error)
    return answer
