"""The model, compiled by torch's AOTInductor at build time, so that workers need no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tsx_runtime.worker.forms.exporting import export_flat
from tsx_runtime.worker.forms.form import Subject
from tsx_runtime.worker.forms.kinds.precision import check_precision, module_in_precision
from tsx_runtime.worker.forms.machine_code import MachineCodeForm, prepare_for_inductor


@dataclass(frozen=True)
class AotInductorForm(MachineCodeForm):
    precision: str = ""

    tools: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"native", "torch", "gpu"})

    def applies(self, subject: Subject) -> str | None:
        return check_precision(self.precision, subject.device) or super().applies(subject)

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        return export_flat(
            subject, module_in_precision(self.precision, prepare_for_inductor(subject.model))
        )


FORMS = (
    AotInductorForm("aotinductor", "AOTInductor"),
    AotInductorForm("aotinductor-bf16", "AOTInductor in bf16", "bf16"),
    AotInductorForm("aotinductor-fp16", "AOTInductor in fp16", "fp16"),
)
