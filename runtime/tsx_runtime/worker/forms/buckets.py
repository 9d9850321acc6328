"""The batch sizes that graphs of fixed shapes are made for.

A batch is padded to the smallest size that holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tsx_runtime.worker.forms.form import FormSource, NotBuilt, Subject
from tsx_runtime.worker.forms.signature import FREE, FlatModel, Signature

LARGEST = 32  # unless the handler called the model with more rows


class BatchBuckets(NamedTuple):
    sizes: tuple[int, ...]  # ascending
    results: tuple[
        tuple[int, ...], ...
    ]  # for each tensor of the result: which dimensions are the batch

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> BatchBuckets:
        return cls(tuple(given["sizes"]), tuple(map(tuple, given["results"])))

    def holding(self, rows: int | None) -> int | None:
        """The size that a batch of these rows is padded to; None if none is large enough."""
        at = len(self.sizes) if rows is None else bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def cut(self, tensors: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """The results without the padding."""
        return [
            _narrowed(tensor, dimensions, rows)
            for tensor, dimensions in zip(tensors, self.results, strict=True)
        ]


def not_fixed(subject: Subject) -> str | None:
    """Why the model cannot run in graphs of fixed shapes, one for each batch size."""
    if subject.signature is None:
        return subject.no_signature
    inputs = subject.signature.inputs
    if any(
        size is FREE and at not in each.rows
        for each in inputs
        for at, size in enumerate(each.shape)
    ):
        return (
            "its inputs differ in other sizes than that of the batch, and each shape would need a"
            " graph of its own"
        )
    return None if any(each.rows for each in inputs) else "its inputs have no dimension for a batch"


def buckets_of(subject: Subject) -> BatchBuckets:
    """Powers of two.

    Calls the model twice. Raises NotBuilt if the shapes of its results differ in more than the
    batch.
    """
    signature = subject.flat_signature()
    largest = max(LARGEST, *(call.rows for call in subject.calls))
    sizes = tuple(1 << power for power in range((largest - 1).bit_length() + 1))
    flat = FlatModel(subject.model, signature)
    with torch.no_grad():
        few, many = (flat(*example(subject, rows)) for rows in (2, 3))
    results = []
    for one, other in zip(few, many, strict=True):
        pairs = list(zip(one.shape, other.shape, strict=True))
        if any(a != b and (a, b) != (2, 3) for a, b in pairs):
            raise NotBuilt("a size of its result depends on the batch size and is not equal to it")
        results.append(tuple(at for at, pair in enumerate(pairs) if pair == (2, 3)))
    return BatchBuckets(sizes, tuple(results))


def example(subject: Subject, rows: int) -> list[torch.Tensor]:
    """The first row of the largest call, repeated to this number of rows."""
    signature = subject.flat_signature()
    call = max(subject.calls, key=lambda each: each.rows)
    tensors = signature.tensors(call.args, call.kwargs)
    assert tensors is not None
    return padded(
        signature,
        [
            _narrowed(tensor, own.rows, 1)
            for tensor, own in zip(tensors, signature.inputs, strict=True)
        ],
        rows,
    )


def rows_of(signature: Signature, tensors: Sequence[torch.Tensor]) -> int | None:
    """The batch size of a call; None where its tensors do not agree on it."""
    found = {
        tensor.shape[at]
        for tensor, own in zip(tensors, signature.inputs, strict=True)
        for at in own.rows
    }
    return found.pop() if len(found) == 1 else None


def padded(signature: Signature, tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Padded with copies of the first row, which is valid input where zeros may not be."""
    made = []
    for tensor, own in zip(tensors, signature.inputs, strict=True):
        for at in own.rows:
            if missing := size - tensor.shape[at]:
                tensor = torch.cat([tensor, *[tensor.narrow(at, 0, 1)] * missing], at)
        made.append(tensor)
    return made


def with_fallback(
    buckets: BatchBuckets,
    source: FormSource,
    run: Callable[[int, int, Sequence[torch.Tensor]], list[torch.Tensor]],
) -> Callable[..., Any]:
    """A graph that calls `run(size, rows, tensors)` if a bucket holds the rows, else the archive's
    own model.
    """

    def graph(*tensors: torch.Tensor) -> Any:
        rows = rows_of(source.flat_signature(), tensors)
        size = buckets.holding(rows)
        if rows is None or size is None:
            return source.run_original(*tensors)
        return run(size, rows, tensors)

    return graph


def _narrowed(tensor: torch.Tensor, dimensions: Sequence[int], rows: int) -> torch.Tensor:
    for at in dimensions:
        tensor = tensor.narrow(at, 0, rows)
    return tensor
