"""The format of Hugging Face's inference API for text generation, with the events of text-generation-inference for streams."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from tsx_runtime.worker.codecs.json_text import read_json
from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.generation.interface import Sampling, TextGenerator, TextPiece
from tsx_runtime.worker.handler_api.context import Context

NUMBERS: Mapping[str, tuple[type, float, float]] = {
    "max_new_tokens": (int, 1, 1 << 31),
    "temperature": (float, 0, 100),
    "top_p": (float, 0, 1),
    "top_k": (int, 0, 1 << 31),
    "seed": (int, -(1 << 63), (1 << 63) - 1),
}
FLAGS = ("do_sample", "return_full_text", "details")
OTHERS = ("stop", "adapter")
MOST_STOPS = 16


class NativeRequest(NamedTuple):
    inputs: str | Sequence[Mapping[str, Any]]  # a text, or the messages of a chat
    sampling: Sampling
    stream: bool
    full_text: bool
    details: bool


async def answer(body: Any, generator: TextGenerator, context: Context) -> Any:
    """What the handler returns; the events of a stream but the last have been sent then. Raises `InvalidInput`, and as `stream` does."""
    request = read(body)
    chat = not isinstance(request.inputs, str)
    prompt = generator.encode_chat(request.inputs) if chat else generator.encode(request.inputs)  # type: ignore[arg-type]
    before = request.inputs if request.full_text and not chat else ""
    ids: list[int] = []
    texts: list[str] = []
    tokens: list[dict[str, Any]] = []
    last = TextPiece("", 0)
    async with aclosing(generator.stream(prompt, request.sampling)) as pieces:
        async for piece in pieces:
            ids += piece.token_ids
            if request.stream and not piece.finished:
                context.set_response_content_type(0, "text/event-stream")
                context.send_piece(0, _event(len(ids), piece, None, None))
            texts.append(piece.text)
            if request.details:
                tokens += [_token(generator, piece, index) for index in range(len(piece.token_ids))]
            last = piece
    text = f"{before}{''.join(texts)}"
    details = {"finish_reason": _reason(last), "generated_tokens": len(ids), "seed": request.sampling.seed}
    if request.stream:
        context.set_response_content_type(0, "text/event-stream")
        return _event(len(ids), last, text, details | {"input_length": len(prompt)})
    return [{"generated_text": text} | ({"details": details | {"prefill": [], "tokens": tokens}} if request.details else {})]


def read(body: Any) -> NativeRequest:
    """Raises `InvalidInput`, which names the parameter."""
    document = _document(body)
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidInput('parameters must be an object, such as {"max_new_tokens": 20}.')
    inputs = document.get("inputs")
    messages = isinstance(inputs, list) and inputs and all(isinstance(each, dict) for each in inputs)
    if not (isinstance(inputs, str) or messages):
        raise InvalidInput('inputs must be a text, or a list of messages such as {"role": "user", "content": "Hello"}.')
    known = [*NUMBERS, *FLAGS, *OTHERS]
    if unknown := [name for name, value in parameters.items() if name not in known and value not in (None, False)]:
        raise InvalidInput(f"The parameter {unknown[0]} is not supported; these are: {', '.join(known)}.")
    values = {name: _number(parameters, name) for name in NUMBERS}
    flags = {name: _flag(parameters.get(name), name) for name in FLAGS}
    if flags["do_sample"] is False:
        values["temperature"], values["top_p"], values["top_k"] = 0.0, None, None
    elif flags["do_sample"] and values["temperature"] is None:
        values["temperature"] = 1.0
    adapter = parameters.get("adapter")
    if not isinstance(adapter, str | None):
        raise InvalidInput("The parameter adapter must be the name of an adapter.")
    values["max_tokens"] = values.pop("max_new_tokens")
    sampling = Sampling(**values, stop=_stops(parameters.get("stop")), logprobs=bool(flags["details"]), adapter=adapter)
    full = bool(flags["return_full_text"])
    return NativeRequest(inputs, sampling, bool(_flag(document.get("stream"), "stream")), full, bool(flags["details"]))  # type: ignore[arg-type]


def _document(body: Any) -> dict[str, Any]:
    """A body that is no JSON object is a text to continue."""
    if isinstance(body, bytes | bytearray | memoryview):
        raw = bytes(body)
        try:
            body = read_json(raw) if raw.lstrip().startswith(b"{") else raw.decode()
        except ValueError as error:
            raise InvalidInput(f'The body is neither JSON nor UTF-8 text: {error}. Send {{"inputs": "a text"}}.') from error
    return body if isinstance(body, dict) else {"inputs": body}


def _number(parameters: Mapping[str, Any], name: str) -> Any:
    kind, least, most = NUMBERS[name]
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise InvalidInput(f"The parameter {name} is {value!r:.50}; it must be {what} from {least} to {most}.")
    return kind(value)


def _flag(value: Any, name: str) -> bool | None:
    if not isinstance(value, bool | None):
        raise InvalidInput(f"{name} is {value!r:.50}; it must be true or false.")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidInput(f"The parameter stop must be a list of at most {MOST_STOPS} texts.")
    return tuple(stops)


def _reason(piece: TextPiece) -> str:
    return "length" if piece.finished == "length" else "eos_token" if piece.stop is None else "stop_sequence"


def _token(generator: TextGenerator, piece: TextPiece, index: int) -> dict[str, Any]:
    id = piece.token_ids[index]
    logprob = piece.logprobs[index].logprob if index < len(piece.logprobs) else None
    return {"id": id, "text": generator.decode([id]), "logprob": logprob, "special": generator.decode([id]) == ""}


def _event(index: int, piece: TextPiece, text: str | None, details: dict[str, Any] | None) -> bytes:
    """`text` and `details`: of the last one."""
    logprob = piece.logprobs[-1].logprob if piece.logprobs else None
    special = details is not None and details["finish_reason"] == "eos_token"
    token = {"id": piece.token_ids[-1] if piece.token_ids else 0, "text": piece.text, "logprob": logprob, "special": special}
    document = {"index": index, "token": token, "generated_text": text, "details": details}
    return b"data:%b\n\n" % json.dumps(document, separators=(",", ":")).encode()
