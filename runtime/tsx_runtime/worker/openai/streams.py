"""Runs the choices of one request together, and writes server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from tsx_runtime.worker.generation.interface import FinishReason, Sampling, TextGenerator, TextPiece, TokenLogprob
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.openai.fields import Fields
from tsx_runtime.worker.openai.sampling import Continuation, continuations

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON has not


class Reply(Protocol):
    """The answer to one request in one API."""

    continuations: list[Continuation]
    streams: bool

    def add(self, index: int, piece: TextPiece) -> bytes:
        """The events for a piece of a choice; nothing where the answer does not stream."""

    def end(self) -> bytes:
        """The last events."""

    def whole(self) -> dict[str, Any]: ...


async def run(reply: Reply, generator: TextGenerator, context: Context) -> Any:
    """What the handler returns. Raises as `TextGenerator.stream` does."""
    async with aclosing(_merged([generator.stream(*each) for each in reply.continuations])) as pieces:
        async for index, piece in pieces:
            events = reply.add(index, piece)
            if events:
                context.set_response_content_type(0, "text/event-stream")
                context.send_piece(0, events)
    return reply.end() if reply.streams else reply.whole()


async def _merged(streams: Sequence[AsyncGenerator[TextPiece, None]]) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """The pieces of all, as they come. All end with the first that fails, and when it is closed."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, TextPiece | None]] = asyncio.Queue()

    async def take(index: int, stream: AsyncGenerator[TextPiece, None]) -> None:
        async with aclosing(stream):
            async for piece in stream:
                queue.put_nowait((index, piece))

    tasks = [asyncio.ensure_future(take(index, stream)) for index, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(lambda _: queue.put_nowait((0, None)))
    left = len(tasks)
    try:
        while left:
            index, got = await queue.get()
            if got is not None:
                yield index, got
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Choice:
    """What has come of one so far."""

    parts: list[str] = field(default_factory=list)
    tokens: int = 0
    finished: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, piece: TextPiece) -> None:
        self.parts.append(piece.text)
        self.tokens += piece.tokens
        self.finished = piece.finished or self.finished
        self.logprobs += piece.logprobs


def event(data: Any, name: str = "") -> bytes:
    """JSON escapes all line ends, so that an event is one line."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (name.encode(), text) if name else b"data: %b\n\n" % text


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class ChoicesReply:
    """What chat and text completions have in common: `n` choices of each prompt."""

    def __init__(
        self, fields: Fields, generator: TextGenerator, model: str, kind: str, prompts: list[list[int]], sampling: Sampling, n: int
    ) -> None:
        """Takes the fields that are left. `kind`: how ids begin. Raises RefusedField."""
        self.streams = fields.flag("stream")
        options = fields.object("stream_options")
        self._shows_usage = options is not None and options.flag("include_usage")
        fields.finish()
        self.continuations = continuations(prompts, sampling, n, generator)
        self._generator = generator
        self._choices = [Choice() for _ in self.continuations]
        self._prompt_tokens = sum(map(len, prompts))
        self._head: dict[str, Any] = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": fields.model or model}

    def end(self) -> bytes:
        return (event(self._head | {"choices": [], "usage": self._usage()}) if self._shows_usage else b"") + DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event(self._head | {"choices": [choice]} | ({"usage": None} if self._shows_usage else {}))

    def _usage(self) -> dict[str, int]:
        completion = sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": completion, "total_tokens": self._prompt_tokens + completion}
