"""Attention of a step on a CPU, by sequence: transformers' own computes all queries against the keys of all sequences, and masks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attend_by_sequence(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Shapes (1, heads, tokens of all sequences, head size); the mask (1, 1, queries, keys). Returns (1, queries, heads, head size)."""
    bounds = options.get("cu_seq_lens_q")
    if bounds is None or len(bounds) == 2 or attention_mask is None or query.device.type != "cpu" or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    queries, keys = (list(pairwise(each.tolist())) for each in (bounds, options["cu_seq_lens_k"]))
    outputs = [
        sdpa_attention_forward(
            module, query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1], attention_mask[:, :, q0:q1, k0:k1], **options
        )[0]
        for (q0, q1), (k0, k1) in zip(queries, keys, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register("sdpa", attend_by_sequence)
