"""Weights and activations in int8, with ranges fixed by the calibration inputs: PyTorch 2 export quantization for x86, compiled ahead."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tsx_runtime.worker.forms.exporting import exported
from tsx_runtime.worker.forms.form import NotBuilt, Subject
from tsx_runtime.worker.forms.machine_code import MachineCodeForm, for_inductor


class FlatGraph(nn.Module):
    """A graph over flat tensors, called as the original model; with `dtypes`, its float layers run in bf16 and it gives those dtypes."""

    def __init__(self, graph: nn.Module, dtypes: Sequence[torch.dtype] = ()) -> None:
        super().__init__()
        self.graph = graph
        self.dtypes = dtypes

    def forward(self, *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(self.dtypes)):
            results = self.graph(*tensors)
        return [each.to(dtype) for each, dtype in zip(results, self.dtypes, strict=True)] if self.dtypes else results


@dataclass(frozen=True)
class StaticInt8Form(MachineCodeForm):
    bf16: bool = False

    def applies(self, subject: Subject) -> str | None:
        if platform.machine() not in ("x86_64", "AMD64"):
            return f"its kernels are for x86, and this machine is {platform.machine()}"
        return super().applies(subject)

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        from torchao.quantization.pt2e import move_exported_model_to_eval
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        signature = subject.signature
        assert signature is not None
        program = exported(subject, for_inductor(subject.model))
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(reduce_range=not _has_vnni()))
        prepared = prepare_pt2e(program.module(), quantizer)
        for call in subject.calls:
            if (tensors := signature.tensors(call.args, call.kwargs)) is not None:
                prepared(*tensors)
        quantized = move_exported_model_to_eval(convert_pt2e(prepared))
        if not any("dequantize_per_channel" in str(node.target) for node in quantized.graph.nodes):
            raise NotBuilt("it has no convolution or linear layer that the quantizer for x86 takes")
        dtypes = [each.meta["val"].dtype for each in program.graph.output_node().args[0]]
        return exported(subject, FlatGraph(quantized, dtypes if self.bf16 else ()))


def _has_vnni() -> bool:
    """Without these instructions, sums of 8-bit products overflow."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(known.get("avx512_vnni") or known.get("avx_vnni"))


FORMS = (StaticInt8Form("int8-static", "int8, static"), StaticInt8Form("int8-static-bf16", "int8, static, the rest in bf16", True))
