"""A double of the compiler: https://docs.pytorch.org/TensorRT/py_api/dynamo.html."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

CALLS: list[dict[str, Any]] = []


def compile(
    exported_program: torch.export.ExportedProgram,
    inputs: Sequence[Any] | None = None,
    *,
    arg_inputs: Sequence[Any] | None = None,
    kwarg_inputs: dict[Any, Any] | None = None,
    device: torch.device | str | None = None,
    disable_tf32: bool = False,
    workspace_size: int = 0,
    truncate_double: bool = False,
    require_full_compilation: bool = False,
    min_block_size: int = 5,
    pass_through_build_failures: bool = False,
    optimization_level: int | None = None,
    hardware_compatible: bool = False,
) -> torch.nn.Module:
    assert isinstance(exported_program, torch.export.ExportedProgram)
    assert arg_inputs is not None
    assert inputs is None
    weights = {
        str(tensor.dtype).removeprefix("torch.") for tensor in exported_program.state_dict.values()
    }
    CALLS.append(
        {
            "shapes": [argument.shape for argument in arg_inputs],
            "device": device,
            "weights": weights,
        }
    )
    return exported_program.module()
