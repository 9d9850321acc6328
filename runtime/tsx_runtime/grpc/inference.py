"""TorchServe's inference service: Ping, Predictions, and both kinds of streams (contract section
2).
"""

from __future__ import annotations

import asyncio
import re
import struct
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import NamedTuple

from google.protobuf.empty_pb2 import Empty

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.headers import Pair
from tsx_runtime.api.management.describe import is_healthy
from tsx_runtime.api.management.schemas import Health
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Answer, Route
from tsx_runtime.errors import BadRequest, ModelNotFound, ModelVersionNotFound, TsxError
from tsx_runtime.grpc.admission import Admissions
from tsx_runtime.grpc.calls import Context, PendingRequest, answer_parts, whole_answer
from tsx_runtime.grpc.protos.inference_pb2 import (
    PredictionResponse,
    PredictionsRequest,
    TorchServeHealthResponse,
)
from tsx_runtime.grpc.service import Ledger, Service
from tsx_runtime.grpc.statuses import CallRefused, Refusal, code_of, refusal
from tsx_runtime.wire import (
    INPUTS,
    MAX_COPIED_BYTES,
    SEQUENCE_END,
    SEQUENCE_ID,
    SEQUENCE_START,
    Body,
    Buffer,
    Parts,
    parse_header_block,
)

NAME = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MOST_PIECES = 1024
MOST_SEQUENCES = 10_000  # that one stream may have begun and not ended
AHEAD = 64  # requests of one stream that may be with the model at a time

_LENGTHS = struct.Struct("<IQ")
_BREAKS = re.compile(r"[\r\n\0]")
_CONTENT: Pair = (b"content-type", INPUTS)


class _Turn(NamedTuple):
    """One request of a stream."""

    sequence: str | None
    pending: PendingRequest | None
    refusal: Refusal | None = None  # where it did not get into a queue


class _Turns(NamedTuple):
    """The requests of a stream that are not answered yet, in their order; None after the last."""

    queue: asyncio.Queue[_Turn | None]
    room: asyncio.Semaphore


class Inference:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.longest = registry.settings.max_header_size

    def service(self, guard: Guard | None, ledger: Ledger, admissions: Admissions) -> Service:
        service = Service(NAME, guard, ledger, admissions)
        service.unary("Ping", self.ping, Empty, TorchServeHealthResponse, open_to_all=True)
        service.unary("Predictions", self.predictions, PredictionsRequest, PredictionResponse)
        service.stream("StreamPredictions", self.stream, PredictionsRequest, PredictionResponse)
        service.stream(
            "StreamPredictions2",
            self.stream2,
            PredictionsRequest,
            PredictionResponse,
            both_ways=True,
        )
        return service

    async def ping(self, request: Empty, context: Context) -> TorchServeHealthResponse:
        healthy = is_healthy(self.registry.models.values())
        return TorchServeHealthResponse(
            health=Health(status="Healthy" if healthy else "Unhealthy").model_dump_json(indent=2)
        )

    async def predictions(
        self, request: PredictionsRequest, context: Context
    ) -> PredictionResponse:
        with self._ask(request, context, _sequence_of(request)) as pending:
            answer, body = await whole_answer(context, pending)
        return PredictionResponse(
            prediction=body, sequence_id=self._answered_sequence(_sequence_of(request), answer)
        )

    async def stream(
        self, request: PredictionsRequest, context: Context
    ) -> AsyncGenerator[PredictionResponse, None]:
        with self._ask(request, context, _sequence_of(request)) as pending:
            async for answer, part in answer_parts(context, pending):
                yield PredictionResponse(
                    prediction=part,
                    sequence_id=self._answered_sequence(_sequence_of(request), answer),
                )

    async def stream2(
        self, requests: AsyncIterator[PredictionsRequest], context: Context
    ) -> AsyncGenerator[PredictionResponse, None]:
        turns = _Turns(asyncio.Queue(), asyncio.Semaphore(AHEAD))
        reader = asyncio.create_task(self._read(requests, context, turns))
        reader.add_done_callback(_look_at)
        try:
            while (turn := await turns.queue.get()) is not None:
                async with aclosing(self._answers(turn)) as responses:
                    async for response in responses:
                        yield response
                turns.room.release()
            await reader
        finally:
            reader.cancel()
            while not turns.queue.empty():
                if (turn := turns.queue.get_nowait()) is not None and turn.pending is not None:
                    turn.pending.leave()

    async def _read(
        self, requests: AsyncIterator[PredictionsRequest], context: Context, turns: _Turns
    ) -> None:
        """Put each request into its model's queue as it comes, so that those of one stream share
        batches.

        What names no sequence belongs, where the model is stateful, to one that is the stream's
        own.
        """
        seen: set[str] = set()
        own = f"ts-seq-{uuid.uuid4()}"
        try:
            async for request in requests:
                # no await between submitting it and queueing its turn: the end of the stream finds
                # it
                await turns.room.acquire()
                sequence = _sequence_of(request) or (own if self._is_stateful(request) else None)
                try:
                    if sequence not in seen and len(seen) >= MOST_SEQUENCES:
                        raise BadRequest(
                            f"The stream has {MOST_SEQUENCES} sequences that have not ended. End"
                            " some, or open another stream."
                        )
                    turn = _Turn(
                        sequence, self._ask(request, context, sequence, starts=sequence not in seen)
                    )
                except (TsxError, CallRefused) as error:
                    turn = _Turn(
                        sequence,
                        None,
                        refusal(error) if isinstance(error, TsxError) else error.refusal,
                    )
                turns.queue.put_nowait(turn)
                if sequence is not None and (sequence in seen or len(seen) < MOST_SEQUENCES):
                    (seen.discard if SEQUENCE_END in request.input else seen.add)(sequence)
        finally:
            turns.queue.put_nowait(None)

    async def _answers(self, turn: _Turn) -> AsyncGenerator[PredictionResponse, None]:
        """What one request of a stream yields; an error as a response of its own, since the others
        go on.
        """
        refused = turn.refusal
        if turn.pending is not None:
            with turn.pending as pending:
                try:
                    answer = await pending.answer()
                    async for part in answer.parts():
                        yield PredictionResponse(
                            prediction=part,
                            sequence_id=self._answered_sequence(turn.sequence, answer),
                        )
                    return
                except (TsxError, CallRefused) as error:
                    refused = refusal(error) if isinstance(error, TsxError) else error.refusal
        assert refused is not None
        status = {"code": refused.code.value[0], "message": refused.details}
        yield PredictionResponse(sequence_id=turn.sequence, status=status)

    def _ask(
        self,
        request: PredictionsRequest,
        context: Context,
        sequence: str | None,
        *,
        starts: bool = False,
    ) -> PendingRequest:
        """`starts`: the sequence begins with it.

        Inputs of the names that the marks of a sequence have are headers as well.
        """
        route = self._find(request)
        own: list[Pair] = [_CONTENT]
        if sequence:
            if _BREAKS.search(sequence):
                raise BadRequest(
                    f"The sequence_id {sequence[:100]!r} contains a line break or a NUL. Use"
                    " another id."
                )
            own.append(
                (SEQUENCE_ID.encode("latin-1"), sequence.encode())
            )  # UTF-8, in which ids that differ stay different
            if starts and SEQUENCE_START not in request.input:
                own.append((SEQUENCE_START.encode("latin-1"), b"true"))
        own += [
            (name.encode("latin-1"), _line(request.input[name]))
            for name in (SEQUENCE_START, SEQUENCE_END)
            if name in request.input
        ]
        size = sum(len(value) for _, value in own)
        if size > self.longest:
            text = (
                f"The sequence_id, {SEQUENCE_START} and {SEQUENCE_END} have {size} bytes together,"
                f" and may have {self.longest}"
            )
            raise BadRequest(
                f"{text} (max_header_size): they are headers. Use a shorter sequence_id."
            )
        return PendingRequest(
            context, route, own, body_of(request.input), self.registry.hidden_headers
        )

    def _is_stateful(self, request: PredictionsRequest) -> bool:
        """Whether one of the versions that may get it is."""
        found = self.registry.models.get(request.model_name)
        versions = [*found.versions.values()] if found is not None else []
        if request.model_version:
            with suppress(TsxError):
                versions = [self.registry.find(request.model_name, request.model_version)]
        return any(version.plan.strategy.sequences is not None for version in versions)

    def _answered_sequence(self, sequence: str | None, answer: Answer) -> str | None:
        """The sequence that the request belongs to, or that was made up for it."""
        if sequence is not None or not answer.headers:
            return sequence
        return next(
            (
                value
                for name, value in parse_header_block(answer.headers.decode("latin-1"))
                if name.lower() == SEQUENCE_ID
            ),
            None,
        )

    def _find(self, request: PredictionsRequest) -> Route:
        """TorchServe answers INTERNAL for a model that is not there, and its clients look for
        that.
        """
        if not request.model_name:
            raise BadRequest("Parameter model_name is required.")
        try:
            return self.registry.route(request.model_name, request.model_version or None)
        except (ModelNotFound, ModelVersionNotFound) as error:
            raise CallRefused(refusal(error)._replace(code=code_of(500))) from error


def _look_at(task: asyncio.Task[None]) -> None:
    """asyncio logs errors that were never retrieved."""
    if not task.cancelled():
        task.exception()


def _sequence_of(request: PredictionsRequest) -> str | None:
    return request.sequence_id if request.HasField("sequence_id") else None


def _line(value: bytes) -> bytes:
    """As the value of a header, of which there is one line."""
    return value.split(b"\r")[0].split(b"\n")[0]


def body_of(inputs: Mapping[str, bytes]) -> Body:
    """The inputs as one body, of the type `wire.INPUTS`; large ones uncopied."""
    pieces: list[Buffer] = []
    for name, value in inputs.items():
        text = name.encode()
        pieces += (_LENGTHS.pack(len(text), len(value)), text, value)
    size = sum(map(len, pieces))
    return (
        Parts(pieces, size)
        if size > MAX_COPIED_BYTES and len(pieces) <= MOST_PIECES
        else b"".join(pieces)
    )
