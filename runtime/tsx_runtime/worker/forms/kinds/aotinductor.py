"""The model as machine code, compiled ahead by torch's AOTInductor: workers need no compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from tsx_runtime.worker.forms.exporting import exported, module_of, not_exportable
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.kinds.compile import no_compiler
from tsx_runtime.worker.forms.kinds.precision import InPrecision, unfit
from tsx_runtime.worker.handlers.models.model_files import load_aotinductor

FILE = "model.pt2"
OPTIONS = {"freezing": True, "cpp.dynamic_threads": True}  # weights are constants; a worker's share of the cores changes


@dataclass(frozen=True)
class AotInductorForm(Form):
    precision: str = ""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu", "torch", "gpu"})

    def applies(self, subject: Subject) -> str | None:
        return not_exportable(subject) or unfit(self.precision, subject.device) or no_compiler()

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        from torch._inductor import aoti_compile_and_package  # here: importing the compiler takes seconds

        model = module_of(subject.model)
        program = exported(subject, InPrecision(model, self.precision) if self.precision else model)
        aoti_compile_and_package(program, package_path=str(directory / FILE), inductor_configs=OPTIONS)
        return {}

    def load(self, source: FormSource) -> Callable[..., Any]:
        loader = load_aotinductor(source.directory / FILE, source.device, source.device.type).loader

        def run(*tensors: torch.Tensor) -> Any:
            return loader.boxed_run(list(tensors))

        return run


FORMS = (
    AotInductorForm("aotinductor", "AOTInductor"),
    AotInductorForm("aotinductor-bf16", "AOTInductor in bf16", "bf16"),
    AotInductorForm("aotinductor-fp16", "AOTInductor in fp16", "fp16"),
)
