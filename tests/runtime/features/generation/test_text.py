"""Detokenization in pieces, and stop strings that cross the borders of pieces."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.language_models import bpe_tokenizer
from tsx_runtime.features.generation.worker.interface import (
    LONG_BODY_BYTES,
    run_without_blocking_streams,
)
from tsx_runtime.features.generation.worker.text import (
    Detokenizer,
    StopStrings,
    vocabulary_bytes,
)


def pieces(prompt: str, text: str, size: int = 1) -> list[str]:
    tokenizer = bpe_tokenizer()
    ids = tokenizer(text)["input_ids"]
    decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    detokenizer = Detokenizer(decode, tokenizer(prompt)["input_ids"])
    return [
        *(detokenizer.push(ids[index : index + size]) for index in range(0, len(ids), size)),
        detokenizer.finish(),
    ]


@given(st.text(max_size=80), st.text(max_size=20), st.integers(1, 4))
def test_joined_pieces_are_the_text(text: str, prompt: str, size: int) -> None:
    assert "".join(pieces(prompt, text, size)) == text


def test_a_piece_contains_only_complete_characters() -> None:
    parts = pieces("", "naïve 🙂 日本語 done")
    assert "".join(parts) == "naïve 🙂 日本語 done"
    assert not any("\ufffd" in part for part in parts)
    assert "🙂" in "".join(part for part in parts if len(part) < 3)


def test_invalid_bytes_do_not_delay_later_text() -> None:
    tokenizer = bpe_tokenizer()
    # This token is the byte 0xC3, which begins a character of two bytes.
    lone_byte = tokenizer.convert_tokens_to_ids("Ã")
    decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    detokenizer = Detokenizer(decode, [])
    assert "".join(detokenizer.push([lone_byte]) for _ in range(100)).count("\ufffd") >= 97
    assert detokenizer.push(tokenizer("a")["input_ids"]).endswith("a")


def test_a_leading_space_is_kept_after_a_prompt() -> None:
    tokens = {0: "The", 1: "▁cat", 2: "▁sat"}

    def decode(ids: list[int]) -> str:
        return "".join(tokens[id] for id in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode, [0])
    assert [detokenizer.push([id]) for id in (1, 2)] == [" cat", " sat"]
    assert Detokenizer(decode, []).push([1]) == "cat"


@pytest.mark.parametrize(
    ("stops", "parts", "expected_texts", "stop"),
    [
        (["END"], ["one E", "N", "D two"], ["one ", "", ""], "END"),
        (["END"], ["one E", "Nough"], ["one ", "ENough"], None),
        (["aab"], ["a", "a", "a", "b!"], ["", "", "a", ""], "aab"),
        (["x", "lo w"], ["hel", "lo wor", "x"], ["he", "l"], "lo w"),
        (["\n\n", "."], ["a\n", "b", "\n", "\nc"], ["a", "\nb", "", ""], "\n\n"),
        ([], ["a", "b"], ["a", "b"], None),
    ],
)
def test_text_ends_before_a_stop_string(
    stops: list[str], parts: list[str], expected_texts: list[str], stop: str | None
) -> None:
    stop_strings = StopStrings(stops)
    texts = []
    for part in parts:
        text, stop_string = stop_strings.push(part)
        texts.append(text)
        if stop_string is not None:
            break
    assert (texts, stop_string) == (expected_texts, stop)


def test_an_incomplete_stop_string_is_sent_at_the_end() -> None:
    stops = StopStrings(["END"])
    assert stops.push("the EN") == ("the ", None)
    assert stops.finish() == "EN"


def test_long_bodies_are_read_in_a_thread_one_at_a_time() -> None:
    running = threading.Lock()
    has_begun, may_continue = threading.Event(), threading.Event()

    def read() -> str:
        assert running.acquire(blocking=False)
        has_begun.set()
        assert may_continue.wait(30)
        running.release()
        return threading.current_thread().name

    async def ask() -> list[str]:
        long_reads = [
            asyncio.ensure_future(run_without_blocking_streams(b" " * (LONG_BODY_BYTES + 1), read))
            for _ in range(3)
        ]
        await asyncio.to_thread(has_begun.wait, 30)
        # The short body is read during the reading of the first long one.
        short_read = await run_without_blocking_streams(
            b" " * LONG_BODY_BYTES, lambda: threading.current_thread().name
        )
        may_continue.set()
        return [short_read, *await asyncio.gather(*long_reads)]

    short_read, *long_reads = asyncio.run(ask())
    assert short_read == threading.current_thread().name
    assert {name.rpartition("_")[0] for name in long_reads} == {"tsx-tokenizing"}


def test_each_byte_has_an_entry_in_both_kinds_of_vocabularies() -> None:
    from tokenizers import pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(map(vocabulary_bytes, alphabet)) == [bytes([byte]) for byte in range(256)]
    assert [vocabulary_bytes(f"<0x{byte:02X}>") for byte in (0, 0xE2)] == [b"\0", b"\xe2"]
    assert vocabulary_bytes("<0xE2>a") == b"<0xE2>a"
    assert vocabulary_bytes("\ufffd日") == "\ufffd日".encode()
