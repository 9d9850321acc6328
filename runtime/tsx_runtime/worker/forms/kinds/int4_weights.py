"""Weights of linear layers in int4, a scale for each group of 32, and bf16 activations: for models
bound by memory bandwidth.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tsx_runtime.worker.forms.exporting import exported, not_eager
from tsx_runtime.worker.forms.form import NotBuilt, Subject
from tsx_runtime.worker.forms.kinds.int8_dynamic import no_linear
from tsx_runtime.worker.forms.machine_code import MachineCodeForm

GROUP = 32  # of weights that share a scale
OUTPUTS = 16  # torch's kernel takes multiples of this


class Int4WeightsForm(MachineCodeForm):
    """These layers take an eighth of the memory of their float32 weights. torchao's own packed
    tensors would have to be unpickled; compiled ahead of time, they are constants of the package.
    """

    def applies(self, subject: Subject) -> str | None:
        return not_eager(subject.model) or super().applies(subject) or no_linear(subject)

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import quantize_

        model = copy.deepcopy(subject.model)
        if not any(_fits(layer) for layer in model.modules()):
            raise NotBuilt(
                f"it has no linear layer with a multiple of {GROUP} inputs and of {OUTPUTS}"
                " outputs, as torch's kernel for int4 needs"
            )
        for layer in filter(_fits, model.modules()):
            _in_bf16(layer)
        quantize_(
            model,
            PrototypeInt4WeightOnlyConfig(GROUP, set_inductor_config=False),
            lambda layer, name: _fits(layer),
        )
        return exported(subject, model)


def _in_bf16(layer: nn.Module) -> None:
    """torch's kernel is made for bf16 activations: with float32 it was 150 times slower."""
    dtype = next(layer.parameters()).dtype
    layer.to(torch.bfloat16)
    layer.register_forward_pre_hook(lambda layer, given: (given[0].to(torch.bfloat16),))
    layer.register_forward_hook(lambda layer, given, result: result.to(dtype))


def _fits(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.in_features % GROUP == 0
        and layer.out_features % OUTPUTS == 0
    )


FORMS = (Int4WeightsForm("int4-weights", "int4 weights"),)
