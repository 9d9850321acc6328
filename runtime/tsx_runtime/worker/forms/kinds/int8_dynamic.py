"""Linear layers in int8, with ranges computed for each row of activations: no calibration, and no
row depends on its batch.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tsx_runtime.worker.forms.exporting import exported, not_eager
from tsx_runtime.worker.forms.form import Subject
from tsx_runtime.worker.forms.machine_code import MachineCodeForm, for_inductor

LEAST_LINEAR = 0.5  # share of the arithmetic, below which the form gains nothing


def no_linear(subject: Subject) -> str | None:
    """Why quantized linear layers do not make this model faster."""
    if not any(isinstance(layer, nn.Linear) for layer in subject.model.modules()):
        return "the model has no linear layer"
    from torch.utils.flop_counter import FlopCounterMode  # here: workers import the kinds of forms

    call = subject.calls[0]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        subject.model(*call.args, **call.kwargs)
    by_operator = {
        str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()
    }
    linear = sum(
        count for operator, count in by_operator.items() if operator in ("aten.mm", "aten.addmm")
    )
    share = linear / max(sum(by_operator.values()), 1)
    if share < LEAST_LINEAR:
        return f"only {share:.0%} of its arithmetic is in linear layers, which this form is for"
    return None


class DynamicInt8Form(MachineCodeForm):
    """torch's quantizer for x86 has one range per tensor.

    That is faster by a fifth, but an outlier in one request would take the precision
    of the others in its batch.
    """

    def applies(self, subject: Subject) -> str | None:
        return not_eager(subject.model) or super().applies(subject) or no_linear(subject)

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        model = copy.deepcopy(subject.model)
        quantize_(model, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
        return exported(subject, for_inductor(model))


FORMS = (DynamicInt8Form("int8-dynamic", "int8, dynamic"),)
