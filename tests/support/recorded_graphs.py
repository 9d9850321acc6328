"""A double of CUDA's streams and graphs on the CPU.

A capture records operations, and a replay repeats them on the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RecordedGraph:
    """A double of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for operation, args, kwargs, result in self.steps:
            if (new_result := operation(*args, **kwargs)) is not result:
                result.copy_(new_result)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.graph.steps.append((operation, args, kwargs or {}, result))
        return result


class _Stream:
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class _Event:
    def record(self) -> None: ...


@contextmanager
def _captured(graph: RecordedGraph, pool: Any = None) -> Iterator[None]:
    with _Recording(graph):
        yield


def use_recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in = {
        "CUDAGraph": RecordedGraph, "graph": _captured, "graph_pool_handle": lambda: (0, 1), "Stream": _Stream, "Event": _Event,
        "stream": nullcontext, "device": nullcontext, "current_stream": _Stream,
    }  # fmt: skip
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
