"""The model as machine code, compiled ahead by torch's AOTInductor: workers need no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tsx_runtime.worker.forms.exporting import exported
from tsx_runtime.worker.forms.form import Subject
from tsx_runtime.worker.forms.kinds.precision import InPrecision, unfit
from tsx_runtime.worker.forms.machine_code import MachineCodeForm, for_inductor


@dataclass(frozen=True)
class AotInductorForm(MachineCodeForm):
    precision: str = ""

    tools: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"native", "torch", "gpu"})

    def applies(self, subject: Subject) -> str | None:
        return unfit(self.precision, subject.device) or super().applies(subject)

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        model = for_inductor(subject.model)
        return exported(subject, InPrecision(model, self.precision) if self.precision else model)


FORMS = (
    AotInductorForm("aotinductor", "AOTInductor"),
    AotInductorForm("aotinductor-bf16", "AOTInductor in bf16", "bf16"),
    AotInductorForm("aotinductor-fp16", "AOTInductor in fp16", "fp16"),
)
