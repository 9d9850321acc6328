"""Copies data to the GPU through pinned buffers, so that the CPU continues during the copy.

A copy from ordinary memory makes the caller wait for it, and for all that the GPU has still to do
before it. From pinned memory it is queued on the current stream. Pinning takes long, so two buffers
are kept for each thread and used in turn; each is written again only when the copy out of it is
over. https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

LEAST, MOST = (
    4 << 10,
    256 << 20,
)  # bytes; smaller ones are not worth it, larger ones would keep too much memory pinned

_threads = threading.local()


def to_device(data: Any, device: torch.device) -> Any:
    """`data.to(device)`, without waiting for it where `data` is a tensor and `device` a GPU."""
    if device.type == "cuda" and isinstance(data, torch.Tensor) and can_stage(data):
        return _staging().send(data, device)
    return data.to(device)


def stack_on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """`torch.stack(tensors).to(device)`, by way of a pinned buffer where `device` is a GPU."""
    if device.type == "cuda" and tensors and can_stack(tensors):
        return _staging().stack(tensors, device)
    return torch.stack(list(tensors)).to(device)


def can_stage(tensor: torch.Tensor, count: int = 1) -> bool:
    """Whether a copy of its bytes is a copy of it; how its elements lie in memory must stay as it
    is.
    """
    if (
        tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.requires_grad
    ):
        return False
    return (
        LEAST <= tensor.numel() * tensor.element_size() * count <= MOST and tensor.is_contiguous()
    )


def can_stack(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    alike = all(
        other.shape == first.shape and other.dtype == first.dtype and other.device == first.device
        for other in tensors
    )
    return (
        alike
        and not any(other.requires_grad for other in tensors)
        and can_stage(first, len(tensors))
    )


class Staging:
    """Two buffers, used in turn.

    `allocate` and `new_event` are pinned memory and CUDA's events, except in tests.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor] | None = None,
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        self._allocate = allocate or _pinned
        self._new_event = new_event or torch.cuda.Event
        self._buffers: list[tuple[torch.Tensor, Any] | None] = [None, None]

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        view = self._room(tensor.shape, tensor.dtype)
        view.copy_(tensor)
        return self._sent(view, device)

    def stack(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        view = self._room((len(tensors), *tensors[0].shape), tensors[0].dtype)
        torch.stack(list(tensors), out=view)
        return self._sent(view, device)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        slot = self._buffers.pop(0)
        if slot is not None:
            slot[1].synchronize()  # the last copy from it has finished
        if slot is None or slot[0].numel() < size:
            slot = (self._allocate(size), self._new_event())
        self._buffers.append(slot)
        return slot[0][:size].view(dtype).view(shape)

    def _sent(self, view: torch.Tensor, device: torch.device) -> torch.Tensor:
        slot = self._buffers[-1]
        assert slot is not None
        arriving = view.to(device, non_blocking=True, copy=True)
        slot[1].record(torch.cuda.current_stream(device) if device.type == "cuda" else None)
        return arriving


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _staging() -> Staging:
    found: Staging | None = getattr(_threads, "staging", None)
    if found is None:
        found = _threads.staging = Staging()
    return found
