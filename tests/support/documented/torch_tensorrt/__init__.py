"""A test double of torch-tensorrt with its documented signatures, which leaves models unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import torch_tensorrt.dynamo as dynamo

__all__ = ["Input", "dynamo", "save"]


class Input:
    """The shape of an input: https://docs.pytorch.org/TensorRT/py_api/torch_tensorrt.html."""

    def __init__(
        self,
        *,
        min_shape: Sequence[int],
        opt_shape: Sequence[int],
        max_shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        format: torch.memory_format = torch.contiguous_format,
        tensor_domain: tuple[float, float] | None = None,
        name: str = "",
    ) -> None:
        assert all(
            low <= optimum <= high
            for low, optimum, high in zip(min_shape, opt_shape, max_shape, strict=True)
        )
        self.shape = {
            "min_shape": tuple(min_shape),
            "opt_shape": tuple(opt_shape),
            "max_shape": tuple(max_shape),
        }
        self.dtype = dtype


def save(
    module: Any,
    file_path: str = "",
    *,
    extra_files: dict[str, str] | None = None,
    output_format: str = "exported_program",
    inputs: Sequence[Any] | None = None,
    arg_inputs: Sequence[Any] | None = None,
    kwarg_inputs: dict[str, Any] | None = None,
    retrace: bool = True,
    use_legacy_exporter: bool | None = None,
    pickle_protocol: int = 2,
    dynamic_shapes: Any = None,
) -> None:
    """Export a module again as documented, but without compilation by AOTInductor."""
    assert (output_format, retrace, inputs) == ("aot_inductor", True, None)
    assert arg_inputs is not None
    program = torch.export.export(
        module, tuple(arg_inputs), dynamic_shapes=dynamic_shapes, strict=False
    )
    torch.export.save(program, file_path)
