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


@pytest.mark.parametrize("window", [None, 3, 8], ids=["full", "sliding", "wide"])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([1], [9]), ([7], [7]), ([4], [9]), ([1, 1, 1], [4, 12, 1]), ([5, 1, 3], [5, 8, 10])],
    ids=["one", "prompt", "rest", "next", "mixed"],
)
def test_each_sequence_attends_to_its_own_tokens(
    queries: list[int], keys: list[int], window: int | None
) -> None:
    torch.manual_seed(0)
    if window is not None:  # The cache holds no other tokens.
        keys = [
            min(count, query_count + window - 1)
            for count, query_count in zip(keys, queries, strict=True)
        ]
    bounds_q, bounds_k = (
        [0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in (queries, keys)
    )
    query, key, value = (
        torch.randn(1, 8, bounds_q[-1], 16),
        torch.randn(1, 4, bounds_k[-1], 16),
        torch.randn(1, 4, bounds_k[-1], 16),
    )
    mask = torch.full((1, 1, bounds_q[-1], bounds_k[-1]), torch.finfo(torch.float32).min)
    build_attention_mask(mask, bounds_q, bounds_k, window or 1)
    expected, _ = sdpa_attention_forward(GroupedHeads(), query, key, value, mask, scaling=0.25)
    output, _ = attention.attend_on_cpu(
        GroupedHeads(),
        query,
        key,
        value,
        None,
        0.25,
        sliding_window=window,
        cu_seq_lens_q=torch.tensor(bounds_q),
        cu_seq_lens_k=torch.tensor(bounds_k),
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_other_kinds_of_attention_are_refused() -> None:
    query = torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match="does not compute attention with softcap"):
        attention.attend_on_cpu(GroupedHeads(), query, query, query, None, softcap=30.0)
