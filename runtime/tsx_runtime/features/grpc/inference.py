"""TorchServe's inference service: Ping, Predictions, and both kinds of streams."""

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
from tsx_runtime.features.grpc.admission import Admissions
from tsx_runtime.features.grpc.calls import Context, PendingRequest, answer_parts, complete_answer
from tsx_runtime.features.grpc.service import Ledger, Service
from tsx_runtime.features.grpc.statuses import CallRefused, Refusal, code_for_status, refusal
from tsx_runtime.grpc.protos.inference_pb2 import (
    PredictionResponse,
    PredictionsRequest,
    TorchServeHealthResponse,
)
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

SERVICE_NAME = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MAX_PIECES = 1024  # pieces of a body that is not copied; more pieces are joined
MAX_SEQUENCES = 10_000  # open sequences of one stream
MAX_REQUESTS_AHEAD = 64  # submitted requests of one stream without a response

_LENGTHS = struct.Struct("<IQ")
_LINE_BREAK_OR_NUL = re.compile(r"[\r\n\0]")
_CONTENT_TYPE: Pair = (b"content-type", INPUTS)


class _StreamRequest(NamedTuple):
    """One request of a stream, or its refusal if it could not be submitted."""

    sequence: str | None
    pending: PendingRequest | None
    refusal: Refusal | None = None


class _StreamQueue(NamedTuple):
    """The unanswered requests of a stream in order; None follows the last one."""

    queue: asyncio.Queue[_StreamRequest | None]
    free_slots: asyncio.Semaphore


class Inference:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.max_header_size = registry.settings.max_header_size

    def service(self, guard: Guard | None, ledger: Ledger, admissions: Admissions) -> Service:
        service = Service(SERVICE_NAME, guard, ledger, admissions)
        service.unary("Ping", self.ping, Empty, TorchServeHealthResponse, is_probe=True)
        service.unary("Predictions", self.predictions, PredictionsRequest, PredictionResponse)
        service.stream("StreamPredictions", self.stream, PredictionsRequest, PredictionResponse)
        service.stream(
            "StreamPredictions2",
            self.stream2,
            PredictionsRequest,
            PredictionResponse,
            is_bidirectional=True,
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
        with self._submit(request, context, _sequence_of(request)) as pending:
            answer, body = await complete_answer(context, pending)
        return PredictionResponse(
            prediction=body, sequence_id=self._response_sequence(_sequence_of(request), answer)
        )

    async def stream(
        self, request: PredictionsRequest, context: Context
    ) -> AsyncGenerator[PredictionResponse, None]:
        with self._submit(request, context, _sequence_of(request)) as pending:
            async for answer, part in answer_parts(context, pending):
                yield PredictionResponse(
                    prediction=part,
                    sequence_id=self._response_sequence(_sequence_of(request), answer),
                )

    async def stream2(
        self, requests: AsyncIterator[PredictionsRequest], context: Context
    ) -> AsyncGenerator[PredictionResponse, None]:
        """Yield the responses to a stream of requests, in the order of the requests."""
        stream_queue = _StreamQueue(asyncio.Queue(), asyncio.Semaphore(MAX_REQUESTS_AHEAD))
        reader = asyncio.create_task(self._read(requests, context, stream_queue))
        reader.add_done_callback(_retrieve_error)
        try:
            while (stream_request := await stream_queue.queue.get()) is not None:
                async with aclosing(self._answers(stream_request)) as responses:
                    async for response in responses:
                        yield response
                stream_queue.free_slots.release()
            await reader
        finally:
            reader.cancel()
            while not stream_queue.queue.empty():
                if (
                    stream_request := stream_queue.queue.get_nowait()
                ) is not None and stream_request.pending is not None:
                    stream_request.pending.leave()

    async def _read(
        self,
        requests: AsyncIterator[PredictionsRequest],
        context: Context,
        stream_queue: _StreamQueue,
    ) -> None:
        """Submit each request as it arrives, so that requests of one stream can share batches.

        For a stateful model, the stream's requests without a sequence id form one sequence.
        """
        open_sequences: set[str] = set()
        stream_sequence = f"ts-seq-{uuid.uuid4()}"
        try:
            async for request in requests:
                # There is no await between submitting and queueing a request. The end of the stream
                # therefore finds every submitted request in the queue.
                await stream_queue.free_slots.acquire()
                sequence = _sequence_of(request) or (
                    stream_sequence if self._is_stateful(request) else None
                )
                try:
                    if sequence not in open_sequences and len(open_sequences) >= MAX_SEQUENCES:
                        raise BadRequest(
                            f"The stream has {MAX_SEQUENCES} sequences that have not ended. End"
                            " some, or open another stream."
                        )
                    stream_request = _StreamRequest(
                        sequence,
                        self._submit(
                            request, context, sequence, is_first=sequence not in open_sequences
                        ),
                    )
                except (TsxError, CallRefused) as error:
                    stream_request = _StreamRequest(
                        sequence,
                        None,
                        refusal(error) if isinstance(error, TsxError) else error.refusal,
                    )
                stream_queue.queue.put_nowait(stream_request)
                if sequence is not None and (
                    sequence in open_sequences or len(open_sequences) < MAX_SEQUENCES
                ):
                    (
                        open_sequences.discard
                        if SEQUENCE_END in request.input
                        else open_sequences.add
                    )(sequence)
        finally:
            stream_queue.queue.put_nowait(None)

    async def _answers(
        self, stream_request: _StreamRequest
    ) -> AsyncGenerator[PredictionResponse, None]:
        """Yield the responses to one request of a stream.

        An error is sent as a response, because the other requests continue.
        """
        error_status = stream_request.refusal
        if stream_request.pending is not None:
            with stream_request.pending as pending:
                try:
                    answer = await pending.answer()
                    async for part in answer.parts():
                        yield PredictionResponse(
                            prediction=part,
                            sequence_id=self._response_sequence(stream_request.sequence, answer),
                        )
                    return
                except (TsxError, CallRefused) as error:
                    error_status = refusal(error) if isinstance(error, TsxError) else error.refusal
        assert error_status is not None
        status = {"code": error_status.code.value[0], "message": error_status.details}
        yield PredictionResponse(sequence_id=stream_request.sequence, status=status)

    def _submit(
        self,
        request: PredictionsRequest,
        context: Context,
        sequence: str | None,
        *,
        is_first: bool = False,
    ) -> PendingRequest:
        """Submit a request; `is_first` marks the first one of its sequence.

        The inputs that start or end a sequence are also sent as headers.
        """
        route = self._find_route(request)
        route_headers: list[Pair] = [_CONTENT_TYPE]
        if sequence:
            if _LINE_BREAK_OR_NUL.search(sequence):
                raise BadRequest(
                    f"The sequence_id {sequence[:100]!r} contains a line break or a NUL. Use"
                    " another id."
                )
            # A lossy encoding could turn two different ids into the same one.
            route_headers.append((SEQUENCE_ID.encode("latin-1"), sequence.encode()))
            if is_first and SEQUENCE_START not in request.input:
                route_headers.append((SEQUENCE_START.encode("latin-1"), b"true"))
        route_headers += [
            (name.encode("latin-1"), _first_line(request.input[name]))
            for name in (SEQUENCE_START, SEQUENCE_END)
            if name in request.input
        ]
        size = sum(len(value) for _, value in route_headers)
        if size > self.max_header_size:
            text = (
                f"The sequence_id, {SEQUENCE_START} and {SEQUENCE_END} have {size} bytes together,"
                f" and may have {self.max_header_size}"
            )
            raise BadRequest(
                f"{text} (max_header_size): they are headers. Use a shorter sequence_id."
            )
        return PendingRequest(
            context, route, route_headers, join_inputs(request.input), self.registry.hidden_headers
        )

    def _is_stateful(self, request: PredictionsRequest) -> bool:
        """Tell whether any version that may get the request is stateful."""
        model = self.registry.models.get(request.model_name)
        versions = [*model.versions.values()] if model is not None else []
        if request.model_version:
            with suppress(TsxError):
                versions = [self.registry.find(request.model_name, request.model_version)]
        return any(version.plan.strategy.sequences is not None for version in versions)

    def _response_sequence(self, sequence: str | None, answer: Answer) -> str | None:
        """Return the sequence of the request, or the one that the worker has started for it."""
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

    def _find_route(self, request: PredictionsRequest) -> Route:
        """Return the route of a request.

        The status for an unknown model is INTERNAL, as TorchServe's clients expect.
        """
        if not request.model_name:
            raise BadRequest("Parameter model_name is required.")
        try:
            return self.registry.route(request.model_name, request.model_version or None)
        except (ModelNotFound, ModelVersionNotFound) as error:
            raise CallRefused(refusal(error)._replace(code=code_for_status(500))) from error


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a task, because otherwise asyncio would log it."""
    if not task.cancelled():
        task.exception()


def _sequence_of(request: PredictionsRequest) -> str | None:
    return request.sequence_id if request.HasField("sequence_id") else None


def _first_line(value: bytes) -> bytes:
    """Return the first line of a value, because a header cannot have more."""
    return value.split(b"\r")[0].split(b"\n")[0]


def join_inputs(inputs: Mapping[str, bytes]) -> Body:
    """Return the inputs as one body of type `wire.INPUTS`; large inputs are not copied."""
    pieces: list[Buffer] = []
    for name, value in inputs.items():
        text = name.encode()
        pieces += (_LENGTHS.pack(len(text), len(value)), text, value)
    size = sum(map(len, pieces))
    return (
        Parts(pieces, size)
        if size > MAX_COPIED_BYTES and len(pieces) <= MAX_PIECES
        else b"".join(pieces)
    )
