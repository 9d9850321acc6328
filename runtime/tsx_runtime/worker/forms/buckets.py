"""Batch sizes (buckets) for graphs that take only tensors of fixed shapes.

A batch is padded to the smallest size that holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tsx_runtime.worker.forms.form import FormSource, NotBuilt, Subject
from tsx_runtime.worker.forms.signature import FREE, FlatModel, Signature

MAX_BATCH = 32  # the largest bucket, unless the calibration has larger batches


class BatchBuckets(NamedTuple):
    """The batch sizes of a form.

    Attributes:
        sizes: The sizes in ascending order.
        results: For each tensor of the result, the dimensions that have the batch size.
    """

    sizes: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> BatchBuckets:
        """Read the settings of a form."""
        return cls(tuple(fields["sizes"]), tuple(map(tuple, fields["results"])))

    def size_for(self, rows: int | None) -> int | None:
        """Return the size to which a batch is padded; None if no size is large enough."""
        index = len(self.sizes) if rows is None else bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def cut(self, tensors: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Return the result tensors without the rows of the padding."""
        return [
            _narrow(tensor, dimensions, rows)
            for tensor, dimensions in zip(tensors, self.results, strict=True)
        ]


def check_fixed_shapes(subject: Subject) -> str | None:
    """Explain why the model cannot run in graphs of fixed shapes; None if it can."""
    if subject.signature is None:
        return subject.no_signature
    inputs = subject.signature.inputs
    if any(
        size is FREE and dimension not in input.rows
        for input in inputs
        for dimension, size in enumerate(input.shape)
    ):
        return (
            "its inputs differ in other sizes than that of the batch, and each shape would need a"
            " graph of its own"
        )
    return (
        None if any(input.rows for input in inputs) else "its inputs have no dimension for a batch"
    )


def choose_buckets(subject: Subject) -> BatchBuckets:
    """Return powers of two as sizes, and find the batch dimensions by two calls of the model.

    Raises:
        NotBuilt: The shapes of the model's results differ in more than the batch.
    """
    signature = subject.flat_signature()
    largest = max(MAX_BATCH, *(call.rows for call in subject.calls))
    sizes = tuple(1 << power for power in range((largest - 1).bit_length() + 1))
    flat = FlatModel(subject.model, signature)
    with torch.no_grad():
        results_of_2_rows, results_of_3_rows = (
            flat(*example_batch(subject, rows)) for rows in (2, 3)
        )
    results = []
    for small, large in zip(results_of_2_rows, results_of_3_rows, strict=True):
        pairs = list(zip(small.shape, large.shape, strict=True))
        if any(a != b and (a, b) != (2, 3) for a, b in pairs):
            raise NotBuilt("a size of its result depends on the batch size and is not equal to it")
        results.append(tuple(dimension for dimension, pair in enumerate(pairs) if pair == (2, 3)))
    return BatchBuckets(sizes, tuple(results))


def example_batch(subject: Subject, rows: int) -> list[torch.Tensor]:
    """Return the first row of the largest call, repeated to this number of rows."""
    signature = subject.flat_signature()
    call = max(subject.calls, key=lambda call: call.rows)
    tensors = signature.tensors(call.args, call.kwargs)
    assert tensors is not None
    return pad_batch(
        signature,
        [
            _narrow(tensor, input.rows, 1)
            for tensor, input in zip(tensors, signature.inputs, strict=True)
        ],
        rows,
    )


def count_rows(signature: Signature, tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the batch size of a call; None if its tensors do not agree on it."""
    sizes = {
        tensor.shape[dimension]
        for tensor, input in zip(tensors, signature.inputs, strict=True)
        for dimension in input.rows
    }
    return sizes.pop() if len(sizes) == 1 else None


def pad_batch(
    signature: Signature, tensors: Sequence[torch.Tensor], size: int
) -> list[torch.Tensor]:
    """Pad tensors with copies of their first row, since zeros might be invalid inputs."""
    batch = []
    for tensor, input in zip(tensors, signature.inputs, strict=True):
        for dimension in input.rows:
            if missing := size - tensor.shape[dimension]:
                tensor = torch.cat([tensor, *[tensor.narrow(dimension, 0, 1)] * missing], dimension)
        batch.append(tensor)
    return batch


def with_fallback(
    buckets: BatchBuckets,
    source: FormSource,
    run: Callable[[int, int, Sequence[torch.Tensor]], list[torch.Tensor]],
) -> Callable[..., Any]:
    """Return a graph that calls `run(size, rows, tensors)` if a bucket holds the rows.

    For other calls, the graph calls the archive's own model.
    """

    def graph(*tensors: torch.Tensor) -> Any:
        rows = count_rows(source.flat_signature(), tensors)
        size = buckets.size_for(rows)
        if rows is None or size is None:
            return source.run_original(*tensors)
        return run(size, rows, tensors)

    return graph


def _narrow(tensor: torch.Tensor, dimensions: Sequence[int], rows: int) -> torch.Tensor:
    for dimension in dimensions:
        tensor = tensor.narrow(dimension, 0, rows)
    return tensor
