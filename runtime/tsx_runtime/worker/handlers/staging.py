"""Copies to the GPU through pinned memory, during which the CPU continues.

A copy from ordinary memory makes the caller wait for it, and for all earlier work of the GPU. A
copy from pinned memory is queued on the current stream. torch keeps pinned memory for the next
copies, and uses it again only after the copy out of it has ended.
https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Staging does not pay for smaller tensors, and larger ones would keep too much memory pinned.
MIN_STAGED_BYTES, MAX_STAGED_BYTES = 4 << 10, 256 << 20


def to_device(data: Any, device: torch.device) -> Any:
    """Return `data.to(device)`; the caller does not wait for a copy to a GPU.

    The tensors of a list are copied one by one.
    """
    if isinstance(data, list):
        return [
            to_device(item, device) if isinstance(item, torch.Tensor) else item for item in data
        ]
    if isinstance(data, torch.Tensor) and is_staged([data], device):
        return data.pin_memory().to(device, non_blocking=True)
    return data.to(device)


def stack_on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return `torch.stack(tensors).to(device)`, through pinned memory if `device` is a GPU."""
    if not tensors or not is_staged(tensors, device):
        return torch.stack(list(tensors)).to(device)
    shape, dtype = (len(tensors), *tensors[0].shape), tensors[0].dtype
    pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.stack(list(tensors), out=pinned).to(device, non_blocking=True)


def is_staged(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Tell whether the tensors are copied together through pinned memory."""
    kinds = {
        (tensor.dtype, tensor.device.type, tensor.layout, tensor.requires_grad)
        for tensor in tensors
    }
    return (
        device.type == "cuda"
        and kinds == {(tensors[0].dtype, "cpu", torch.strided, False)}
        and not tensors[0].is_quantized
        and MIN_STAGED_BYTES <= sum(tensor.nbytes for tensor in tensors) <= MAX_STAGED_BYTES
    )
