"""Attention that is computed for each sequence of a step separately.

Without the package flash-attn, transformers computes all queries of a step against all keys, under
a mask.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.utils import find_head_dim
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

# Pairs of a query and a key. Up to this number, one call with a mask is faster than a call for each
# sequence.
MAX_MASKED_PAIRS_PER_THREAD = 1 << 14
# If the name contains `flash`, transformers makes no mask and records CUDA graphs.
FLASH_IMPLEMENTATION = "torch_flash"


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for each sequence separately on a CPU, and elsewhere as transformers does.

    Query, key and value have the shape (1, heads, tokens of all sequences, head size), and the mask
    has (1, 1, queries, keys). The result has (1, queries, heads, head size).
    """
    query_bounds = options.get("cu_seq_lens_q")
    has_unsupported_options = (
        options.get("position_bias") is not None or options.get("softcap") is not None
    )
    if (
        query_bounds is None
        or attention_mask is None
        or has_unsupported_options
        or query.device.type != "cpu"
    ):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    attention = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=True)
    if (
        len(query_bounds) == 2
        or query.shape[2] * key.shape[2] <= MAX_MASKED_PAIRS_PER_THREAD * torch.get_num_threads()
    ):
        return attention(query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    queries, keys = (
        pairwise(options[name].tolist()) for name in ("cu_seq_lens_q", "cu_seq_lens_k")
    )
    outputs = [
        attention(
            query[:, :, q0:q1],
            key[:, :, k0:k1],
            value[:, :, k0:k1],
            attention_mask[:, :, q0:q1, k0:k1],
        )
        for (q0, q1), (k0, k1) in zip(queries, keys, strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def attend_on_gpu(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention by the flash-attention kernel of torch.

    The tensors have the shapes as in `attend`, in fp16 or bf16. There is no mask, since the queries
    of a sequence are its last tokens.

    Raises:
        ValueError: The kernel does not support this kind of attention.
    """
    if unsupported_options := [
        name
        for name in ("position_bias", "softcap", "s_aux", "sliding_window")
        if options.get(name) is not None
    ]:
        raise ValueError(
            f"torch's kernel does not compute {', '.join(unsupported_options)}: set"
            " huggingface.dtype to fp32"
        )
    heads = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    length_arguments = (
        options[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    )
    return (
        torch.ops.aten._flash_attention_forward(
            *heads, *length_arguments, 0.0, True, False, scale=scaling
        )[0][None],
        None,
    )


def choose_attention(model: Any) -> None:
    """Let a model on a GPU use `attend_on_gpu` if torch's kernel supports its attention.

    The kernel does not support sliding windows, capped scores, sinks and some head sizes. It is not
    needed if transformers finds a flash-attention package.
    """
    config = model.config.get_text_config()
    layers, head_size = getattr(config, "layer_types", None), find_head_dim(config)
    if (
        model.device.type == "cuda"
        and model.dtype in (torch.float16, torch.bfloat16)
        and model.config._attn_implementation == "sdpa"
        and model._supports_flash_attn
        and not getattr(model, "_compatible_flash_implementations", None)  # attention sinks
        and getattr(config, "attn_logit_softcapping", None) is None
        and (
            set(layers) == {"full_attention"}
            if layers
            else getattr(config, "sliding_window", None) is None
        )
        # With these settings, keys and values have heads of different sizes.
        and getattr(config, "kv_lora_rank", None) is None
        and getattr(config, "v_head_dim", None) in (None, head_size)
        and head_size % 8 == 0
        and head_size <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(model.device) >= (8, 0)
        and not is_flash_attn_3_available(kernels_fallback_ok=True)
        and not is_flash_attn_2_available(kernels_fallback_ok=True)
    ):
        # An encoder of images has a configuration and an attention of its own.
        config._attn_implementation = FLASH_IMPLEMENTATION


def register_attention() -> None:
    """Replace transformers' `sdpa` by `attend` in this process."""
    AttentionInterface.register("sdpa", attend)
    AttentionInterface.register(FLASH_IMPLEMENTATION, attend_on_gpu)
