"""The format of Hugging Face's inference API for text generation.

Streams have the event format of text-generation-inference.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from itertools import zip_longest
from typing import Annotated, Any, Literal

from pydantic import Field

from tsx_runtime.features.generation.worker import spans
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import (
    Grammar,
    Prompt,
    Sampling,
    TextPiece,
    TokenLogprob,
    run_without_blocking_streams,
)
from tsx_runtime.worker.codecs.bodies import (
    MAX_TOKENS,
    BodyObject,
    Seed,
    Stops,
    TokenCount,
    unsupported_field_error,
    validate_body,
)
from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.handler_api.context import Context


class GrammarParameter(BodyObject):
    """A grammar in the format of text-generation-inference."""

    type: Literal["json", "regex"]
    value: Any

    def grammar(self) -> Grammar:
        text = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return Grammar("regex" if self.type == "regex" else "json_schema", text)


class Parameters(BodyObject, extra="allow"):
    """The `parameters` of a request."""

    adapter: str | None = None
    details: bool | None = None
    do_sample: bool | None = None
    grammar: GrammarParameter | None = None
    max_new_tokens: TokenCount = None
    return_full_text: bool | None = None
    seed: Seed = None
    stop: Stops[Annotated[str, Field(min_length=1)]] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None

    def sampling(self) -> Sampling:
        temperature, top_p, top_k = self.temperature, self.top_p, self.top_k
        if self.do_sample is False:
            temperature, top_p, top_k = 0.0, None, None
        elif self.do_sample and temperature is None:
            temperature = 1.0
        return Sampling(
            self.max_new_tokens,
            temperature,
            top_p,
            top_k,
            self.seed,
            tuple(self.stop or ()),
            bool(self.details),
            grammar=None if self.grammar is None else self.grammar.grammar(),
            adapter=self.adapter,
        )


class GenerationRequest(BodyObject, extra="ignore"):
    """The body of a request; `inputs` is a text, or the messages of a chat."""

    inputs: Any = None
    parameters: Parameters = Field(default_factory=Parameters)
    stream: bool | None = None


async def answer(body: Any, generator: TextGenerator, context: Context) -> Any:
    """Return the response, or the last event of a stream after the others were sent.

    Raises:
        InvalidInput: The request does not fit the format or the model.
        Unavailable: Too many sequences wait.
        EngineDied: The engine has ended.
    """
    request, prompt = await run_without_blocking_streams(body, _read_request, body, generator)
    parameters, is_text = request.parameters, isinstance(request.inputs, str)
    sampling = parameters.sampling()
    text = request.inputs if parameters.return_full_text and is_text else ""
    ids: list[int] = []
    tokens: list[dict[str, Any]] = []
    (stream,) = spans.trace(
        context,
        [generator.stream(prompt.token_ids, sampling, prompt.media)],
        [prompt.token_ids],
        sampling,
        {
            "operation.name": "text_completion" if is_text else "chat",
            "request.model": context.model_name,
            "request.stream": bool(request.stream),
        },
    )
    async with aclosing(stream):
        async for piece in stream:
            ids += piece.token_ids
            text += piece.text
            if request.stream:
                context.set_response_content_type(0, "text/event-stream")
                if not piece.finish_reason:
                    context.send_piece(0, _encode_event(len(ids), piece))
            if parameters.details:
                tokens += [
                    _token_json(token_id, generator.decode([token_id]), logprob)
                    for token_id, logprob in zip_longest(piece.token_ids, piece.logprobs)
                ]
    details = {
        "finish_reason": _finish_reason(piece),
        "generated_tokens": len(ids),
        "seed": sampling.seed,
    }
    if request.stream:
        return _encode_event(
            len(ids), piece, text, details | {"input_length": len(prompt.token_ids)}
        )
    return [
        {"generated_text": text}
        | ({"details": details | {"prefill": [], "tokens": tokens}} if parameters.details else {})
    ]


def _read_request(body: Any, generator: TextGenerator) -> tuple[GenerationRequest, Prompt]:
    """Read a request, and encode its prompt.

    A body that is not a JSON object is a text to continue.

    Raises:
        InvalidInput: The request does not fit the format or the model.
    """
    if isinstance(body, bytes | bytearray | memoryview):
        body = bytes(body)
        if not body.lstrip().startswith(b"{"):
            try:
                body = body.decode()
            except ValueError as error:
                raise InvalidInput(
                    f'The body is neither JSON nor UTF-8 text: {error}. Send {{"inputs": "a'
                    ' text"}.'
                ) from error
    if not isinstance(body, bytes | dict):
        body = {"inputs": body}
    request = validate_body(GenerationRequest, body)
    for name, value in (request.parameters.model_extra or {}).items():
        if value is not False:  # Clients of Hugging Face send all flags.
            raise unsupported_field_error(f"parameters.{name}")
    inputs = request.inputs
    if isinstance(inputs, str):
        return request, Prompt(generator.encode(inputs))
    if isinstance(inputs, list) and inputs and all(isinstance(entry, dict) for entry in inputs):
        return request, generator.encode_chat(inputs)
    raise InvalidInput(
        'inputs must be a text, or a list of messages such as {"role": "user", "content":'
        ' "Hello"}. OpenAI\'s format goes to /v1/chat/completions.'
    )


def _finish_reason(piece: TextPiece) -> str:
    if piece.finish_reason == "length":
        return "length"
    return "eos_token" if piece.stop is None else "stop_sequence"


def _token_json(token_id: int, text: str, logprob: TokenLogprob | None) -> dict[str, Any]:
    return {
        "id": token_id,
        "text": text,
        "logprob": logprob and logprob.logprob,
        "special": not text,
    }


def _encode_event(
    index: int, piece: TextPiece, text: str | None = None, details: dict[str, Any] | None = None
) -> bytes:
    """Encode an event of a stream; only the last one has `text` and `details`."""
    token_id = piece.token_ids[-1] if piece.token_ids else 0
    token = _token_json(token_id, piece.text, piece.logprobs[-1] if piece.logprobs else None)
    token["special"] = details is not None and details["finish_reason"] == "eos_token"
    document = {"index": index, "token": token, "generated_text": text, "details": details}
    return b"data:%b\n\n" % json.dumps(document, separators=(",", ":")).encode()
