"""Runs one batch: parses the bodies, calls the handler, encodes its results.

Whatever a handler does, each request gets an answer.
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
    encode_answers,
    failure,
    failure_of,
    is_device_lost,
    is_out_of_device_memory,
    mismatch,
    streamed_headers,
)
from tsx_runtime.worker.codecs.v2_binary import OutputRequest, as_row, tensor_responses
from tsx_runtime.worker.diagnostics.failures import log_failure
from tsx_runtime.worker.diagnostics.tracebacks import outline
from tsx_runtime.worker.exceptions import BadRows, ClientsGone, InvalidInput, in_words
from tsx_runtime.worker.execution.recovery import Ceiling, Place, Search, place_of
from tsx_runtime.worker.execution.step_times import Laps
from tsx_runtime.worker.execution.thread_tuning import ThreadTuning
from tsx_runtime.worker.handler_api.context import BatchState, Context, SendPiece
from tsx_runtime.worker.handler_api.loader import Coroutines, LoadedHandler
from tsx_runtime.worker.handler_api.metrics import Dimension, Metrics, MetricTypes, PredictionTime

WISHES = (
    "\r\nexplain: true\r\n",
    "\r\ndescribe: true\r\n",
)  # headers, as they stand in a request's meta in lower case

_GIVEN_UP = (
    "%d more requests of the batch fail without a retry: those retried failed alike, or time is"
    " nearly over. %s"
)

logger = logging.getLogger("tsx.worker")


class ServedModel(NamedTuple):
    """A loaded model, and the settings of its batches."""

    entry: LoadedHandler
    context: Context
    coroutines: Coroutines
    decode: bool
    max_response_size: int
    ceiling: Ceiling
    metrics: Metrics
    retry: bool = True  # whether a batch that failed is tried again in parts
    response_timeout: float = 120.0  # seconds
    worker: str = ""  # its id, as metrics show it
    # whether this process is the whole worker: ranks of a group have to do the same in the same
    # order
    alone: bool = True
    prediction_time: PredictionTime | None = None
    version: str = ""
    enveloped: bool = (
        False  # an envelope reads the protocol of a request's body; else its tensors are the row
    )
    mode: str = "batch"  # as in the load order
    error_status: int = 500  # of what is the handler's fault
    # whether a streaming handler is stopped once all clients of its batch have disconnected
    stops: bool = False
    threads: ThreadTuning | None = None  # None: their number stays as it is
    has_steps: bool = True  # whose time is measured (`step_times.watch`)
    is_builtin: bool = False  # A handler of tsx itself takes no field twice.
    cost: Callable[[Any], float] | None = (
        None  # the handler's, of one request; None where batches have no limit of it
    )
    max_cost: int = 0


class Outcome(NamedTuple):
    answers: list[Answer]
    device_lost: bool


class RequestLists(NamedTuple):
    """The requests of a batch that the handler is called with, as parallel lists."""

    positions: list[int]  # in the batch
    metas: list[str]
    rows: list[dict[str, Any]]
    parts: dict[int, dict[str, dict[str, str]]]  # by index in these lists


class PreparedBatch(NamedTuple):
    """A batch that was preprocessed while the one before it ran."""

    requests: RequestLists
    refused: dict[int, Answer]
    state: BatchState
    finish: Callable[[], Any]  # the other steps; raises the error of the first ones
    laps: Laps  # of the first


class _Failure(NamedTuple):
    """How a call failed, without the exception, which would keep the handler's objects in
    memory.
    """

    answer: Answer
    place: Place
    words: str
    trace: str  # empty where it is in the log already
    memory: bool = False
    left: Sequence[int] = ()  # positions that are not answered yet, to be tried again
    named: bool = False  # the handler named the bad rows, so the others are not at fault


class Pieces:
    """Sends parts of answers, by positions in the batch, and remembers which answers have begun."""

    def __init__(self, positions: list[int], send: SendPiece, limit: int) -> None:
        self._positions = positions
        self._send = send
        self._limit = limit
        self.begun: set[int] = set()  # in the handler's data

    def send(self, idx: int, headers: Buffer, body: Buffer) -> None:
        check_piece(body, self._limit)
        position = self._positions[idx]
        self._send(position, b"" if idx in self.begun else streamed_headers(headers), body)
        self.begun.add(idx)


def send_nowhere(position: int, headers: Buffer, body: Buffer) -> None:
    """Drop a part of a streamed answer."""


def check_piece(body: Buffer, limit: int) -> None:
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
    """`began`: time.monotonic(), where the caller knows it."""
    batch = _Batch(model, items, send, time.monotonic() if began is None else began)
    if ahead is not None:
        batch.answers.update(ahead.refused)
        batch.answer(ahead.requests, ahead)
    else:
        requests = read_requests(items, range(len(items)), model, batch.answers)
        for group in groups(requests) if len(items) > 1 else [requests]:
            for part in (
                [group] if model.cost is None else _by_cost(model, group, model.cost, batch.answers)
            ):
                batch.answer(part)
    model.context.end()
    answers = batch.answers
    return Outcome([answers[position] for position in range(len(items))], batch.lost)


def read_requests(
    items: Sequence[Item], positions: Iterable[int], model: ServedModel, refused: dict[int, Answer]
) -> RequestLists:
    requests = RequestLists([], [], [], {})
    kept, metas, rows, all_parts = requests
    decode = model.decode
    for position in positions:
        _, meta, body = items[position]
        text = str(meta, "latin-1")
        try:
            inputs, form = read_row(text, body, decode)
            if form is not None and (
                form or isinstance(form, OutputRequest)
            ):  # compiled code takes each empty dict for false
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
                    inputs = as_row(inputs)
        except BadRequest as error:
            refused[position] = failure(error)
            continue
        except Exception as error:  # the request's boundary: no request may end the worker
            logger.error("the request %s cannot be read", text.partition("\r\n")[0], exc_info=error)
            refused[position] = failure(error, model.error_status)
            continue
        kept.append(position)
        metas.append(text)
        rows.append(inputs)
    return requests


def groups(requests: RequestLists) -> list[RequestLists]:
    """Handlers check only the first request of a batch for explain or describe, so such a request
    is a batch of its own.
    """
    if not may_ask_explain("".join(requests.metas)):  # one check for all: hardly any batch has one
        return [requests]
    alone = [
        idx
        for idx, meta in enumerate(requests.metas)
        if any(wish in meta.lower() for wish in WISHES)
    ]
    others = [idx for idx in range(len(requests.metas)) if idx not in alone]
    return [
        _only(requests, group) for group in ([others] if others else []) + [[idx] for idx in alone]
    ]


def _by_cost(
    model: ServedModel,
    requests: RequestLists,
    cost_of: Callable[[Any], float],
    refused: dict[int, Answer],
) -> list[RequestLists]:
    """Parts that cost no more than the limit, or are one request.

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
        except Exception as error:  # the boundary to a user's code
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
        else [_only(requests, part) for part in parts]
    )


def may_ask_explain(meta: str) -> bool:
    """Whether an explanation or a description may be requested: a quick check of one request's
    meta, or of several.
    """
    return ": True\r\n" in meta


def _only(requests: RequestLists, kept: Sequence[int]) -> RequestLists:
    positions, metas, rows, forms = requests
    return RequestLists(
        [positions[idx] for idx in kept],
        [metas[idx] for idx in kept],
        [rows[idx] for idx in kept],
        {new: forms[old] for new, old in enumerate(kept) if old in forms},
    )


class _Batch:
    """The answers of one batch while they are collected."""

    __slots__ = ("_began", "_is_retried", "_items", "_model", "_send", "answers", "lost", "over")

    def __init__(
        self, model: ServedModel, items: Sequence[Item], send: SendPiece, began: float
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.lost = False  # whether the device is
        self.over = False  # whether all clients have disconnected
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
            self._in_parts(requests.positions, None)
        elif (problem := self._attempt(requests, ahead)) is not None and problem.left:
            self._in_parts(requests.positions, problem)

    def _attempt(
        self, requests: RequestLists, ahead: PreparedBatch | None = None
    ) -> _Failure | None:
        """Call the handler once. None where its result answers all requests."""
        model, context = self._model, self._model.context
        pieces = Pieces(requests.positions, self._send, model.max_response_size)
        try:
            if ahead is None:
                context.begin(requests.metas, requests.parts, pieces.send)
                rows = list(requests.rows)  # the handler's own list: some take the rows out of it
                results = model.coroutines.finish(model.entry.call(rows, context))
            else:
                context.resume(ahead.state, pieces.send)
                results = ahead.finish()
        # the boundary to a user's code: even SystemExit must not end the worker unanswered
        except BaseException as error:
            return self._failed(error, requests, pieces.begun)
        problem = mismatch(results, len(requests.rows), model.entry.name)
        if problem is not None:
            logger.error("%s", problem)
            answer = failure(problem, model.error_status)
            self.answers.update(dict.fromkeys(requests.positions, answer))
            return _Failure(answer, place_of(problem), "", "")
        if requests.parts:
            results = tensor_responses(
                results, requests.parts, context, model.version, pieces.begun
            )
        answers = encode_answers(results, context, model.max_response_size, model.error_status)
        self.answers.update(zip(requests.positions, answers, strict=True))
        if model.ceiling.size is not None and model.ceiling.fitted(len(requests.rows)):
            tell_ceiling(model)
        return None

    def _failed(self, error: BaseException, requests: RequestLists, begun: set[int]) -> _Failure:
        """Requests that can be tried again stay open; the others, and those whose answer has begun,
        are answered and logged.
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
            return _Failure(GONE, place_of(error), "", "")
        answer, place, words = failure(error, model.error_status), place_of(error), in_words(error)
        if len(positions) == 1:
            error, answer = failure_of(
                error, requests.metas[0], self._items[positions[0]][2], model.error_status
            )
        if (
            answer[0] < 500
        ):  # the client's fault: unlike any other, as it says nothing of the handler
            place = place._replace(line=-positions[0])
        if isinstance(error, BadRows) and self._refuse(error, positions):
            self.answers.update(
                {positions[idx]: answer for idx in begun if idx not in error.faults}
            )
            left = [
                position
                for idx, position in enumerate(positions)
                if idx not in error.faults and idx not in begun
            ]
            return _Failure(answer, place, words, "", left=left, named=True)
        if isinstance(error, InvalidInput) and (len(positions) == 1 or not model.retry):
            self.answers.update(dict.fromkeys(positions, answer))
            return _Failure(answer, place, words, "")
        memory = is_out_of_device_memory(error)
        self.lost = self.lost or is_device_lost(error)
        left = (
            [position for idx, position in enumerate(positions) if idx not in begun]
            if len(positions) > 1 and model.retry
            else []
        )
        if self.lost:
            left = []
        if memory and len(positions) > 1:
            note_out_of_memory(model, len(positions), bool(left))
        elif left and not self._is_retried and not isinstance(error, InvalidInput):
            self._is_retried = True  # once for the batch, not for each of its parts
            logger.warning(
                "the handler failed for a batch of %d requests; %d of them are retried"
                " separately: %s",
                len(positions),
                len(left),
                words,
            )
        if len(left) == len(positions):
            trace = "" if memory else outline(error)
            return _Failure(answer, place, words, trace, memory, left)
        ended = [idx for idx, position in enumerate(positions) if position not in left]
        log_failure([requests.metas[idx].partition("\r\n")[0] for idx in ended], error)
        self.answers.update(dict.fromkeys([positions[idx] for idx in ended], answer))
        return _Failure(answer, place, words, "", memory, left)

    def _refuse(self, error: BadRows, positions: list[int]) -> bool:
        """Answer the bad rows.

        False when the handler named none of its rows, so that calling it again would change
        nothing.
        """
        if not error.faults or not all(idx in range(len(positions)) for idx in error.faults):
            return False
        for idx, message in error.faults.items():
            code = error.error_code
            kind = BadRequest.type if code == 400 else "InternalServerException"
            self.answers[positions[idx]] = (code, JSON_HEADER, error_body(code, kind, message))
        return True

    def _in_parts(self, whole: list[int], first: _Failure | None) -> None:
        """Call the handler again, in parts and with rows read again, since it may have changed
        them. See `recovery`.
        """
        model = self._model
        search = Search(model.ceiling, model.response_timeout)
        last: _Failure | None = None
        now = time.monotonic()
        longest = now - self._began
        if first is None:
            search.again(whole)  # too large for the device's memory: it is only cut
        else:
            last = self._report(search, whole, first, last)
        while not self.over and (
            positions := (
                search.next(now - self._began, longest) if last is not None else search.next(0, 0)
            )
        ):
            began = now
            problem = self._attempt(read_requests(self._items, positions, model, self.answers))
            now = time.monotonic()
            longest = max(longest, now - began)
            if problem is None:
                search.succeeded()
            elif self.over:
                return
            else:
                last = self._report(search, positions, problem, last)
        if search.given_up and last is not None:
            logger.error(_GIVEN_UP, len(search.given_up), last.trace or last.words)
            self.answers.update(dict.fromkeys(search.given_up, last.answer))

    def _report(
        self, search: Search, positions: list[int], problem: _Failure, last: _Failure | None
    ) -> _Failure | None:
        """Record in the search how a call failed.

        Returns the failure of the requests that are not tried any more.
        """
        left = problem.left
        if problem.named:
            search.again(left)
            return last
        if problem.memory and left:
            free_device_memory()
            search.again(left)  # to be cut by the new ceiling
        elif len(left) > 1:
            search.failed(left, problem.place)
        elif left:
            search.again(left)  # the answers of all others had begun
        elif len(positions) == 1:
            search.failed(positions, problem.place)
        if self.lost:
            search.give_up()
        return problem


def note_out_of_memory(model: ServedModel, size: int, again: bool) -> None:
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
    tell_ceiling(model)


def tell_ceiling(model: ServedModel) -> None:
    """As a metric; 0 where there is none."""
    labels = [Dimension("worker", model.worker)]
    model.metrics.add_metric(
        "tsx_batch_ceiling", model.ceiling.size or 0, "count", None, labels, MetricTypes.GAUGE
    )


def free_device_memory() -> None:
    """The exception is gone, but its objects may be in reference cycles, and torch caches freed
    memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
