"""Attention of each sequence of a step by itself.

Without the package flash-attn, transformers computes all queries of a step against all keys, under
a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.utils import find_head_dim
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

# If the name contains `flash`, transformers makes no mask, and on a GPU it records CUDA graphs.
CPU_IMPLEMENTATION, GPU_IMPLEMENTATION = "torch_flash_cpu", "torch_flash"
OTHER_KINDS = ("position_bias", "softcap", "s_aux")  # arguments of attention, not computed here


def attend_on_cpu(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for each sequence separately.

    Query, key and value have the shape (1, heads, tokens of all sequences, head size). The queries
    of a sequence are its last tokens. The result has the shape (1, queries, heads, head size).

    Raises:
        ValueError: The model has another kind of attention.
    """
    _refuse(options, OTHER_KINDS)
    if "cu_seq_lens_q" not in options:  # a call of the model outside the engine
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    sequences: Iterable[tuple[Any, Any, Any]] = [(query, key, value)]
    if len(options["cu_seq_lens_q"]) > 2:
        query_counts, key_counts = (
            [end - start for start, end in pairwise(options[name].tolist())]
            for name in ("cu_seq_lens_q", "cu_seq_lens_k")
        )
        sequences = zip(
            query.split(query_counts, 2),
            key.split(key_counts, 2),
            value.split(key_counts, 2),
            strict=True,
        )
    outputs = [
        scaled_dot_product_attention(
            queries,
            keys,
            values,
            causal_mask(queries, keys, options.get("sliding_window")),
            scale=scaling,
            enable_gqa=True,
        )
        for queries, keys, values in sequences
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2).contiguous(), None


def causal_mask(queries: Any, keys: Any, window: int | None) -> torch.Tensor | None:
    """Return a mask of shape (queries, keys), where -inf excludes a key; None if none is excluded.

    Args:
        queries: The last tokens of a sequence, of shape (1, heads, queries, head size).
        keys: The tokens that the cache still holds, of shape (1, heads, keys, head size).
        window: The number of tokens to which a token attends, itself included.
    """
    query_count, key_count = queries.shape[2], keys.shape[2]
    if query_count == 1:
        return None
    mask = torch.full((query_count, key_count), -torch.inf, dtype=queries.dtype)
    mask.triu_(key_count - query_count + 1)
    if window is not None and window < key_count:
        mask += torch.full_like(mask, -torch.inf).tril_(key_count - query_count - window)
    return mask


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

    The tensors have the shapes as in `attend_on_cpu`, in fp16 or bf16.

    Raises:
        ValueError: The kernel does not compute this kind of attention.
    """
    _refuse(options, (*OTHER_KINDS, "sliding_window"), ": set huggingface.dtype to fp32")
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


def _refuse(options: Mapping[str, Any], names: Sequence[str], advice: str = "") -> None:
    if kinds := [name for name in names if options.get(name) is not None]:
        raise ValueError(f"tsx does not compute attention with {', '.join(kinds)}{advice}")


def choose_attention(model: Any) -> None:
    """Let a model use the attention of this module if it computes the same.

    It does not compute capped scores, sinks, and keys and values with heads of different sizes. On
    a GPU, torch's kernel does not compute sliding windows and some head sizes, and is not needed if
    transformers finds a flash-attention package.
    """
    config = model.config.get_text_config()
    head_size = find_head_dim(config)
    layers = set(getattr(config, "layer_types", None) or ()) or {
        "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    }
    if (
        model.config._attn_implementation != "sdpa"
        or not model._supports_flash_attn
        or getattr(model, "_compatible_flash_implementations", None)  # attention sinks
        or getattr(config, "attn_logit_softcapping", None) is not None
        # With these settings, keys and values have heads of different sizes.
        or getattr(config, "kv_lora_rank", None) is not None
        or getattr(config, "v_head_dim", None) not in (None, head_size)
    ):
        return
    # An encoder of images has a configuration and an attention of its own.
    if model.device.type == "cpu" and layers <= {"full_attention", "sliding_attention"}:
        config._attn_implementation = CPU_IMPLEMENTATION
    elif (
        model.device.type == "cuda"
        and layers == {"full_attention"}
        and model.dtype in (torch.float16, torch.bfloat16)
        and head_size % 8 == 0
        and head_size <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(model.device) >= (8, 0)
        and not is_flash_attn_3_available(kernels_fallback_ok=True)
        and not is_flash_attn_2_available(kernels_fallback_ok=True)
    ):
        config._attn_implementation = GPU_IMPLEMENTATION


def register_attention() -> None:
    """Make the functions of this module known to transformers."""
    AttentionInterface.register(CPU_IMPLEMENTATION, attend_on_cpu)
    AttentionInterface.register(GPU_IMPLEMENTATION, attend_on_gpu)
