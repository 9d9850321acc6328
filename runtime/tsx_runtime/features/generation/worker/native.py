"""The format of Hugging Face's inference API for text generation.

Streams have the event format of text-generation-inference.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from tsx_runtime.features.generation.worker import spans
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import (
    Grammar,
    Prompt,
    Sampling,
    TextPiece,
    run_without_blocking_streams,
)
from tsx_runtime.worker.codecs.bodies import (
    MAX_TOKENS,
    BodyObject,
    Seed,
    Stops,
    TokenCount,
    validate_body,
)
from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.handler_api.context import Context


class GrammarParameter(BodyObject):
    """A grammar in the format of text-generation-inference."""

    type: Literal["json", "regex"]
    value: Any

    def grammar(self) -> Grammar:
        # A schema may be an object or its text.
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
        stop = tuple(self.stop or ())
        return Sampling(
            self.max_new_tokens,
            temperature,
            top_p,
            top_k,
            self.seed,
            stop,
            bool(self.details),
            grammar=None if self.grammar is None else self.grammar.grammar(),
            adapter=self.adapter,
        )


class GenerationRequest(BodyObject, extra="ignore"):
    """The body of a request; `inputs` is a text, or the messages of a chat."""

    inputs: Any = None
    parameters: Parameters | None = None
    stream: bool | None = None


async def answer(body: Any, generator: TextGenerator, context: Context) -> Any:
    """Return the response, or the last event of a stream after the others were sent.

    Raises:
        InvalidInput: The request does not fit the format or the model.
        Unavailable: Too many sequences wait.
        EngineDied: The engine has ended.
    """
    request, prompt = await run_without_blocking_streams(body, _read_request, body, generator)
    parameters = request.parameters or Parameters()
    sampling = parameters.sampling()
    prefix = (
        request.inputs if parameters.return_full_text and isinstance(request.inputs, str) else ""
    )
    ids: list[int] = []
    texts: list[str] = []
    tokens: list[dict[str, Any]] = []
    last = TextPiece("", 0)
    (stream,) = spans.follow(
        context,
        [generator.stream(prompt.token_ids, sampling, prompt.media)],
        [prompt.token_ids],
        sampling,
        {
            "operation.name": "text_completion" if isinstance(request.inputs, str) else "chat",
            "request.model": context.model_name,
            "request.stream": bool(request.stream),
        },
    )
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            ids += piece.token_ids
            if request.stream and not piece.finish_reason:
                context.set_response_content_type(0, "text/event-stream")
                context.send_piece(0, _encode_event(len(ids), piece, None, None))
            texts.append(piece.text)
            if parameters.details:
                tokens += [
                    _token_json(generator, piece, index) for index in range(len(piece.token_ids))
                ]
            last = piece
    text = f"{prefix}{''.join(texts)}"
    details = {
        "finish_reason": _finish_reason(last),
        "generated_tokens": len(ids),
        "seed": sampling.seed,
    }
    if request.stream:
        context.set_response_content_type(0, "text/event-stream")
        return _encode_event(
            len(ids), last, text, details | {"input_length": len(prompt.token_ids)}
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
    for name, value in ((request.parameters and request.parameters.model_extra) or {}).items():
        if value not in (None, False):
            raise InvalidInput(
                f"The parameter {name} is not supported; these are:"
                f" {', '.join(Parameters.model_fields)}."
            )
    inputs = request.inputs
    if isinstance(inputs, str):
        prompt = Prompt(generator.encode(inputs))
    elif isinstance(inputs, list) and inputs and all(isinstance(entry, dict) for entry in inputs):
        prompt = generator.encode_chat(inputs)
    else:
        chat = 'a list of messages such as {"role": "user", "content": "Hello"}'
        raise InvalidInput(
            f"inputs must be a text, or {chat}. OpenAI's format goes to /v1/chat/completions."
        )
    max_tokens = request.parameters and request.parameters.max_new_tokens
    size = len(prompt.token_ids)
    if max_tokens and size < generator.context_length < size + max_tokens:
        text = (
            f"The prompt has {size} tokens, and max_new_tokens is {max_tokens}, but the"
            f" model's context has {generator.context_length}"
        )
        raise InvalidInput(f"{text} for both. Shorten the prompt, or ask for fewer.")
    return request, prompt


def _finish_reason(piece: TextPiece) -> str:
    if piece.finish_reason == "length":
        return "length"
    return "eos_token" if piece.stop is None else "stop_sequence"


def _token_json(generator: TextGenerator, piece: TextPiece, index: int) -> dict[str, Any]:
    id = piece.token_ids[index]
    logprob = piece.logprobs[index].logprob if index < len(piece.logprobs) else None
    return {
        "id": id,
        "text": generator.decode([id]),
        "logprob": logprob,
        "special": generator.decode([id]) == "",
    }


def _encode_event(
    index: int, piece: TextPiece, text: str | None, details: dict[str, Any] | None
) -> bytes:
    """Encode an event of a stream; only the last one has `text` and `details`."""
    logprob = piece.logprobs[-1].logprob if piece.logprobs else None
    special = details is not None and details["finish_reason"] == "eos_token"
    token = {
        "id": piece.token_ids[-1] if piece.token_ids else 0,
        "text": piece.text,
        "logprob": logprob,
        "special": special,
    }
    document = {"index": index, "token": token, "generated_text": text, "details": details}
    return b"data:%b\n\n" % json.dumps(document, separators=(",", ":")).encode()
