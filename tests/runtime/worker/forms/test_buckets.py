"""The batch sizes of forms that run only fixed sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forms import subject_of, tensor_inputs
from tsx_runtime.worker.forms.buckets import (
    BatchBuckets,
    check_fixed_shapes,
    choose_buckets,
    count_rows,
    example_batch,
    pad_batch,
)
from tsx_runtime.worker.forms.form import NotBuilt


def flattened(rows: torch.Tensor) -> torch.Tensor:
    return rows.flatten()


def test_a_batch_runs_in_the_smallest_size_that_holds_it() -> None:
    buckets = choose_buckets(subject_of(nn.Linear(4, 2), tensor_inputs(4)))
    assert buckets.sizes == (1, 2, 4, 8, 16, 32)
    assert [buckets.size_for(rows) for rows in (1, 3, 32, 33, None)] == [1, 4, 32, None, None]
    assert (
        choose_buckets(subject_of(nn.Linear(4, 2), tensor_inputs(4), sizes=(2, 48))).sizes[-1] == 64
    )
    assert BatchBuckets.from_json(buckets._asdict()) == buckets


def test_padding_is_removed_from_the_results() -> None:
    subject = subject_of(nn.Linear(4, 2), tensor_inputs(4))
    assert subject.signature is not None
    batch = pad_batch(subject.signature, [torch.arange(12.0).view(3, 4)], 4)
    assert batch[0][3].tolist() == [0, 1, 2, 3]  # a copy of the first row
    assert count_rows(subject.signature, batch) == 4
    assert [tensor.shape for tensor in choose_buckets(subject).cut([torch.ones(4, 2)], 3)] == [
        (3, 2)
    ]
    assert example_batch(subject, 5)[0].shape == (5, 4)


def test_calls_with_other_shapes_are_refused_with_the_reason() -> None:
    def of_any_length(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.ones(rows, rows + 1),), {}

    assert "each shape" in str(check_fixed_shapes(subject_of(torch.sum, of_any_length)))
    without_batch = subject_of(nn.Linear(4, 2), lambda _: ((torch.ones(4),), {}))
    assert "no dimension for a batch" in str(check_fixed_shapes(without_batch))
    with pytest.raises(NotBuilt, match="depends on the batch size"):
        choose_buckets(subject_of(flattened, tensor_inputs(4)))
