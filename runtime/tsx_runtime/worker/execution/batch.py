"""The run of one batch: bodies are parsed, the handler is called, its results are encoded.

Whatever a handler does, each request gets a response.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tsx_runtime.errors import BadRequest, PredictionFailed, error_body
from tsx_runtime.wire import BATCH_COST, JSON_HEADER, Buffer, Item
from tsx_runtime.worker.codecs.requests import read_row
from tsx_runtime.worker.codecs.responses import (
    GONE,
    Answer,
    check_results,
    encode_answers,
    failure,
    failure_of,
    is_device_lost,
    is_out_of_device_memory,
    streamed_headers,
)
from tsx_runtime.worker.codecs.v2_binary import OutputRequest, row_of_tensors, tensor_responses
from tsx_runtime.worker.diagnostics.failures import log_failure
from tsx_runtime.worker.diagnostics.tracebacks import outline
from tsx_runtime.worker.exceptions import BadRows, ClientsGone, InvalidInput, describe_error
from tsx_runtime.worker.execution.recovery import Ceiling, FailureLocation, Search, location_of
from tsx_runtime.worker.execution.step_times import Laps
from tsx_runtime.worker.execution.thread_tuning import ThreadTuning
from tsx_runtime.worker.handler_api.context import BatchState, Context, SendPiece
from tsx_runtime.worker.handler_api.loader import Coroutines, LoadedHandler
from tsx_runtime.worker.handler_api.metrics import Dimension, Metrics, MetricTypes, PredictionTime

# Headers as they stand in a request's meta, in lower case.
EXPLAIN_HEADERS = ("\r\nexplain: true\r\n", "\r\ndescribe: true\r\n")

_GIVEN_UP = (
    "%d more requests of the batch fail without a retry: those retried failed alike, or time is"
    " nearly over. %s"
)

logger = logging.getLogger("tsx.worker")


class ServedModel(NamedTuple):
    """A loaded model, and the settings of its batches.

    Attributes:
        entry: The handler.
        context: The context of the handler.
        coroutines: The loop for coroutines of the handler.
        decode: Whether JSON and text bodies become Python values.
        max_response_size: The limit of a response, in bytes.
        ceiling: The largest batch that fits the device's memory.
        metrics: The metrics of the worker.
        retry: Whether a batch that failed is tried again in parts.
        response_timeout: Seconds for a batch.
        worker: The id of the worker in metrics.
        alone: Whether this process is the whole worker. Ranks of a group must do the same in the
            same order.
        prediction_time: The metric of prediction times.
        version: The version of the model.
        enveloped: Whether an envelope reads a body's protocol. If not, its tensors are the row.
        mode: The mode in the load order.
        error_status: The status of an error of the handler.
        stops: Whether a streaming handler is stopped once all clients of its batch have left.
        threads: The tuning of torch's threads; None leaves their number.
        has_steps: Whether the handler has steps whose time is measured (`step_times.watch`).
        is_builtin: Whether it is a handler of tsx, which takes no field twice.
        cost: The handler's cost of one request; None if batches have no limit of it.
        max_cost: The limit of a batch's cost.
    """

    entry: LoadedHandler
    context: Context
    coroutines: Coroutines
    decode: bool
    max_response_size: int
    ceiling: Ceiling
    metrics: Metrics
    retry: bool = True
    response_timeout: float = 120.0
    worker: str = ""
    alone: bool = True
    prediction_time: PredictionTime | None = None
    version: str = ""
    enveloped: bool = False
    mode: str = "batch"
    error_status: int = 500
    stops: bool = False
    threads: ThreadTuning | None = None
    has_steps: bool = True
    is_builtin: bool = False
    cost: Callable[[Any], float] | None = None
    max_cost: int = 0


class Outcome(NamedTuple):
    """The responses of a batch, in its order."""

    answers: list[Answer]
    device_lost: bool


class RequestLists(NamedTuple):
    """The requests with which the handler is called, as parallel lists."""

    positions: list[int]  # positions in the batch
    metas: list[str]
    rows: list[dict[str, Any]]
    parts: dict[int, dict[str, dict[str, str]]]  # keys: indices in these lists


class PreparedBatch(NamedTuple):
    """A batch that was preprocessed while the previous one ran."""

    requests: RequestLists
    refused: dict[int, Answer]
    state: BatchState
    finish: Callable[[], Any]  # runs the other steps; raises the error of the first ones
    laps: Laps  # the times of the first steps


class _Failure(NamedTuple):
    """How a call failed, without the exception, which would keep the handler's objects alive.

    Attributes:
        answer: The response for the requests of the call.
        location: Where the call failed.
        text: The text of the error.
        trace: The traceback; empty if it is in the log already.
        memory: Whether the device was out of memory.
        unanswered: The positions without a response, to be tried again.
        named: Whether the handler named the bad rows, so that the others are not at fault.
    """

    answer: Answer
    location: FailureLocation
    text: str
    trace: str
    memory: bool = False
    unanswered: Sequence[int] = ()
    named: bool = False


class Pieces:
    """The sender of parts of responses, by positions; it notes which responses have begun."""

    def __init__(self, positions: list[int], send: SendPiece, limit: int) -> None:
        self._positions = positions
        self._send = send
        self._limit = limit
        self.begun: set[int] = set()  # indices in the handler's data

    def send(self, idx: int, headers: Buffer, body: Buffer) -> None:
        check_piece(body, self._limit)
        position = self._positions[idx]
        self._send(position, b"" if idx in self.begun else streamed_headers(headers), body)
        self.begun.add(idx)


def send_nowhere(position: int, headers: Buffer, body: Buffer) -> None:
    """Drop a part of a streamed response."""


def check_piece(body: Buffer, limit: int) -> None:
    """Check the size of a part of a response.

    Raises:
        PredictionFailed: It is too large.
    """
    if len(body) > limit:
        text = (
            f"A part of the answer has {len(body)} bytes, but max_response_size is {limit}. Raise"
            " it, or send smaller parts."
        )
        raise PredictionFailed(text)


def answer_batch(
    model: ServedModel,
    items: Sequence[Item],
    send: SendPiece,
    ahead: PreparedBatch | None = None,
    began: float | None = None,
) -> Outcome:
    """Run a batch, and return the response of each request.

    Args:
        model: The model.
        items: The requests.
        send: Sends a part of a response.
        ahead: The batch, if it was preprocessed ahead.
        began: The beginning by `time.monotonic`, if the caller knows it.
    """
    batch = _Batch(model, items, send, time.monotonic() if began is None else began)
    if ahead is not None:
        batch.answers.update(ahead.refused)
        batch.answer(ahead.requests, ahead)
    else:
        requests = read_requests(items, range(len(items)), model, batch.answers)
        for group in groups(requests) if len(items) > 1 else [requests]:
            for part in (
                [group]
                if model.cost is None
                else _split_by_cost(model, group, model.cost, batch.answers)
            ):
                batch.answer(part)
    model.context.end()
    answers = batch.answers
    return Outcome([answers[position] for position in range(len(items))], batch.lost)


def read_requests(
    items: Sequence[Item], positions: Iterable[int], model: ServedModel, refused: dict[int, Answer]
) -> RequestLists:
    """Read requests as rows; the responses of those that cannot be read go to `refused`."""
    requests = RequestLists([], [], [], {})
    read_positions, metas, rows, all_parts = requests
    decode = model.decode
    for position in positions:
        _, meta, body = items[position]
        text = str(meta, "latin-1")
        try:
            inputs, form = read_row(text, body, decode)
            # Compiled code takes each empty dict for false.
            if form is not None and (form or isinstance(form, OutputRequest)):
                if model.is_builtin and (
                    name := next((name for name, part in form.items() if "values" in part), None)
                ):
                    text = (
                        f"The field {name!r} comes several times, and {model.entry.name} takes it"
                        " once."
                    )
                    raise BadRequest(f"{text} Send a request for each value.")
                all_parts[len(rows)] = form
                if isinstance(form, OutputRequest) and not model.enveloped:
                    inputs = row_of_tensors(inputs)
        except BadRequest as error:
            refused[position] = failure(error)
            continue
        except Exception as error:  # No request may end the worker.
            logger.error("the request %s cannot be read", text.partition("\r\n")[0], exc_info=error)
            refused[position] = failure(error, model.error_status)
            continue
        read_positions.append(position)
        metas.append(text)
        rows.append(inputs)
    return requests


def groups(requests: RequestLists) -> list[RequestLists]:
    """Split off requests for explain or describe, each as a batch of its own.

    Handlers check only the first request of a batch for these.
    """
    # One check serves for all: hardly any batch has such a request.
    if not may_ask_explain("".join(requests.metas)):
        return [requests]
    alone = [
        idx
        for idx, meta in enumerate(requests.metas)
        if any(header in meta.lower() for header in EXPLAIN_HEADERS)
    ]
    ordinary = [idx for idx in range(len(requests.metas)) if idx not in alone]
    return [
        _select(requests, group)
        for group in ([ordinary] if ordinary else []) + [[idx] for idx in alone]
    ]


def _split_by_cost(
    model: ServedModel,
    requests: RequestLists,
    cost_of: Callable[[Any], float],
    refused: dict[int, Answer],
) -> list[RequestLists]:
    """Split requests into parts that cost no more than the limit, or are one request.

    The front end learns their cost, to form such batches.
    """
    parts: list[list[int]] = [[]]
    total = room = 0.0
    for idx, row in enumerate(requests.rows):
        try:
            cost = float(cost_of(row))
            if not 0.0 <= cost < math.inf:
                raise ValueError(
                    f"the handler's cost of a request is {cost}; it must be a number from 0 on"
                )
        except Exception as error:  # A user's code may raise anything.
            log_failure([requests.metas[idx].partition("\r\n")[0]], error)
            refused[requests.positions[idx]] = failure(error, model.error_status)
            continue
        if cost > room and parts[-1]:
            parts.append([])
        room = (room if parts[-1] else model.max_cost) - cost
        parts[-1].append(idx)
        total += cost
    model.metrics.add_counter(BATCH_COST, total, dimensions=[Dimension("worker", model.worker)])
    return (
        [requests]
        if len(parts[0]) == len(requests.rows)
        else [_select(requests, part) for part in parts]
    )


def may_ask_explain(meta: str) -> bool:
    """Tell quickly whether metas may ask for an explanation or a description."""
    return ": True\r\n" in meta


def _select(requests: RequestLists, indices: Sequence[int]) -> RequestLists:
    positions, metas, rows, forms = requests
    return RequestLists(
        [positions[idx] for idx in indices],
        [metas[idx] for idx in indices],
        [rows[idx] for idx in indices],
        {new: forms[old] for new, old in enumerate(indices) if old in forms},
    )


class _Batch:
    """The responses of one batch while they are collected."""

    __slots__ = ("_began", "_is_retried", "_items", "_model", "_send", "answers", "lost", "over")

    def __init__(
        self, model: ServedModel, items: Sequence[Item], send: SendPiece, began: float
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.lost = False  # The device is lost.
        self.over = False  # All clients have disconnected.
        self._model = model
        self._items = items
        self._send = send
        self._began = began
        self._is_retried = False

    def answer(self, requests: RequestLists, ahead: PreparedBatch | None = None) -> None:
        size = self._model.ceiling.size
        if not requests.rows or self.over:
            return
        if size is not None and len(requests.rows) > size:
            self._answer_in_parts(requests.positions, None)
        elif (problem := self._attempt(requests, ahead)) is not None and problem.unanswered:
            self._answer_in_parts(requests.positions, problem)

    def _attempt(
        self, requests: RequestLists, ahead: PreparedBatch | None = None
    ) -> _Failure | None:
        """Call the handler once; return None if its result answers all requests."""
        model, context = self._model, self._model.context
        pieces = Pieces(requests.positions, self._send, model.max_response_size)
        try:
            if ahead is None:
                context.begin(requests.metas, requests.parts, pieces.send)
                rows = list(requests.rows)  # Some handlers remove rows from their list.
                results = model.coroutines.finish(model.entry.call(rows, context))
            else:
                context.resume(ahead.state, pieces.send)
                results = ahead.finish()
        # Even SystemExit from a user's code must not end the worker without a response.
        except BaseException as error:
            return self._on_failure(error, requests, pieces.begun)
        problem = check_results(results, len(requests.rows), model.entry.name)
        if problem is not None:
            logger.error("%s", problem)
            answer = failure(problem, model.error_status)
            self.answers.update(dict.fromkeys(requests.positions, answer))
            return _Failure(answer, location_of(problem), "", "")
        if requests.parts:
            results = tensor_responses(
                results, requests.parts, context, model.version, pieces.begun
            )
        answers = encode_answers(results, context, model.max_response_size, model.error_status)
        self.answers.update(zip(requests.positions, answers, strict=True))
        if model.ceiling.size is not None and model.ceiling.fitted(len(requests.rows)):
            report_ceiling(model)
        return None

    def _on_failure(
        self, error: BaseException, requests: RequestLists, begun: set[int]
    ) -> _Failure:
        """Answer and log the requests that cannot be tried again; the others stay open.

        Requests whose response has begun cannot be tried again.
        """
        model, positions = self._model, requests.positions
        if isinstance(error, ClientsGone):
            logger.info("the handler is stopped: all clients of its batch have disconnected")
            self.answers.update(
                {
                    position: GONE
                    for position in range(len(self._items))
                    if position not in self.answers
                }
            )
            self.over = True
            return _Failure(GONE, location_of(error), "", "")
        answer, location, text = (
            failure(error, model.error_status),
            location_of(error),
            describe_error(error),
        )
        if len(positions) == 1:
            error, answer = failure_of(
                error, requests.metas[0], self._items[positions[0]][2], model.error_status
            )
        # The client's fault is unlike any other, as it tells nothing about the handler.
        if answer[0] < 500:
            location = location._replace(line=-positions[0])
        if isinstance(error, BadRows) and self._refuse(error, positions):
            self.answers.update(
                {positions[idx]: answer for idx in begun if idx not in error.faults}
            )
            unanswered = [
                position
                for idx, position in enumerate(positions)
                if idx not in error.faults and idx not in begun
            ]
            return _Failure(answer, location, text, "", unanswered=unanswered, named=True)
        if isinstance(error, InvalidInput) and (len(positions) == 1 or not model.retry):
            self.answers.update(dict.fromkeys(positions, answer))
            return _Failure(answer, location, text, "")
        memory = is_out_of_device_memory(error)
        self.lost = self.lost or is_device_lost(error)
        unanswered = (
            [position for idx, position in enumerate(positions) if idx not in begun]
            if len(positions) > 1 and model.retry
            else []
        )
        if self.lost:
            unanswered = []
        if memory and len(positions) > 1:
            note_out_of_memory(model, len(positions), bool(unanswered))
        elif unanswered and not self._is_retried and not isinstance(error, InvalidInput):
            self._is_retried = True  # The log has it once, not for each part of the batch.
            logger.warning(
                "the handler failed for a batch of %d requests; %d of them are retried"
                " separately: %s",
                len(positions),
                len(unanswered),
                text,
            )
        if len(unanswered) == len(positions):
            trace = "" if memory else outline(error)
            return _Failure(answer, location, text, trace, memory, unanswered)
        ended = [idx for idx, position in enumerate(positions) if position not in unanswered]
        log_failure([requests.metas[idx].partition("\r\n")[0] for idx in ended], error)
        self.answers.update(dict.fromkeys([positions[idx] for idx in ended], answer))
        return _Failure(answer, location, text, "", memory, unanswered)

    def _refuse(self, error: BadRows, positions: list[int]) -> bool:
        """Answer the bad rows.

        Returns:
            False if the handler named none of its rows, so that another call would change nothing.
        """
        if not error.faults or not all(idx in range(len(positions)) for idx in error.faults):
            return False
        for idx, message in error.faults.items():
            code = error.error_code
            kind = BadRequest.type if code == 400 else "InternalServerException"
            self.answers[positions[idx]] = (code, JSON_HEADER, error_body(code, kind, message))
        return True

    def _answer_in_parts(self, positions: list[int], first: _Failure | None) -> None:
        """Call the handler again, in parts. See `recovery`.

        The rows are read again, since the handler may have changed them.
        """
        model = self._model
        search = Search(model.ceiling, model.response_timeout)
        last: _Failure | None = None
        now = time.monotonic()
        longest = now - self._began
        if first is None:
            search.again(positions)  # The batch is only cut, since it is too large.
        else:
            last = self._report(search, positions, first, last)
        while not self.over and (
            part := (
                search.next(now - self._began, longest) if last is not None else search.next(0, 0)
            )
        ):
            began = now
            problem = self._attempt(read_requests(self._items, part, model, self.answers))
            now = time.monotonic()
            longest = max(longest, now - began)
            if problem is None:
                search.succeeded()
            elif self.over:
                return
            else:
                last = self._report(search, part, problem, last)
        if search.given_up and last is not None:
            logger.error(_GIVEN_UP, len(search.given_up), last.trace or last.text)
            self.answers.update(dict.fromkeys(search.given_up, last.answer))

    def _report(
        self, search: Search, positions: list[int], problem: _Failure, last: _Failure | None
    ) -> _Failure | None:
        """Record in the search how a call failed.

        Returns:
            The failure of the requests that are not tried any more.
        """
        unanswered = problem.unanswered
        if problem.named:
            search.again(unanswered)
            return last
        if problem.memory and unanswered:
            free_device_memory()
            search.again(unanswered)  # The new ceiling cuts them.
        elif len(unanswered) > 1:
            search.failed(unanswered, problem.location)
        elif unanswered:
            search.again(unanswered)  # The responses of all others had begun.
        elif len(positions) == 1:
            search.failed(positions, problem.location)
        if self.lost:
            search.give_up()
        return problem


def note_out_of_memory(model: ServedModel, size: int, again: bool) -> None:
    """Lower the ceiling after a batch did not fit, and log it.

    Args:
        model: The model.
        size: The size of the batch.
        again: Whether its requests are retried.
    """
    model.ceiling.failed(size)
    text = (
        "%d requests do not fit the device's memory together: from now on the handler gets at most"
        " %d%s"
    )
    logger.warning(text, size, model.ceiling.size, "; these are retried" if again else "")
    if again:
        model.metrics.add_counter(
            "tsx_oom_retries_total", 1, dimensions=[Dimension("worker", model.worker)]
        )
    report_ceiling(model)


def report_ceiling(model: ServedModel) -> None:
    """Report the ceiling as a metric; 0 means that there is none."""
    labels = [Dimension("worker", model.worker)]
    model.metrics.add_metric(
        "tsx_batch_ceiling", model.ceiling.size or 0, "count", None, labels, MetricTypes.GAUGE
    )


def free_device_memory() -> None:
    """Free the memory of a call that failed.

    Its objects may be in reference cycles, and torch caches freed memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
