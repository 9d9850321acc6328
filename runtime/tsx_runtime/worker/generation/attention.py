"""Attention of a step on a CPU, by sequence: transformers' own computes all queries against the keys of all sequences, and masks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

FEW = 1 << 14  # pairs of a query and a key, of all sequences: up to so many, one call with a mask is faster than a call for each


def attend_by_sequence(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Shapes (1, heads, tokens of all sequences, head size); the mask (1, 1, queries, keys). Returns (1, queries, heads, head size)."""
    bounds = options.get("cu_seq_lens_q")
    many = bounds is not None and len(bounds) > 2 and mask is not None and query.shape[2] * key.shape[2] > FEW
    if not many or query.device.type != "cpu" or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    queries, keys = (pairwise(options[name].tolist()) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    outputs = [
        sdpa_attention_forward(module, query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1], mask[:, :, q0:q1, k0:k1], **options)[0]
        for (q0, q1), (k0, k1) in zip(queries, keys, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register("sdpa", attend_by_sequence)
