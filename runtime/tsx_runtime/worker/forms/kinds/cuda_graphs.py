"""The archive's own model as CUDA graphs.

A graph launches all kernels of a batch at once, which makes small models faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from tsx_runtime.worker.forms.buckets import (
    BatchBuckets,
    check_fixed_shapes,
    choose_buckets,
    example_batch,
    pad_batch,
    with_fallback,
)
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FlatModel, Signature

# Calls before a capture, in which libraries allocate memory and choose kernels. torch's notes on
# CUDA recommend them.
WARM_UP_CALLS = 3


class CapturedGraph(NamedTuple):
    """A captured graph, with the tensors that its replay reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    results: Sequence[torch.Tensor]


class CudaGraphsForm(Form):
    """A form without files, since graphs hold memory addresses: each worker captures its own."""

    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        return check_fixed_shapes(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Capture the largest batch, so that a model that cannot be captured fails now."""
        signature, buckets = subject.flat_signature(), choose_buckets(subject)
        with torch.cuda.device(subject.device):
            _capture(
                FlatModel(subject.model, signature), example_batch(subject, buckets.sizes[-1]), None
            )
        return buckets._asdict()

    def load(self, source: FormSource) -> Callable[..., Any]:
        buckets = BatchBuckets.from_json(source.settings)
        with torch.cuda.device(source.device):
            return with_fallback(buckets, source, ReplayedModel(source, buckets).run)


class ReplayedModel:
    """A graph for each batch size. The graphs share memory, so only one of them runs at a time."""

    def __init__(self, source: FormSource, buckets: BatchBuckets) -> None:
        self._signature = signature = source.flat_signature()
        self._buckets = buckets
        self._device = source.device
        self._lock = threading.Lock()
        self._last_batch_done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        flat, pool = FlatModel(source.reference(), signature), torch.cuda.graph_pool_handle()
        self._graphs = {
            size: _capture(flat, _zero_inputs(signature, size, source.device), pool)
            # The largest one is captured first, so that smaller ones fit into its memory.
            for size in reversed(buckets.sizes)
        }

    def run(self, size: int, rows: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph of this size for a batch of `rows` rows."""
        captured = self._graphs[size]
        with self._lock, torch.cuda.device(self._device):
            # The previous batch may have run on the stream of another thread.
            torch.cuda.current_stream().wait_event(self._last_batch_done)
            for static_input, tensor in zip(
                captured.inputs, pad_batch(self._signature, tensors, size), strict=True
            ):
                static_input.copy_(tensor)
            captured.graph.replay()
            results = [tensor.clone() for tensor in self._buckets.cut(captured.results, rows)]
            self._last_batch_done.record()
        return results


def _capture(flat: FlatModel, inputs: list[torch.Tensor], pool: Any) -> CapturedGraph:
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream), torch.no_grad():
        for _ in range(WARM_UP_CALLS):
            flat(*inputs)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool), torch.no_grad():
        results = flat(*inputs)
    return CapturedGraph(graph, inputs, results)


def _zero_inputs(signature: Signature, size: int, device: torch.device) -> list[torch.Tensor]:
    """Return zeros in the shapes of a batch; they are valid as numbers and as indices."""
    return [
        torch.zeros(
            [
                size if dimension in input.rows else fixed_size or 0
                for dimension, fixed_size in enumerate(input.shape)
            ],
            dtype=getattr(torch, input.dtype),
            device=device,
        )
        for input in signature.inputs
    ]


FORMS = (CudaGraphsForm("cuda-graphs", "CUDA graphs"),)
