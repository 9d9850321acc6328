"""Copies data to the GPU through pinned memory, so that the CPU continues during the copy.

A copy from ordinary memory makes the caller wait for it, and for all that the GPU has still to do
before it. From pinned memory it is queued on the current stream. torch keeps pinned memory for the
next copies, and uses it again only when the copy out of it is over.
https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# bytes; smaller ones are not worth it, larger ones would keep too much memory pinned
LEAST, MOST = 4 << 10, 256 << 20


def to_device(data: Any, device: torch.device) -> Any:
    """`data.to(device)`, without waiting for it where `data` is a tensor and `device` a GPU; the
    tensors of a list are copied one by one.
    """
    if isinstance(data, list):
        return [
            to_device(each, device) if isinstance(each, torch.Tensor) else each for each in data
        ]
    if isinstance(data, torch.Tensor) and is_staged([data], device):
        return data.pin_memory().to(device, non_blocking=True)
    return data.to(device)


def stack_on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """`torch.stack(tensors).to(device)`, by way of pinned memory where `device` is a GPU."""
    if not tensors or not is_staged(tensors, device):
        return torch.stack(list(tensors)).to(device)
    shape, dtype = (len(tensors), *tensors[0].shape), tensors[0].dtype
    pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.stack(list(tensors), out=pinned).to(device, non_blocking=True)


def is_staged(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether the tensors go to the device through pinned memory, all of them together."""
    kinds = {(each.dtype, each.device.type, each.layout, each.requires_grad) for each in tensors}
    return (
        device.type == "cuda"
        and kinds == {(tensors[0].dtype, "cpu", torch.strided, False)}
        and not tensors[0].is_quantized
        and LEAST <= sum(each.nbytes for each in tensors) <= MOST
    )
