"""Attention per sequence, which must equal transformers' masked attention over all sequences."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.generation.continuous_batching.utils import build_attention_mask  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from tsx_runtime.features.generation.worker.engines import attention  # noqa: E402


class GroupedHeads(torch.nn.Module):  # type: ignore[misc]
    is_causal = True
    num_key_value_groups = 2


@pytest.mark.parametrize("window", [1, 3], ids=["full", "sliding"])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([1], [9]), ([7], [7]), ([1, 1, 1], [4, 12, 1]), ([5, 1, 3], [5, 8, 10])],
    ids=["one", "prompt", "next", "mixed"],
)
def test_each_sequence_attends_to_its_own_tokens(
    monkeypatch: pytest.MonkeyPatch, queries: list[int], keys: list[int], window: int
) -> None:
    monkeypatch.setattr(attention, "MAX_MASKED_PAIRS_PER_THREAD", 0)
    torch.manual_seed(0)
    bounds_q, bounds_k = (
        [0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in (queries, keys)
    )
    query, key, value = (
        torch.randn(1, 8, bounds_q[-1], 16),
        torch.randn(1, 4, bounds_k[-1], 16),
        torch.randn(1, 4, bounds_k[-1], 16),
    )
    mask = torch.full((1, 1, bounds_q[-1], bounds_k[-1]), torch.finfo(torch.float32).min)
    build_attention_mask(mask, bounds_q, bounds_k, window)
    options = {
        "cu_seq_lens_q": torch.tensor(bounds_q),
        "cu_seq_lens_k": torch.tensor(bounds_k),
        "scaling": 0.25,
    }
    expected, _ = sdpa_attention_forward(GroupedHeads(), query, key, value, mask, **options)
    per_sequence, _ = attention.attend(GroupedHeads(), query, key, value, mask, **options)
    torch.testing.assert_close(per_sequence, expected, rtol=1e-5, atol=1e-5)
