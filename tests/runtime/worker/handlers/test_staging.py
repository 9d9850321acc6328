"""Copies to a device, which use pinned memory for large plain tensors."""

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
LARGE_TENSOR = torch.zeros(MIN_STAGED_BYTES)


@pytest.mark.parametrize(
    ("tensors", "staged"),
    [
        ([LARGE_TENSOR], True),
        ([LARGE_TENSOR, LARGE_TENSOR], True),
        ([torch.zeros(2)], False),
        ([torch.zeros(MIN_STAGED_BYTES, requires_grad=True)], False),
        ([torch.eye(100).to_sparse()], False),
        ([LARGE_TENSOR, LARGE_TENSOR.double()], False),
    ],
)
def test_only_tensors_that_a_plain_copy_preserves_are_staged(
    tensors: list[torch.Tensor], staged: bool
) -> None:
    assert is_staged(tensors, GPU) is staged
    assert not is_staged(tensors, CPU)


def test_tensors_are_not_copied_to_the_cpu() -> None:
    assert to_device(LARGE_TENSOR, CPU) is LARGE_TENSOR
    assert to_device([LARGE_TENSOR, "name"], CPU) == [LARGE_TENSOR, "name"]
    assert torch.equal(
        stack_on_device([LARGE_TENSOR, LARGE_TENSOR], CPU), torch.zeros(2, MIN_STAGED_BYTES)
    )
    with pytest.raises(RuntimeError, match="equal size"):
        stack_on_device([LARGE_TENSOR, torch.zeros(MIN_STAGED_BYTES + 1)], CPU)


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: pinned memory cannot be had without one",
)
def test_a_series_of_tensors_is_copied_correctly_to_a_gpu() -> None:
    tensors = [torch.randn(1 << 20) for _ in range(20)]
    copies = to_device(tensors, GPU)
    assert all(
        torch.equal(tensor, copy.cpu()) for tensor, copy in zip(tensors, copies, strict=True)
    )
    assert torch.equal(stack_on_device(tensors, GPU).cpu(), torch.stack(tensors))
