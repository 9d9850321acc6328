"""Staged copies are copies, and no buffer is written again before what was sent from it has
arrived.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.worker.handlers.staging import (
    LEAST,
    Staging,
    can_stack,
    can_stage,
    stack_on_device,
    to_device,
)

CPU = torch.device("cpu")


class Event:
    """As CUDA's: what it was recorded after is over once `synchronize` has returned."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record(self, stream: object) -> None:
        self.log.append(f"sent from {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait for {self.name}")


def staging(log: list[str]) -> Staging:
    names = iter("abcdefgh")
    return Staging(
        lambda size: torch.empty(size, dtype=torch.uint8), lambda: Event(log, next(names))
    )


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]),
)
def test_what_arrives_is_what_was_sent_though_buffers_are_used_again(
    sizes: list[int], dtype: torch.dtype
) -> None:
    stage = staging([])
    sent = [torch.randint(0, 2, (size, 3)).to(dtype) for size in sizes]
    arrived = [stage.send(tensor, CPU) for tensor in sent]
    assert all(
        torch.equal(one, other) and one.dtype == other.dtype
        for one, other in zip(sent, arrived, strict=True)
    )
    stacked = stage.stack([sent[0]] * 3, CPU)
    assert torch.equal(stacked, torch.stack([sent[0]] * 3))


def test_a_buffer_is_written_again_only_when_the_copy_out_of_it_is_over() -> None:
    log: list[str] = []
    stage = staging(log)
    for size in (10, 10, 10, 5, 20, 20):
        stage.send(torch.zeros(size), CPU)
    assert log == [
        "sent from a",
        "sent from b",
        "wait for a",
        "sent from a",
        "wait for b",
        "sent from b",
        "wait for a",
        "sent from c",  # too small, so a new one in its place
        "wait for b",
        "sent from d",
    ]


@pytest.mark.parametrize(
    ("tensor", "staged"),
    [
        (torch.zeros(LEAST), True),
        (torch.zeros(2), False),
        (torch.zeros(100, 100).t()[:, ::2], False),
        (torch.zeros(4, 8, 32, 32).to(memory_format=torch.channels_last), False),
        (torch.zeros(LEAST, requires_grad=True), False),
        (torch.eye(100).to_sparse(), False),
    ],
)
def test_only_what_a_plain_copy_carries_over_is_staged(tensor: torch.Tensor, staged: bool) -> None:
    assert can_stage(tensor) is staged


def test_tensors_that_do_not_fit_together_are_left_to_torch() -> None:
    big = torch.zeros(LEAST)
    assert can_stack([big, big])
    assert not can_stack([big, torch.zeros(LEAST + 1)])
    assert not can_stack([big, big.double()])
    with pytest.raises(RuntimeError, match="equal size"):
        stack_on_device([big, torch.zeros(LEAST + 1)], CPU)


def test_on_the_cpu_nothing_is_copied_twice() -> None:
    tensor = torch.ones(LEAST)
    assert to_device(tensor, CPU) is tensor
    assert torch.equal(stack_on_device([tensor, tensor], CPU), torch.ones(2, LEAST))


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: pinned memory cannot be had without one",
)
def test_on_a_gpu_a_stream_of_tensors_arrives_whole() -> None:
    device = torch.device("cuda:0")
    sent = [torch.randn(1 << 20) for _ in range(20)]
    arrived = [to_device(tensor, device) for tensor in sent]
    assert all(torch.equal(one, other.cpu()) for one, other in zip(sent, arrived, strict=True))
    stacked = stack_on_device(sent, device)
    assert torch.equal(stacked.cpu(), torch.stack(sent))
