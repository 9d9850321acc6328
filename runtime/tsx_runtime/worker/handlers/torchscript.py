"""The TorchScript handler of TorchServe's C++ backend, in Python.

It takes and returns tensors in torch's file format.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from tsx_runtime.worker.exceptions import map_rows
from tsx_runtime.worker.handlers.base import BaseHandler

_ADVICE = "Send a tensor as torch.save writes it, or a JSON list of numbers."


class TorchScriptHandler(BaseHandler):
    """A handler that takes one tensor for each request and returns one.

    Neither has a batch dimension. C++ clients read the response with torch::pickle_load.
    """

    def preprocess(self, data: Any) -> list[torch.Tensor]:
        """Return the tensor of each request, of any shape and dtype.

        Raises:
            BadRows: Some requests hold no tensor.
        """
        return map_rows(lambda _, row: _tensor(row), data)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Run the model, with tensors of equal dtype and shape as one batch.

        Returns:
            The model's row for each request, on the CPU.
        """
        answers: dict[int, torch.Tensor] = {}
        positions_by_kind: dict[tuple[Any, torch.Size], list[int]] = {}
        for position, row in enumerate(data):
            positions_by_kind.setdefault((row.dtype, row.shape), []).append(position)
        for positions in positions_by_kind.values():
            batch = super().inference(
                torch.stack([data[position] for position in positions]), *args, **kwargs
            )
            answers.update(zip(positions, batch.cpu(), strict=True))
        # A view would be saved with the whole batch.
        return [answers[position].clone() for position in range(len(data))]

    def postprocess(self, data: Any) -> list[Any]:
        """Return the tensors, which the worker saves by torch.save."""
        return list(data)


def _tensor(row: Any) -> torch.Tensor:
    """Return the tensor of a request.

    Raises:
        ValueError: There is none.
    """
    value = row.get("data") if row.get("data") is not None else row.get("body")
    try:
        if isinstance(value, bytes | bytearray | memoryview):
            value = torch.load(io.BytesIO(value), weights_only=True)
        return torch.as_tensor(value)
    except MemoryError:
        raise
    # The boundary of a request: torch's unpickler raises nearly anything.
    except Exception as error:
        raise ValueError(
            f"the request holds no tensor ({type(error).__name__}). {_ADVICE}"
        ) from error
