"""The log probabilities of OpenAI's completions, which identify tokens by their text."""

from __future__ import annotations

from typing import Any

from tsx_runtime.features.generation.worker.interface import TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.completions import CompletionReply


class Bytes:
    """A generator whose tokens are bytes; all bytes of longer characters have the same text."""

    context_length = 100
    adapters = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def refusal(self, sampling: Any) -> None:
        return None


def test_only_the_most_likely_token_of_each_text_is_shown() -> None:
    generator: Any = Bytes()
    reply = CompletionReply({"prompt": "a", "max_tokens": 1, "logprobs": 3}, generator, "m")
    reply.add(
        0,
        TextPiece(
            "\ufffd",
            1,
            "length",
            [TokenLogprob(0xE6, -1.0, [(0xE6, -1.0), (0x61, -2.0), (0xE7, -3.0)])],
        ),
    )
    logprobs = reply.body()["choices"][0]["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == (
        [-1.0],
        [{"\ufffd": -1.0, "a": -2.0}],
    )
