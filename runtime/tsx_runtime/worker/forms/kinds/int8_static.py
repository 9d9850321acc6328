"""Weights and activations in int8 with calibrated ranges: PyTorch 2 export quantization for x86,
compiled ahead of time.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tsx_runtime.worker.forms.bound import VNNI, cpu_instructions, is_x86
from tsx_runtime.worker.forms.exporting import exported, flat_calls
from tsx_runtime.worker.forms.form import NotBuilt, Subject
from tsx_runtime.worker.forms.machine_code import MachineCodeForm, for_inductor


class FlatGraph(nn.Module):
    """A graph over flat tensors, called as the original model.

    With `dtypes`, its float layers run in bf16, and its results have those.
    """

    def __init__(self, graph: nn.Module, dtypes: Sequence[torch.dtype] = ()) -> None:
        super().__init__()
        self.graph = graph
        self.dtypes = dtypes

    def forward(self, *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(self.dtypes)):
            results = self.graph(*tensors)
        return (
            [each.to(dtype) for each, dtype in zip(results, self.dtypes, strict=True)]
            if self.dtypes
            else results
        )


@dataclass(frozen=True)
class StaticInt8Form(MachineCodeForm):
    bf16: bool = False

    def applies(self, subject: Subject) -> str | None:
        if not is_x86():
            return f"its kernels are for x86, and this machine is {platform.machine()}"
        return super().applies(subject)

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        from torchao.quantization.pt2e import move_exported_model_to_eval
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        program = exported(subject, for_inductor(subject.model))
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(
            x86.get_default_x86_inductor_quantization_config(
                reduce_range=not VNNI & cpu_instructions()
            )
        )
        prepared = prepare_pt2e(program.module(), quantizer)
        for tensors in flat_calls(subject):
            prepared(*tensors)
        quantized = move_exported_model_to_eval(convert_pt2e(prepared))
        if not any("dequantize_per_channel" in str(node.target) for node in quantized.graph.nodes):
            raise NotBuilt("it has no convolution or linear layer that the quantizer for x86 takes")
        dtypes = [each.meta["val"].dtype for each in program.graph.output_node().args[0]]
        return exported(subject, FlatGraph(quantized, dtypes if self.bf16 else ()))


FORMS = (
    StaticInt8Form("int8-static", "int8, static"),
    StaticInt8Form("int8-static-bf16", "int8, static, the rest in bf16", True),
)
