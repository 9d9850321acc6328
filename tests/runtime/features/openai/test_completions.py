"""OpenAI's completions: their log probabilities, choices and usage; and the bytes of tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.language_models import bpe_tokenizer, byte_fallback_tokenizer
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.chat import ChatReply
from tsx_runtime.features.openai.worker.completions import CompletionReply
from tsx_runtime.worker.codecs.bodies import RefusedField


class Bytes:
    """A generator whose tokens are bytes."""

    context_length = 100
    adapters = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def refusal(self, sampling: Any) -> None:
        return None


def test_parts_of_characters_are_shown_as_by_openais_completions() -> None:
    generator: Any = Bytes()
    reply = CompletionReply({"prompt": "a", "max_tokens": 5, "logprobs": 2}, generator, "m")
    reply.add(0, TextPiece("", 1, None, [TokenLogprob(0xE6, -1.0, [(0xE6, -1.0), (0x61, -2.0)])]))
    for byte in (0x97, 0xA5):
        reply.add(0, TextPiece("", 1, None, [TokenLogprob(byte, -1.0)]))
    tops = [(0x62, -1.0), (0x62, -2.0)]  # The first of two tokens with one text is shown.
    reply.add(0, TextPiece("日b", 1, "length", [TokenLogprob(0x62, -1.0, tops)]))
    logprobs = reply.body()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", "b"]
    assert logprobs["top_logprobs"] == [{"bytes:\\xe6": -1.0, "a": -2.0}, {}, {}, {"b": -1.0}]
    # The last token is the second character of the text.
    assert logprobs["text_offset"] == [0, 1, 1, 1]


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


@pytest.mark.parametrize("make_tokenizer", [bpe_tokenizer, byte_fallback_tokenizer])
def test_chats_have_the_bytes_of_parts_of_characters(make_tokenizer: Any) -> None:
    unused: Any = None
    tokenizer = make_tokenizer()
    generator = TextGenerator(tokenizer, Bytes(), None, len(tokenizer), unused)  # type: ignore[arg-type]  # the reply only reads its limits
    message = {"role": "user", "content": "a"}
    reply = ChatReply({"messages": [message], "logprobs": True, "top_logprobs": 1}, generator, "m")
    # "日" has the bytes e6 97 a5, and is in neither vocabulary.
    for token in generator.encode("日")[-3:]:
        reply.add(0, TextPiece("", 1, None, [TokenLogprob(token, -1.0, [(token, -1.0)])]))
    reply.add(0, TextPiece("日", 0, "length"))
    content = reply.body()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [
        ("\\xe6", [0xE6]),
        ("\\x97", [0x97]),
        ("\\xa5", [0xA5]),
    ]
    assert [entry["top_logprobs"][0]["bytes"] for entry in content] == [[0xE6], [0x97], [0xA5]]
