"""The sampling parameters that a generator passes to its engine, and the bytes of tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.language_models import CONTEXT, bpe_tokenizer, byte_fallback_tokenizer
from tsx_runtime.features.generation.worker.generator import TextGenerator, apply_defaults
from tsx_runtime.features.generation.worker.interface import Media, Sampling, Tokens
from tsx_runtime.worker.exceptions import InvalidInput


class Engine:
    """An engine that stores the sampling parameters of the last request."""

    context_length = CONTEXT
    adapters = ()
    last: Sampling

    def refusal(self, sampling: Sampling) -> None:
        return None

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, media: Media | None = None
    ) -> AsyncGenerator[Tokens, None]:
        self.last = sampling
        return SimpleNamespace()  # type: ignore[return-value]  # unread


def make_generator(tokenizer: Any, engine: Any = None) -> TextGenerator:
    metrics: Any = None
    return TextGenerator(tokenizer, engine or Engine(), None, 512, metrics)


def test_default_penalties_come_from_the_models_generation_config() -> None:
    configured = SimpleNamespace(repetition_penalty=1.1)
    assert apply_defaults(Sampling(), configured, 9).repetition_penalty == 1.1
    assert apply_defaults(Sampling(repetition_penalty=1.0), configured, 9).repetition_penalty == 1.0
    assert not apply_defaults(Sampling(), SimpleNamespace(), 9).changes_scores


@pytest.mark.parametrize("token", [0, 511, 512, 1 << 30])
def test_a_bias_for_an_unknown_token_is_refused(token: int) -> None:
    engine: Any = Engine()
    generator = make_generator(bpe_tokenizer(), engine)
    if token < 512:
        generator.stream([1], Sampling(logit_bias={token: 1.0}))
        assert engine.last.logit_bias == {token: 1.0}
        return
    with pytest.raises(InvalidInput, match="they are 0 to 511"):
        generator.stream([1], Sampling(logit_bias={token: 1.0}))


@given(st.text(st.characters(exclude_characters="▁<", exclude_categories=["Cs"]), max_size=40))
def test_the_bytes_of_all_tokens_together_are_the_text(text: str) -> None:
    for tokenizer, start in ((bpe_tokenizer(), ""), (byte_fallback_tokenizer(), " ")):
        generator = make_generator(tokenizer)
        tokens = map(generator.token_bytes, generator.encode(text))
        assert b"".join(tokens) == (text and start + text).encode()


def test_a_special_token_has_no_bytes() -> None:
    for tokenizer in (bpe_tokenizer(), byte_fallback_tokenizer()):
        assert make_generator(tokenizer).token_bytes(0) == b""
