"""TorchServe's inference service: Ping, Predictions, and both kinds of streams (contract section 2)."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import NamedTuple

from google.protobuf.empty_pb2 import Empty

from tsx_runtime.core.model import ModelVersion
from tsx_runtime.core.registry import Registry
from tsx_runtime.errors import BadRequest, ModelNotFound, ModelVersionNotFound, TsxError
from tsx_runtime.grpc.calls import Asked, Context, Refused, answer_parts, whole_answer
from tsx_runtime.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest, TorchServeHealthResponse
from tsx_runtime.grpc.service import Service
from tsx_runtime.grpc.statuses import Refusal, code_of, refusal
from tsx_runtime.http.access import AccessLog
from tsx_runtime.http.asgi import Pair
from tsx_runtime.http.auth import Guard
from tsx_runtime.http.describe import is_healthy
from tsx_runtime.http.schemas import Health
from tsx_runtime.wire import COPIED, INPUTS, Body, Buffer, Parts

NAME = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MOST_PIECES = 1024
AHEAD = 64  # requests of one stream that may be with the model at a time

_LENGTHS = struct.Struct("<IQ")
_CONTENT: Pair = (b"content-type", INPUTS)


class _Turn(NamedTuple):
    """One request of a stream."""

    sequence: str | None
    asked: Asked | None
    refusal: Refusal | None = None  # where it did not get into a queue


class Inference:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def service(self, guard: Guard | None, log: AccessLog | None) -> Service:
        service = Service(NAME, guard, log)
        service.unary("Ping", self.ping, Empty, TorchServeHealthResponse)
        service.unary("Predictions", self.predictions, PredictionsRequest, PredictionResponse)
        service.stream("StreamPredictions", self.stream, PredictionsRequest, PredictionResponse)
        service.stream("StreamPredictions2", self.stream2, PredictionsRequest, PredictionResponse, both_ways=True)
        return service

    async def ping(self, request: Empty, context: Context) -> TorchServeHealthResponse:
        healthy = is_healthy(self.registry.models.values())
        return TorchServeHealthResponse(health=Health(status="Healthy" if healthy else "Unhealthy").model_dump_json(indent=2))

    async def predictions(self, request: PredictionsRequest, context: Context) -> PredictionResponse:
        with self._ask(request, context) as asked:
            _, body = await whole_answer(context, asked)
        return PredictionResponse(prediction=body)

    async def stream(self, request: PredictionsRequest, context: Context) -> AsyncGenerator[PredictionResponse, None]:
        with self._ask(request, context) as asked:
            async for _, part in answer_parts(context, asked):
                yield PredictionResponse(prediction=part)

    async def stream2(self, requests: AsyncIterator[PredictionsRequest], context: Context) -> AsyncGenerator[PredictionResponse, None]:
        turns: asyncio.Queue[_Turn | None] = asyncio.Queue(AHEAD)
        reader = asyncio.create_task(self._read(requests, context, turns))
        try:
            while (turn := await turns.get()) is not None:
                async for response in _answers(turn):
                    yield response
        finally:
            reader.cancel()
            while not turns.empty():
                if (turn := turns.get_nowait()) is not None and turn.asked is not None:
                    turn.asked.leave()

    async def _read(self, requests: AsyncIterator[PredictionsRequest], context: Context, turns: asyncio.Queue[_Turn | None]) -> None:
        """Put each request into its model's queue as it comes, so that those of one stream share batches."""
        seen: set[str] = set()
        try:
            async for request in requests:
                sequence = request.sequence_id if request.HasField("sequence_id") else None
                try:
                    await turns.put(_Turn(sequence, self._ask(request, context, *_sequence_headers(sequence, seen))))
                except (TsxError, Refused) as error:
                    await turns.put(_Turn(sequence, None, refusal(error) if isinstance(error, TsxError) else error.refusal))
        finally:
            await turns.put(None)

    def _ask(self, request: PredictionsRequest, context: Context, *own: Pair) -> Asked:
        return Asked(context, self._find(request), (_CONTENT, *own), body_of(request.input))

    def _find(self, request: PredictionsRequest) -> ModelVersion:
        """TorchServe answers INTERNAL for a model that is not there, and its clients look for that."""
        if not request.model_name:
            raise BadRequest("Parameter model_name is required.")
        try:
            return self.registry.find(request.model_name, request.model_version or None)
        except (ModelNotFound, ModelVersionNotFound) as error:
            raise Refused(refusal(error)._replace(code=code_of(500))) from error


async def _answers(turn: _Turn) -> AsyncGenerator[PredictionResponse, None]:
    """What one request of a stream yields; an error as a response of its own, since the others go on."""
    refused = turn.refusal
    if turn.asked is not None:
        with turn.asked as asked:
            try:
                answer = await asked.answer()
                async for part in answer.parts():
                    yield PredictionResponse(prediction=part, sequence_id=turn.sequence)
                return
            except (TsxError, Refused) as error:
                refused = refusal(error) if isinstance(error, TsxError) else error.refusal
    assert refused is not None
    yield PredictionResponse(sequence_id=turn.sequence, status={"code": refused.code.value[0], "message": refused.details})


def _sequence_headers(sequence: str | None, seen: set[str]) -> Iterable[Pair]:
    """What tells a stateful model which sequence a request belongs to, and that it begins with it."""
    if not sequence:
        return ()
    own: list[Pair] = [(b"ts_request_sequence_id", sequence.encode())]
    if sequence not in seen:
        seen.add(sequence)
        own.append((b"ts_request_sequence_start", b"True"))
    return own


def body_of(inputs: Mapping[str, bytes]) -> Body:
    """The inputs as one body, of the type `wire.INPUTS`; large ones uncopied."""
    pieces: list[Buffer] = []
    for name, value in inputs.items():
        text = name.encode()
        pieces += (_LENGTHS.pack(len(text), len(value)), text, value)
    size = sum(map(len, pieces))
    return Parts(pieces, size) if size > COPIED and len(pieces) <= MOST_PIECES else b"".join(pieces)
