"""OpenAI's completions: their log probabilities, choices and usage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tsx_runtime.features.generation.worker.interface import TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.completions import CompletionReply
from tsx_runtime.worker.codecs.bodies import RefusedField


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


def test_the_cached_tokens_of_each_prompt_count_once() -> None:
    generator: Any = Bytes()
    body = {"prompt": ["abc", "de"], "n": 2, "stream_options": {"include_usage": True}}
    reply = CompletionReply(body, generator, "m")
    for index, cached_tokens in enumerate((2, 3, 1, 1)):
        reply.add(index, TextPiece("a", 1, cached_tokens=cached_tokens))
        reply.add(index, TextPiece("b", 1, "stop"))
    usage = reply.body()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 8)
    last_event = json.loads(reply.end().decode().splitlines()[0].removeprefix("data: "))
    assert last_event["usage"] == usage


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"prompt": ["a"] * 64, "best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 64, "n": 3}, "n"),
    ],
)
def test_too_few_or_too_many_candidates_are_refused(fields: dict[str, Any], param: str) -> None:
    generator: Any = Bytes()
    with pytest.raises(RefusedField) as exc_info:
        CompletionReply({"prompt": "a"} | fields, generator, "m")
    assert exc_info.value.param == param


def test_a_stream_may_name_as_many_candidates_as_texts() -> None:
    generator: Any = Bytes()
    body = {"prompt": "a", "n": 2, "best_of": 2, "stream": True}
    assert len(CompletionReply(body, generator, "m").continuations) == 2
