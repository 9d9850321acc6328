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

EXPLAIN, DESCRIBE = "\r\nexplain: True\r\n", "\r\ndescribe: True\r\n"  # headers, as they stand in a request's meta

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

    def only(self, kept: Sequence[int]) -> _Requests:
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
    lost = False
    for group in _groups(requests) if len(items) > 1 else [requests]:
        lost = _answer(model, group, answers, send) or lost
    model.context.end()
    return Outcome([answers[position] for position in range(len(answers))], lost)


def _groups(requests: _Requests) -> list[_Requests]:
    """Handlers ask the first request of a batch whether to explain or describe: one that wants that is a batch of its own."""
    joined = "".join(requests.metas)  # one look for all, and first for a letter: nearly no batch holds one
    if "T" not in joined or (EXPLAIN not in joined and DESCRIBE not in joined):
        return [requests]
    alone = [idx for idx, meta in enumerate(requests.metas) if EXPLAIN in meta or DESCRIBE in meta]
    others = [idx for idx in range(len(requests.metas)) if idx not in alone]
    return [requests.only(group) for group in ([others] if others else []) + [[idx] for idx in alone]]


def _answer(model: Model, requests: _Requests, answers: dict[int, Answer], send: SendPiece) -> bool:
    """Call the handler, again without the rows that it refuses. Whether the device is lost."""
    while requests.rows:
        pieces = _Pieces(requests.positions, send, model.max_response_size)
        model.context.begin(requests.metas, requests.parts, pieces.send)
        try:
            rows = list(requests.rows)  # the handler's own list: some take the rows out of it
            results = model.coroutines.finish(model.entry.call(rows, model.context))
        except BadRows as error:
            if pieces or not _refuse(error, requests, answers):
                return _fail(error, requests, answers)
            requests = requests.only([idx for idx in range(len(requests.rows)) if idx not in error.faults])
            continue
        except BaseException as error:  # the boundary to a user's code: even SystemExit must not end the worker unanswered
            return _fail(error, requests, answers)
        problem = mismatch(results, len(requests.rows), model.entry.name)
        if problem is not None:
            logger.error("%s", problem)
            return _fail(problem, requests, answers, logged=True)
        for position, answer in zip(requests.positions, encode_answers(results, model.context, model.max_response_size), strict=True):
            answers[position] = answer
        break
    return False


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


def _fail(error: BaseException, requests: _Requests, answers: dict[int, Answer], *, logged: bool = False) -> bool:
    if not logged:
        ids = ", ".join(meta.partition("\r\n")[0] for meta in requests.metas)
        logger.error("the handler failed for the requests %s", ids, exc_info=error)
    answers.update(dict.fromkeys(requests.positions, failure(error)))
    return is_device_lost(error)
