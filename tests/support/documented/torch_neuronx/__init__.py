"""A test double of torch-neuronx, with its documented signature, that compiles for the CPU.

It returns TorchScript with the shapes of the example inputs fixed.

https://awsdocs-neuron.readthedocs-hosted.com/en/v2.31.0/frameworks/torch/torch-neuronx/api-reference-guide/inference/api-torch-neuronx-trace.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CALLS: list[dict[str, Any]] = []
# Arguments of neuronx-cc.
ARGUMENTS = {
    "--auto-cast": {"none", "matmult", "all"},
    "--auto-cast-type": {"bf16", "fp16", "tf32"},
}


def trace(
    func: Callable[..., Any],
    example_inputs: tuple[torch.Tensor, ...],
    *unexpected: Any,  # `*_` in the documentation
    input_output_aliases: dict[Any, Any] = {},  # noqa: B006  # as documented
    compiler_workdir: str | None = None,
    compiler_args: list[str] | None = None,
    partitioner_config: Any = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> torch.jit.ScriptModule:
    assert not unexpected
    arguments = compiler_args or []
    assert all(
        value in ARGUMENTS[name]
        for name, value in zip(arguments[::2], arguments[1::2], strict=True)
    )
    shapes = [tensor.shape for tensor in example_inputs]
    CALLS.append({"shapes": [tuple(shape) for shape in shapes], "compiler_args": arguments})

    class FixedShapes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.func = func

        def forward(self, *tensors: torch.Tensor) -> Any:
            return self.func(
                *(tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True))
            )

    return torch.jit.trace(FixedShapes().eval(), example_inputs, check_trace=False)
