"""The TorchScript handler of TorchServe's C++ backend, in Python: tensors in, tensors out, in
torch's file format.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from tsx_runtime.worker.exceptions import each_or_bad
from tsx_runtime.worker.handlers.base import BaseHandler

_HOW = "Send a tensor as torch.save writes it, or a JSON list of numbers."


class TorchScriptHandler(BaseHandler):
    """One request is one tensor, without a batch dimension; so is its answer.

    C++ clients read it with torch::pickle_load.
    """

    def preprocess(self, data: Any) -> list[torch.Tensor]:
        return each_or_bad(lambda _, row: _tensor(row), data)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Tensors of one shape run as one batch."""
        answers: dict[int, torch.Tensor] = {}
        alike: dict[tuple[Any, torch.Size], list[int]] = {}
        for position, row in enumerate(data):
            alike.setdefault((row.dtype, row.shape), []).append(position)
        for positions in alike.values():
            batch = super().inference(
                torch.stack([data[position] for position in positions]), *args, **kwargs
            )
            answers.update(zip(positions, batch.cpu(), strict=True))
        return [
            answers[position].clone() for position in range(len(data))
        ]  # a view would be saved with the whole batch

    def postprocess(self, data: Any) -> list[Any]:
        return list(data)


def _tensor(row: Any) -> torch.Tensor:
    """Read a request. Raises ValueError."""
    value = row.get("data") if row.get("data") is not None else row.get("body")
    try:
        if isinstance(value, bytes | bytearray | memoryview):
            value = torch.load(io.BytesIO(value), weights_only=True)
        return torch.as_tensor(value)
    except MemoryError:
        raise
    # a request's boundary: torch's unpickler raises nearly anything on what it cannot read
    except Exception as error:
        raise ValueError(f"the request holds no tensor ({type(error).__name__}). {_HOW}") from error
