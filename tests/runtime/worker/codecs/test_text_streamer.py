"""The streamer of texts from a language model."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.worker.codecs.text_streamer import TextIteratorStreamerBatch


class Tokens(list[Any]):
    """A stand-in for a tensor of tokens."""

    def tolist(self) -> list[Any]:
        return list(self)


class Tokenizer:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens: list[int], upper: bool = False) -> str:
        text = "".join(map(chr, tokens))
        return text.upper() if upper else text


def new_stream(rows: int, **options: Any) -> TextIteratorStreamerBatch:
    return TextIteratorStreamerBatch(Tokenizer(), rows, timeout=0, **options)


def stream_of(texts: list[str], **options: Any) -> TextIteratorStreamerBatch:
    stream = new_stream(len(texts), **options)
    stream.put(Tokens([[ord("?")]] * len(texts)))
    for step in zip(*texts, strict=True):
        stream.put(Tokens(map(ord, step)))
    stream.end()
    return stream


def test_a_word_is_sent_once_it_is_complete() -> None:
    assert list(stream_of(["a bc", "xy z"], skip_prompt=True)) == [
        ["", ""],
        ["a ", ""],
        ["", "xy "],
        ["", ""],
        ["bc", "z"],
    ]


@given(
    st.lists(st.text("ab \n\u4e2d", min_size=5, max_size=5), min_size=1, max_size=3), st.booleans()
)
def test_the_joined_pieces_of_a_row_are_its_text(texts: list[str], skip_prompt: bool) -> None:
    pieces = list(stream_of(texts, skip_prompt=skip_prompt))
    assert ["".join(row) for row in zip(*pieces, strict=True)] == [
        text if skip_prompt else f"?{text}" for text in texts
    ]


def test_decoding_options_reach_the_tokenizer() -> None:
    assert "".join(piece for (piece,) in stream_of(["ab"], skip_prompt=True, upper=True)) == "AB"


def test_a_wrong_number_of_rows_is_refused_and_an_ended_model_ends_the_stream() -> None:
    stream = new_stream(2)
    with pytest.raises(ValueError, match="for 2 rows, but 1 came"):
        stream.put(Tokens([1]))
    with pytest.raises(queue.Empty):
        next(stream)
