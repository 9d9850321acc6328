"""Copies to a device, through pinned memory for plain tensors of enough bytes."""

from __future__ import annotations

import pytest
import torch

from tsx_runtime.worker.handlers.staging import (
    MIN_STAGED_BYTES,
    is_staged,
    stack_on_device,
    to_device,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
BIG = torch.zeros(MIN_STAGED_BYTES)


@pytest.mark.parametrize(
    ("tensors", "staged"),
    [
        ([BIG], True),
        ([BIG, BIG], True),
        ([torch.zeros(2)], False),
        ([torch.zeros(MIN_STAGED_BYTES, requires_grad=True)], False),
        ([torch.eye(100).to_sparse()], False),
        ([BIG, BIG.double()], False),
    ],
)
def test_only_what_a_plain_copy_carries_over_is_staged(
    tensors: list[torch.Tensor], staged: bool
) -> None:
    assert is_staged(tensors, GPU) is staged
    assert not is_staged(tensors, CPU)


def test_on_the_cpu_nothing_is_copied_twice() -> None:
    assert to_device(BIG, CPU) is BIG
    assert to_device([BIG, "name"], CPU) == [BIG, "name"]
    assert torch.equal(stack_on_device([BIG, BIG], CPU), torch.zeros(2, MIN_STAGED_BYTES))
    with pytest.raises(RuntimeError, match="equal size"):
        stack_on_device([BIG, torch.zeros(MIN_STAGED_BYTES + 1)], CPU)


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: pinned memory cannot be had without one",
)
def test_on_a_gpu_a_stream_of_tensors_arrives_whole() -> None:
    sent = [torch.randn(1 << 20) for _ in range(20)]
    arrived = to_device(sent, GPU)
    assert all(torch.equal(tensor, copy.cpu()) for tensor, copy in zip(sent, arrived, strict=True))
    assert torch.equal(stack_on_device(sent, GPU).cpu(), torch.stack(sent))
