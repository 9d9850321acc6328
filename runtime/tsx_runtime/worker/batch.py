"""One batch: parse the bodies, call the handler once, encode what it returned. Whatever a handler does, each request gets an answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from tsx_runtime.errors import BadRequest, error_body
from tsx_runtime.wire import Buffer, Item
from tsx_runtime.worker.answers import JSON_HEADER, Answer, encode_answers, failure, is_device_lost, mismatch
from tsx_runtime.worker.context import Context, SendPiece
from tsx_runtime.worker.exceptions import BadRows, PredictionException
from tsx_runtime.worker.loader import Coroutines, Entry
from tsx_runtime.worker.requests import read_row

logger = logging.getLogger("tsx.worker")


class Model(NamedTuple):
    """A loaded model, and what its batches need."""

    entry: Entry
    context: Context
    coroutines: Coroutines
    decode: bool
    max_response_size: int


class Outcome(NamedTuple):
    answers: list[Answer]
    device_lost: bool


class _Requests(NamedTuple):
    """Those of a batch that are still to be answered, each list in step."""

    positions: list[int]  # in the batch
    metas: list[str]
    rows: list[dict[str, Any]]
    parts: dict[int, dict[str, dict[str, str]]]  # by index in these lists

    def without(self, faults: dict[int, str]) -> _Requests:
        kept = [idx for idx in range(len(self.rows)) if idx not in faults]
        return _Requests(
            [self.positions[idx] for idx in kept],
            [self.metas[idx] for idx in kept],
            [self.rows[idx] for idx in kept],
            {new: self.parts[old] for new, old in enumerate(kept) if old in self.parts},
        )


class _Pieces:
    """Sends parts of answers, in terms of the batch, and remembers that some were sent."""

    def __init__(self, positions: list[int], send: SendPiece, limit: int) -> None:
        self._positions = positions
        self._send = send
        self._limit = limit
        self._begun: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._begun)

    def send(self, idx: int, headers: Buffer, body: Buffer) -> None:
        if len(body) > self._limit:
            raise PredictionException(f"A part of the answer has {len(body)} bytes, but max_response_size is {self._limit}.", 503)
        position = self._positions[idx]
        self._send(position, b"" if idx in self._begun else headers, body)
        self._begun.add(idx)


def answer_batch(model: Model, items: Sequence[Item], send: SendPiece) -> Outcome:
    requests, answers = _read(items, model.decode)
    while requests.rows:
        pieces = _Pieces(requests.positions, send, model.max_response_size)
        model.context.begin(requests.metas, requests.parts, pieces.send)
        try:
            results = model.coroutines.finish(model.entry.call(requests.rows, model.context))
        except BadRows as error:
            if pieces or not _refuse(error, requests, answers):
                return _failed(error, requests, answers)
            requests = requests.without(error.faults)
            continue
        except BaseException as error:  # the boundary to a user's code: even SystemExit must not end the worker unanswered
            return _failed(error, requests, answers)
        problem = mismatch(results, len(requests.rows), model.entry.name)
        if problem is not None:
            logger.error("%s", problem)
            return _failed(problem, requests, answers, logged=True)
        for position, answer in zip(requests.positions, encode_answers(results, model.context, model.max_response_size), strict=True):
            answers[position] = answer
        break
    return Outcome(_in_order(answers), False)


def _read(items: Sequence[Item], decode: bool) -> tuple[_Requests, dict[int, Answer]]:
    requests = _Requests([], [], [], {})
    refused: dict[int, Answer] = {}
    positions, metas, rows, all_parts = requests
    for position, (_, meta, body) in enumerate(items):
        text = str(meta, "latin-1")
        try:
            inputs, parts = read_row(text, body, decode)
        except BadRequest as error:
            refused[position] = failure(error)
            continue
        if parts:
            all_parts[len(rows)] = parts
        positions.append(position)
        metas.append(text)
        rows.append(inputs)
    return requests, refused


def _refuse(error: BadRows, requests: _Requests, answers: dict[int, Answer]) -> bool:
    """Answer the bad rows. False when the handler named none of its rows, so that calling it again would change nothing."""
    if not error.faults or not all(idx in range(len(requests.rows)) for idx in error.faults):
        return False
    for idx, message in error.faults.items():
        code = error.error_code
        kind = BadRequest.type if code == 400 else "InternalServerException"
        answers[requests.positions[idx]] = (code, JSON_HEADER, error_body(code, kind, message))
    return True


def _failed(error: BaseException, requests: _Requests, answers: dict[int, Answer], *, logged: bool = False) -> Outcome:
    if not logged:
        ids = ", ".join(meta.partition("\r\n")[0] for meta in requests.metas)
        logger.error("the handler failed for the requests %s", ids, exc_info=error)
    answer = failure(error)
    answers.update(dict.fromkeys(requests.positions, answer))
    return Outcome(_in_order(answers), is_device_lost(error))


def _in_order(answers: dict[int, Answer]) -> list[Answer]:
    return [answers[position] for position in range(len(answers))]
