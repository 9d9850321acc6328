"""The tokens that end a text, and the threads of a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tsx_runtime.features.generation.worker.loading import find_end_tokens, torch_threads


@pytest.mark.parametrize(
    ("defaults", "config", "tokenizer", "tokens"),
    [
        (5, 2, 5, [5]),  # 2 may be the default of the model's class.
        ([7, 5], 2, 6, [5, 6, 7]),
        (None, [9, 8], None, [8, 9]),
        (None, 2, 4, [2, 4]),
        (None, None, None, []),
    ],
)
def test_generation_config_has_priority_over_the_models_config(
    defaults: object, config: object, tokenizer: object, tokens: list[int]
) -> None:
    parts = (SimpleNamespace(eos_token_id=value) for value in (defaults, config, tokenizer))
    assert find_end_tokens(*parts) == tokens


@pytest.mark.parametrize(
    ("parameters", "cores", "threads"),
    [(3_000_000, 8, 7), (3_000_000, 1, 1), (1_000_000_000, 8, 8)],
)
def test_a_small_model_leaves_one_core_to_the_event_loops(
    parameters: int, cores: int, threads: int
) -> None:
    assert torch_threads(parameters, cores) == threads
