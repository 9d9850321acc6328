"""Forms with layers in int4 or int8, quantized by torchao and compiled ahead of time."""

from __future__ import annotations

import copy
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tsx_runtime.worker.forms.bound import VNNI_INSTRUCTIONS, cpu_instructions, is_x86
from tsx_runtime.worker.forms.exporting import check_eager, export_flat, flat_calls
from tsx_runtime.worker.forms.form import NotBuilt, Subject
from tsx_runtime.worker.forms.machine_code import MachineCodeForm, prepare_for_inductor

INT4_GROUP_SIZE = 32  # the number of int4 weights that share a scale
INT4_OUTPUT_MULTIPLE = 16  # torch's kernel for int4 requires a multiple of this.
# If linear layers do less than this fraction of the arithmetic, quantizing them gains nothing.
MIN_LINEAR_FRACTION = 0.5


class QuantizedLinearForm(MachineCodeForm):
    """A form with quantized linear layers, for models whose arithmetic is mostly in such layers."""

    def applies(self, subject: Subject) -> str | None:
        return (
            check_eager(subject.model) or super().applies(subject) or check_linear_layers(subject)
        )


def check_linear_layers(subject: Subject) -> str | None:
    """Explain why quantized linear layers would not make this model faster; None if they may."""
    if not any(isinstance(layer, nn.Linear) for layer in subject.model.modules()):
        return "the model has no linear layer"
    # Imported here, since workers import this module, too.
    from torch.utils.flop_counter import FlopCounterMode

    call = subject.calls[0]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        subject.model(*call.args, **call.kwargs)
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    linear_operations = counts.get("aten.mm", 0) + counts.get("aten.addmm", 0)
    fraction = linear_operations / max(sum(counts.values()), 1)
    if fraction < MIN_LINEAR_FRACTION:
        return f"only {fraction:.0%} of its arithmetic is in linear layers, which this form is for"
    return None


class Int4WeightsForm(QuantizedLinearForm):
    """A form with int4 weights in linear layers, for models bound by memory bandwidth.

    Each group of 32 weights has a scale; activations are in bf16. These layers take an eighth of
    the memory of their float32 weights. They are compiled ahead of time, into constants of the
    package, since loading torchao's own packed tensors would require unpickling.
    """

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import quantize_

        model = copy.deepcopy(subject.model)
        layers = list(filter(_fits_int4, model.modules()))
        if not layers:
            raise NotBuilt(
                f"it has no linear layer with a multiple of {INT4_GROUP_SIZE} inputs and of"
                f" {INT4_OUTPUT_MULTIPLE} outputs, as torch's kernel for int4 needs"
            )
        for layer in layers:
            _run_in_bf16(layer)
        config = PrototypeInt4WeightOnlyConfig(INT4_GROUP_SIZE, set_inductor_config=False)
        quantize_(model, config, lambda layer, name: _fits_int4(layer))
        return export_flat(subject, model)


def _run_in_bf16(layer: nn.Module) -> None:
    """Make a layer run in bf16, the type for which torch's kernel is made.

    With float32 activations, the kernel was 150 times slower.
    """
    dtype = next(layer.parameters()).dtype
    layer.to(torch.bfloat16)
    layer.register_forward_pre_hook(lambda layer, args: (args[0].to(torch.bfloat16),))
    layer.register_forward_hook(lambda layer, args, result: result.to(dtype))


def _fits_int4(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.in_features % INT4_GROUP_SIZE == 0
        and layer.out_features % INT4_OUTPUT_MULTIPLE == 0
    )


class DynamicInt8Form(QuantizedLinearForm):
    """A form with linear layers in int8 that computes a range for each row of activations.

    It needs no calibration, and the result of a row does not depend on the batch. torch's quantizer
    for x86 would use one range per tensor. That is a fifth faster, but an outlier in one request
    would reduce the precision of the other requests in the batch.
    """

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        model = copy.deepcopy(subject.model)
        quantize_(model, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
        return export_flat(subject, prepare_for_inductor(model))


class FlatGraph(nn.Module):
    """A module that calls a graph of flat tensors with the arguments of the original model.

    With `dtypes`, the graph's float layers run in bf16, and its results are cast to these types.
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
            [result.to(dtype) for result, dtype in zip(results, self.dtypes, strict=True)]
            if self.dtypes
            else results
        )


@dataclass(frozen=True)
class StaticInt8Form(MachineCodeForm):
    """A form with weights and activations in int8, whose ranges are calibrated.

    It uses PyTorch 2 export quantization for x86.
    """

    bf16: bool = False

    def applies(self, subject: Subject) -> str | None:
        if not is_x86():
            return f"its kernels are for x86, and this machine is {platform.machine()}"
        return super().applies(subject)

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        from torchao.quantization.pt2e import move_exported_model_to_eval
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        program = export_flat(subject, prepare_for_inductor(subject.model))
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(
            x86.get_default_x86_inductor_quantization_config(
                reduce_range=not VNNI_INSTRUCTIONS & cpu_instructions()
            )
        )
        prepared = prepare_pt2e(program.module(), quantizer)
        for tensors in flat_calls(subject):
            prepared(*tensors)
        quantized = move_exported_model_to_eval(convert_pt2e(prepared))
        if not any("dequantize_per_channel" in str(node.target) for node in quantized.graph.nodes):
            raise NotBuilt("it has no convolution or linear layer that the quantizer for x86 takes")
        dtypes = [node.meta["val"].dtype for node in program.graph.output_node().args[0]]
        return export_flat(subject, FlatGraph(quantized, dtypes if self.bf16 else ()))


FORMS = (
    Int4WeightsForm("int4-weights", "int4 weights"),
    DynamicInt8Form("int8-dynamic", "int8, dynamic"),
    StaticInt8Form("int8-static", "int8, static"),
    StaticInt8Form("int8-static-bf16", "int8, static, the rest in bf16", True),
)
