"""Attention of a step on a CPU: by sequence where there are many, since transformers' own computes all queries against all keys."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

FEW = 1 << 14  # pairs of a query and a key for each thread: up to so many, one call with a mask is faster than a call for each sequence


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **options: Any) -> tuple[torch.Tensor, None]:
    """Shapes (1, heads, tokens of all sequences, head size); the mask (1, 1, queries, keys). Returns (1, queries, heads, head size)."""
    bounds = options.get("cu_seq_lens_q")
    special = options.get("position_bias") is not None or options.get("softcap") is not None
    if bounds is None or mask is None or special or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)  # type: ignore[no-any-return]
    attention = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=True)
    if len(bounds) == 2 or query.shape[2] * key.shape[2] <= FEW * torch.get_num_threads():
        return attention(query, key, value, mask).transpose(1, 2).contiguous(), None
    queries, keys = (pairwise(options[name].tolist()) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    outputs = [
        attention(query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1], mask[:, :, q0:q1, k0:k1])
        for (q0, q1), (k0, k1) in zip(queries, keys, strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def register() -> None:
    """In place of transformers' `sdpa`, for this process."""
    AttentionInterface.register("sdpa", attend)
