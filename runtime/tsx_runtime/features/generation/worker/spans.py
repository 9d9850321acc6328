"""The attributes of a traced request's span, by OpenTelemetry's conventions for generative AI.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/; the latencies have vLLM's names.
No attribute has text of a prompt or an answer. The attributes go to the server as a header, which
clients do not get.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from tsx_runtime.features.generation.worker.interface import Sampling, TextPiece
from tsx_runtime.wire import SPAN_HEADER
from tsx_runtime.worker.handler_api.context import Context

MAX_TEXT_CHARS = 256
SAMPLING_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed"),
    *("frequency_penalty", "presence_penalty"),
)

Stream = AsyncGenerator[TextPiece, None]


def report(context: Context, position: int, attributes: Mapping[str, Any]) -> None:
    """Add attributes, named without `gen_ai.`, to the span of a request if it is traced.

    Texts are cut, since some come from the client.
    """
    if context.get_request_header(position, SPAN_HEADER) is not None:
        model = {"provider.name": "tsx", "response.model": context.model_name}
        values = {
            f"gen_ai.{name}": value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
            for name, value in {**model, **attributes}.items()
            if value is not None
        }
        context.set_response_header(position, SPAN_HEADER, json.dumps(values))


def trace(
    context: Context,
    streams: Sequence[Stream],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    attributes: Mapping[str, Any],
) -> Sequence[Stream]:
    """Return the streams of a request; those of a traced request report it at their end.

    Args:
        context: The context of the request.
        streams: The streams, one for each choice.
        prompts: The prompt of each stream. The choices of one prompt share a list.
        sampling: The sampling parameters of the request.
        attributes: Further attributes.
    """
    if context.get_request_header(0, SPAN_HEADER) is None:
        return streams
    started_at = time.monotonic()
    first_token_s: float | None = None
    output_tokens = 0
    finish_reasons = [""] * len(streams)
    # A prompt and its part in the cache count once, for its first choice.
    cached_tokens: dict[int, int] = {}

    async def traced_stream(index: int, stream: Stream) -> Stream:
        nonlocal first_token_s, output_tokens
        async with aclosing(stream):
            async for piece in stream:
                if first_token_s is None:
                    first_token_s = time.monotonic() - started_at
                output_tokens += piece.tokens
                cached_tokens.setdefault(id(prompts[index]), piece.cached_tokens)
                finish_reasons[index] = piece.finish_reason or ""
                yield piece
        usage = {
            "request.choice.count": len(streams) if len(streams) > 1 else None,
            **{f"request.{name}": getattr(sampling, name) for name in SAMPLING_FIELDS},
            "usage.input_tokens": sum({id(prompt): len(prompt) for prompt in prompts}.values()),
            "usage.cache_read.input_tokens": sum(cached_tokens.values()),
            "usage.output_tokens": output_tokens,
            "response.finish_reasons": finish_reasons,
            "latency.time_to_first_token": first_token_s,
            "latency.e2e": time.monotonic() - started_at,
        }
        report(context, 0, {**attributes, **usage})

    return [traced_stream(index, stream) for index, stream in enumerate(streams)]
