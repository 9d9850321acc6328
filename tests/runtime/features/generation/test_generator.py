"""The sampling parameters that a generator passes to its engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.language_models import CONTEXT, bpe_tokenizer
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


def test_default_penalties_come_from_the_models_generation_config() -> None:
    configured = SimpleNamespace(repetition_penalty=1.1)
    assert apply_defaults(Sampling(), configured, 9).repetition_penalty == 1.1
    assert apply_defaults(Sampling(repetition_penalty=1.0), configured, 9).repetition_penalty == 1.0
    assert not apply_defaults(Sampling(), SimpleNamespace(), 9).changes_scores


@pytest.mark.parametrize("token", [0, 511, 512, 1 << 30])
def test_a_bias_for_an_unknown_token_is_refused(token: int) -> None:
    engine: Any = Engine()
    metrics: Any = None
    generator = TextGenerator(bpe_tokenizer(), engine, None, 512, metrics)
    if token < 512:
        generator.stream([1], Sampling(logit_bias={token: 1.0}))
        assert engine.last.logit_bias == {token: 1.0}
        return
    with pytest.raises(InvalidInput, match="they are 0 to 511"):
        generator.stream([1], Sampling(logit_bias={token: 1.0}))
