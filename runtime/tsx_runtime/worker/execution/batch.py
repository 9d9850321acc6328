"""The processing of one batch: parse the bodies, call the handler, encode its results.

Each request gets a response, even if the handler fails.
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
from tsx_runtime.worker.execution.recovery import (
    Ceiling,
    FailureLocation,
    RetrySearch,
    find_location,
)
from tsx_runtime.worker.execution.step_times import Laps
from tsx_runtime.worker.execution.thread_tuning import ThreadTuning
from tsx_runtime.worker.handler_api.context import BatchState, Context, SendPiece
from tsx_runtime.worker.handler_api.loader import Coroutines, LoadedHandler
from tsx_runtime.worker.handler_api.metrics import Dimension, Metrics, MetricTypes, PredictionTime

# The headers that ask for explanations and descriptions, as lower-case lines of a request's meta.
EXPLAIN_HEADER_LINES = ("\r\nexplain: true\r\n", "\r\ndescribe: true\r\n")

_GIVEN_UP_MESSAGE = (
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
        max_response_size: The largest response, in bytes.
        ceiling: The limit of the batch size, so that batches fit the device's memory.
        metrics: The metrics of the worker.
        retry: Whether a failed batch is tried again in parts.
        response_timeout: The time limit of a batch, in seconds.
        worker: The id of the worker in metrics.
        is_single_process: Whether this process is the whole worker. The ranks of a group must all
            make the same calls in the same order.
        prediction_time: The metric of prediction times.
        version: The version of the model.
        has_tensor_envelope: Whether an envelope converts tensors. If not, they become the row.
        mode: How requests are run: "batch", "continuous" or "async".
        error_status: The status of the response when the handler fails.
        stops_for_gone_clients: Whether a streaming handler is stopped once all clients of its batch
            have disconnected.
        thread_tuning: The tuning of the number of torch's threads; None to keep their number.
        has_steps: Whether the handler has steps whose time is measured
            (`step_times.measure_steps`).
        is_builtin: Whether it is a handler of tsx that accepts each field only once.
        cost: A function of the handler that returns a request's cost; None if costs are not
            limited.
        max_cost: The largest cost of a batch.
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
    is_single_process: bool = True
    prediction_time: PredictionTime | None = None
    version: str = ""
    has_tensor_envelope: bool = False
    mode: str = "batch"
    error_status: int = 500
    stops_for_gone_clients: bool = False
    thread_tuning: ThreadTuning | None = None
    has_steps: bool = True
    is_builtin: bool = False
    cost: Callable[[Any], float] | None = None
    max_cost: int = 0


class Outcome(NamedTuple):
    """The responses of a batch, in the order of its requests."""

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
    finish: Callable[[], Any]  # runs the other steps, or raises the error of `preprocess`
    laps: Laps  # the times of `preprocess`


class _Failure(NamedTuple):
    """A failed call, without its exception, which would keep the handler's objects alive.

    Attributes:
        answer: The response for the requests of the call.
        location: The place where the call failed.
        text: The text of the error.
        trace: The traceback; empty if it was logged already.
        is_out_of_memory: Whether the device was out of memory.
        unanswered: The positions without a response, to be tried again.
        has_bad_rows: Whether the handler raised BadRows, so that the others are not at fault.
    """

    answer: Answer
    location: FailureLocation
    text: str
    trace: str
    is_out_of_memory: bool = False
    unanswered: Sequence[int] = ()
    has_bad_rows: bool = False


class Pieces:
    """A sender of parts of responses, which records the responses that have started."""

    def __init__(self, positions: list[int], send: SendPiece, limit: int) -> None:
        self._positions = positions
        self._send = send
        self._limit = limit
        self.started: set[int] = set()  # indices in the handler's data

    def send(self, idx: int, headers: Buffer, body: Buffer) -> None:
        check_piece(body, self._limit)
        position = self._positions[idx]
        self._send(position, b"" if idx in self.started else streamed_headers(headers), body)
        self.started.add(idx)


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
    prepared: PreparedBatch | None = None,
    started_at: float | None = None,
) -> Outcome:
    """Run a batch, and return the response of each request.

    Args:
        model: The model.
        items: The requests.
        send: Sends a part of a response.
        prepared: The preprocessed batch, if this was done ahead.
        started_at: The start, as `time.monotonic()`, if the caller knows it.
    """
    batch = _Batch(model, items, send, time.monotonic() if started_at is None else started_at)
    if prepared is not None:
        batch.answers.update(prepared.refused)
        batch.answer(prepared.requests, prepared)
    else:
        requests = read_requests(items, range(len(items)), model, batch.answers)
        for group in split_explain_requests(requests) if len(items) > 1 else [requests]:
            for part in (
                [group]
                if model.cost is None
                else _split_by_cost(model, group, model.cost, batch.answers)
            ):
                batch.answer(part)
    model.context.end()
    answers = batch.answers
    return Outcome([answers[position] for position in range(len(items))], batch.device_lost)


def read_requests(
    items: Sequence[Item], positions: Iterable[int], model: ServedModel, refused: dict[int, Answer]
) -> RequestLists:
    """Read requests as rows, and put the responses to invalid ones into `refused`."""
    requests = RequestLists([], [], [], {})
    read_positions, metas, rows, parts_by_index = requests
    decode = model.decode
    for position in positions:
        _, meta, body = items[position]
        meta_text = str(meta, "latin-1")
        try:
            inputs, parts = read_row(meta_text, body, decode)
            # Compiled code treats every empty dict as false, even an OutputRequest.
            if parts is not None and (parts or isinstance(parts, OutputRequest)):
                if model.is_builtin and (
                    name := next((name for name, part in parts.items() if "values" in part), None)
                ):
                    message = (
                        f"The field {name!r} comes several times, and {model.entry.name} takes it"
                        " once."
                    )
                    raise BadRequest(f"{message} Send a request for each value.")
                parts_by_index[len(rows)] = parts
                if isinstance(parts, OutputRequest) and not model.has_tensor_envelope:
                    inputs = row_of_tensors(inputs)
        except BadRequest as error:
            refused[position] = failure(error)
            continue
        except Exception as error:  # An invalid request must not end the worker.
            logger.error(
                "the request %s cannot be read", meta_text.partition("\r\n")[0], exc_info=error
            )
            refused[position] = failure(error, model.error_status)
            continue
        read_positions.append(position)
        metas.append(meta_text)
        rows.append(inputs)
    return requests


def split_explain_requests(requests: RequestLists) -> list[RequestLists]:
    """Split off the requests for explanations or descriptions, each as a batch of its own.

    Otherwise a handler would miss them, since it checks only the first request of a batch.
    """
    # One quick check for the whole batch, since hardly any batch has such a request.
    if not may_ask_explain("".join(requests.metas)):
        return [requests]
    explain_indexes = [
        idx
        for idx, meta in enumerate(requests.metas)
        if any(header in meta.lower() for header in EXPLAIN_HEADER_LINES)
    ]
    prediction_indexes = [idx for idx in range(len(requests.metas)) if idx not in explain_indexes]
    return [
        _select(requests, group)
        for group in ([prediction_indexes] if prediction_indexes else [])
        + [[idx] for idx in explain_indexes]
    ]


def _split_by_cost(
    model: ServedModel,
    requests: RequestLists,
    cost_of: Callable[[Any], float],
    refused: dict[int, Answer],
) -> list[RequestLists]:
    """Split requests into groups of at most the largest cost, or of a single request.

    The total cost is reported, so that the front end forms batches within the limit.
    """
    index_groups: list[list[int]] = [[]]
    total = remaining_cost = 0.0
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
        if cost > remaining_cost and index_groups[-1]:
            index_groups.append([])
        remaining_cost = (remaining_cost if index_groups[-1] else model.max_cost) - cost
        index_groups[-1].append(idx)
        total += cost
    model.metrics.add_counter(BATCH_COST, total, dimensions=[Dimension("worker", model.worker)])
    return (
        [requests]
        if len(index_groups[0]) == len(requests.rows)
        else [_select(requests, group) for group in index_groups]
    )


def may_ask_explain(meta: str) -> bool:
    """Check quickly whether metas may contain a request to explain or describe."""
    return ": True\r\n" in meta


def _select(requests: RequestLists, indices: Sequence[int]) -> RequestLists:
    positions, metas, rows, parts = requests
    return RequestLists(
        [positions[idx] for idx in indices],
        [metas[idx] for idx in indices],
        [rows[idx] for idx in indices],
        {new_idx: parts[old_idx] for new_idx, old_idx in enumerate(indices) if old_idx in parts},
    )


class _Batch:
    """A batch in progress, with the responses that it has so far."""

    __slots__ = (
        "_has_logged_retry",
        "_items",
        "_model",
        "_send",
        "_started_at",
        "answers",
        "device_lost",
        "is_over",
    )

    def __init__(
        self, model: ServedModel, items: Sequence[Item], send: SendPiece, started_at: float
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.device_lost = False
        self.is_over = False  # All clients have disconnected.
        self._model = model
        self._items = items
        self._send = send
        self._started_at = started_at
        self._has_logged_retry = False

    def answer(self, requests: RequestLists, prepared: PreparedBatch | None = None) -> None:
        size = self._model.ceiling.size
        if not requests.rows or self.is_over:
            return
        if size is not None and len(requests.rows) > size:
            self._answer_in_parts(requests.positions, None)
        elif (
            call_failure := self._attempt(requests, prepared)
        ) is not None and call_failure.unanswered:
            self._answer_in_parts(requests.positions, call_failure)

    def _attempt(
        self, requests: RequestLists, prepared: PreparedBatch | None = None
    ) -> _Failure | None:
        """Call the handler once; return None if its result answers all requests."""
        model, context = self._model, self._model.context
        pieces = Pieces(requests.positions, self._send, model.max_response_size)
        try:
            if prepared is None:
                context.begin(requests.metas, requests.parts, pieces.send)
                rows = list(requests.rows)  # Some handlers remove rows from their list.
                results = model.coroutines.finish(model.entry.call(rows, context))
            else:
                context.resume(prepared.state, pieces.send)
                results = prepared.finish()
        # Even SystemExit from a user's code must not end the worker without a response.
        except BaseException as error:
            return self._on_failure(error, requests, pieces.started)
        wrong_results = check_results(results, len(requests.rows), model.entry.name)
        if wrong_results is not None:
            logger.error("%s", wrong_results)
            answer = failure(wrong_results, model.error_status)
            self.answers.update(dict.fromkeys(requests.positions, answer))
            return _Failure(answer, find_location(wrong_results), "", "")
        if requests.parts:
            results = tensor_responses(
                results, requests.parts, context, model.version, pieces.started
            )
        answers = encode_answers(results, context, model.max_response_size, model.error_status)
        self.answers.update(zip(requests.positions, answers, strict=True))
        if model.ceiling.size is not None and model.ceiling.record_success(len(requests.rows)):
            report_ceiling(model)
        return None

    def _on_failure(
        self, error: BaseException, requests: RequestLists, started_responses: set[int]
    ) -> _Failure:
        """Answer and log the requests that cannot be tried again.

        Others remain unanswered. A request whose response has started cannot be tried again.
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
            self.is_over = True
            return _Failure(GONE, find_location(error), "", "")
        answer, location, text = (
            failure(error, model.error_status),
            find_location(error),
            describe_error(error),
        )
        if len(positions) == 1:
            error, answer = failure_of(
                error, requests.metas[0], self._items[positions[0]][2], model.error_status
            )
        # A client's error does not show that the handler is broken. Therefore its location, which
        # contains the position, equals no other.
        if answer[0] < 500:
            location = location._replace(line=-positions[0])
        if isinstance(error, BadRows) and self._refuse(error, positions):
            self.answers.update(
                {positions[idx]: answer for idx in started_responses if idx not in error.faults}
            )
            unanswered = [
                position
                for idx, position in enumerate(positions)
                if idx not in error.faults and idx not in started_responses
            ]
            return _Failure(answer, location, text, "", unanswered=unanswered, has_bad_rows=True)
        if isinstance(error, InvalidInput) and (len(positions) == 1 or not model.retry):
            self.answers.update(dict.fromkeys(positions, answer))
            return _Failure(answer, location, text, "")
        is_out_of_memory = is_out_of_device_memory(error)
        self.device_lost = self.device_lost or is_device_lost(error)
        unanswered = (
            [position for idx, position in enumerate(positions) if idx not in started_responses]
            if len(positions) > 1 and model.retry
            else []
        )
        if self.device_lost:
            unanswered = []
        if is_out_of_memory and len(positions) > 1:
            lower_ceiling(model, len(positions), bool(unanswered))
        elif unanswered and not self._has_logged_retry and not isinstance(error, InvalidInput):
            # The failure is logged once, not for each part of the batch.
            self._has_logged_retry = True
            logger.warning(
                "the handler failed for a batch of %d requests; %d of them are retried"
                " separately: %s",
                len(positions),
                len(unanswered),
                text,
            )
        if len(unanswered) == len(positions):
            trace = "" if is_out_of_memory else outline(error)
            return _Failure(answer, location, text, trace, is_out_of_memory, unanswered)
        failed_indexes = [
            idx for idx, position in enumerate(positions) if position not in unanswered
        ]
        log_failure([requests.metas[idx].partition("\r\n")[0] for idx in failed_indexes], error)
        self.answers.update(dict.fromkeys([positions[idx] for idx in failed_indexes], answer))
        return _Failure(answer, location, text, "", is_out_of_memory, unanswered)

    def _refuse(self, error: BadRows, positions: list[int]) -> bool:
        """Answer the bad rows.

        Returns:
            False if the positions are not those of rows, so that another call would not help.
        """
        if not error.faults or not all(idx in range(len(positions)) for idx in error.faults):
            return False
        for idx, message in error.faults.items():
            code = error.error_code
            kind = BadRequest.type if code == 400 else "InternalServerException"
            self.answers[positions[idx]] = (code, JSON_HEADER, error_body(code, kind, message))
        return True

    def _answer_in_parts(self, positions: list[int], first_failure: _Failure | None) -> None:
        """Call the handler again with parts of the batch, as `recovery` decides.

        The rows are read again, since the handler may have changed them.
        """
        model = self._model
        search = RetrySearch(model.ceiling, model.response_timeout)
        last_failure: _Failure | None = None
        now = time.monotonic()
        longest_call_s = now - self._started_at
        if first_failure is None:
            search.retry(positions)  # The batch has not failed, but is larger than the ceiling.
        else:
            last_failure = self._report(search, positions, first_failure, last_failure)
        while not self.is_over and (
            part := (
                search.next(now - self._started_at, longest_call_s)
                if last_failure is not None
                else search.next(0, 0)
            )
        ):
            call_start = now
            call_failure = self._attempt(read_requests(self._items, part, model, self.answers))
            now = time.monotonic()
            longest_call_s = max(longest_call_s, now - call_start)
            if call_failure is None:
                search.record_success()
            elif self.is_over:
                return
            else:
                last_failure = self._report(search, part, call_failure, last_failure)
        if search.given_up and last_failure is not None:
            logger.error(
                _GIVEN_UP_MESSAGE, len(search.given_up), last_failure.trace or last_failure.text
            )
            self.answers.update(dict.fromkeys(search.given_up, last_failure.answer))

    def _report(
        self,
        search: RetrySearch,
        positions: list[int],
        call_failure: _Failure,
        last_failure: _Failure | None,
    ) -> _Failure | None:
        """Record a failed call in the search.

        Returns:
            The failure to report for requests that the search gives up.
        """
        unanswered = call_failure.unanswered
        if call_failure.has_bad_rows:
            search.retry(unanswered)
            return last_failure
        if call_failure.is_out_of_memory and unanswered:
            free_device_memory()
            search.retry(unanswered)  # The lowered ceiling splits them.
        elif len(unanswered) > 1:
            search.record_failure(unanswered, call_failure.location)
        elif unanswered:
            search.retry(unanswered)  # It did not fail alone: the other responses had started.
        elif len(positions) == 1:
            search.record_failure(positions, call_failure.location)
        if self.device_lost:
            search.give_up()
        return call_failure


def lower_ceiling(model: ServedModel, size: int, is_retried: bool) -> None:
    """Lower the ceiling after a batch has run out of memory, and log it.

    Args:
        model: The model.
        size: The size of the batch.
        is_retried: Whether its requests are tried again.
    """
    model.ceiling.record_failure(size)
    message = (
        "%d requests do not fit the device's memory together: from now on the handler gets at most"
        " %d%s"
    )
    logger.warning(message, size, model.ceiling.size, "; these are retried" if is_retried else "")
    if is_retried:
        model.metrics.add_counter(
            "tsx_oom_retries_total", 1, dimensions=[Dimension("worker", model.worker)]
        )
    report_ceiling(model)


def report_ceiling(model: ServedModel) -> None:
    """Report the ceiling as a metric, with 0 for no limit."""
    labels = [Dimension("worker", model.worker)]
    model.metrics.add_metric(
        "tsx_batch_ceiling", model.ceiling.size or 0, "count", None, labels, MetricTypes.GAUGE
    )


def free_device_memory() -> None:
    """Free the device memory of a failed call.

    Its tensors may be in reference cycles, and torch keeps freed memory in a cache.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
