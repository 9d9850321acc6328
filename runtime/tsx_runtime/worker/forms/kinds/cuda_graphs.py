"""The archive's own model as CUDA graphs: the kernels of a whole batch are launched at once, which
makes small models faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from tsx_runtime.worker.forms.buckets import (
    BatchBuckets,
    buckets_of,
    example,
    not_fixed,
    padded,
    with_fallback,
)
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FlatModel, Signature

# calls before a capture, as in torch's notes on CUDA: libraries allocate memory and choose kernels
# in them
WARM_UP = 3


class CapturedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]  # which a replay reads
    results: Sequence[torch.Tensor]  # which it writes


class CudaGraphsForm(Form):
    """It has no files: a graph holds addresses of its process."""

    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        return not_fixed(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Captures the largest batch: a model that cannot be captured fails here, not in a
        worker.
        """
        signature, buckets = subject.flat_signature(), buckets_of(subject)
        with torch.cuda.device(subject.device):
            _captured(
                FlatModel(subject.model, signature), example(subject, buckets.sizes[-1]), None
            )
        return buckets._asdict()

    def load(self, source: FormSource) -> Callable[..., Any]:
        buckets = BatchBuckets.from_json(source.settings)
        with torch.cuda.device(source.device):
            return with_fallback(buckets, source, ReplayedModel(source, buckets).run)


class ReplayedModel:
    """A graph for each batch size. They share their memory, so only one of them runs at a time."""

    def __init__(self, source: FormSource, buckets: BatchBuckets) -> None:
        self._signature = signature = source.flat_signature()
        self._buckets = buckets
        self._device = source.device
        self._lock = threading.Lock()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        flat, pool = FlatModel(source.reference(), signature), torch.cuda.graph_pool_handle()
        self._graphs = {
            size: _captured(flat, _blank(signature, size, source.device), pool)
            for size in reversed(
                buckets.sizes
            )  # a smaller one fits into the memory of a larger one
        }

    def run(self, size: int, rows: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        captured = self._graphs[size]
        with self._lock, torch.cuda.device(self._device):
            torch.cuda.current_stream().wait_event(
                self._done
            )  # of the previous batch, which another thread may have run
            for held, tensor in zip(
                captured.inputs, padded(self._signature, tensors, size), strict=True
            ):
                held.copy_(tensor)
            captured.graph.replay()
            results = [tensor.clone() for tensor in self._buckets.cut(captured.results, rows)]
            self._done.record()
        return results


def _captured(flat: FlatModel, inputs: list[torch.Tensor], pool: Any) -> CapturedGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(WARM_UP):
            flat(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool), torch.no_grad():
        results = flat(*inputs)
    return CapturedGraph(graph, inputs, results)


def _blank(signature: Signature, size: int, device: torch.device) -> list[torch.Tensor]:
    """Zeros of the shapes of a batch: valid as numbers and as indices."""
    return [
        torch.zeros(
            [size if at in own.rows else fixed or 0 for at, fixed in enumerate(own.shape)],
            dtype=getattr(torch, own.dtype),
            device=device,
        )
        for own in signature.inputs
    ]


FORMS = (CudaGraphsForm("cuda-graphs", "CUDA graphs"),)
