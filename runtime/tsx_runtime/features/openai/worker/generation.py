"""The routes for generated text: chat completions, completions and responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from tsx_runtime.errors import TsxError, Unavailable
from tsx_runtime.features.generation.worker import spans
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import TextPiece, run_without_blocking_streams
from tsx_runtime.features.openai.worker.chat import ChatReply
from tsx_runtime.features.openai.worker.completions import CompletionReply
from tsx_runtime.features.openai.worker.responses import ResponseReply
from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.exceptions import PredictionException
from tsx_runtime.worker.handler_api.context import Context

Reply: TypeAlias = ChatReply | CompletionReply | ResponseReply
REPLIES: dict[str, Callable[[Any, TextGenerator, str], Reply]] = {
    "v1/chat/completions": ChatReply,
    "v1/completions": CompletionReply,
    "v1/responses": ResponseReply,
}


async def answer(
    path: str, body: Any, generator: TextGenerator, context: Context, model: str
) -> Any:
    """Answer a request, and return the response, or the last part of a streamed one.

    An invalid request gets an error in OpenAI's format.

    Args:
        path: The request's header `url_path`.
        body: Bytes, or parsed JSON.
        generator: The model.
        context: The context of the worker, by which the earlier parts of a stream are sent.
        model: The name of the model.
    """
    try:
        if path not in REPLIES:
            raise RefusedField(
                f"Model {model} writes text: it has"
                f" {', '.join(f'/{known_path}' for known_path in REPLIES)}, and no /{path}.",
                status=404,
            )
        reply = await run_without_blocking_streams(
            body,
            REPLIES[path],
            body,
            generator,
            model,
            may_have_media=generator.media is not None,
        )
        streams = spans.trace(
            context,
            [generator.stream(*continuation) for continuation in reply.continuations],
            [continuation.prompt for continuation in reply.continuations],
            reply.continuations[0].sampling,
            {
                "operation.name": "text_completion" if path == "v1/completions" else "chat",
                "request.model": reply.model,
                "request.stream": reply.streams,
                "response.id": reply.id,
            },
        )
        await _generate(reply, streams, context)
        return reply.end() if reply.streams else reply.body()
    except (PredictionException, TsxError) as error:
        return _error_response(error, context)


async def _generate(
    reply: Reply, streams: Sequence[AsyncGenerator[TextPiece, None]], context: Context
) -> None:
    """Generate all choices; a failure or a cancellation of one ends all."""

    async def send_choice(index: int, stream: AsyncGenerator[TextPiece, None]) -> None:
        has_started = False
        async with aclosing(stream):
            async for piece in stream:
                if events := reply.add(index, piece):
                    if not has_started:
                        context.set_response_content_type(0, "text/event-stream")
                        has_started = True
                    context.send_piece(0, events)

    if len(streams) == 1:
        await send_choice(0, streams[0])
        return
    tasks = [
        asyncio.ensure_future(send_choice(index, stream)) for index, stream in enumerate(streams)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error_response(error: PredictionException | TsxError, context: Context) -> dict[str, Any]:
    """Return an error as a response, and set its status.

    If the response has started, the server sends the error as the last event.
    """
    status = error.status if isinstance(error, TsxError) else error.error_code
    context.set_response_status(status, "", 0)
    if isinstance(error, Unavailable) and error.retry_after is not None:
        context.set_response_header(0, "retry-after", error.retry_after)
    kind = (
        "server_error"
        if status >= 500
        else "rate_limit_error"
        if status == 429
        else "invalid_request_error"
    )
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }
