"""The model as TorchScript, frozen and optimized for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tsx_runtime.worker.forms.exporting import flat_calls, trace_flat
from tsx_runtime.worker.forms.form import Form, FormSource, NotBuilt, Subject
from tsx_runtime.worker.forms.kinds.precision import check_precision, module_in_precision
from tsx_runtime.worker.forms.signature import FlatModel
from tsx_runtime.worker.handlers.models.model_files import FixedBatch, load_torchscript

FILE = "model.pt"


@dataclass(frozen=True)
class TorchScriptForm(Form):
    precision: str = ""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu", "torch"})

    def applies(self, subject: Subject) -> str | None:
        if not isinstance(subject.model, nn.Module | FixedBatch):
            return (
                f"the model is a {type(subject.model).__name__}, which torch.jit.trace does not"
                " take: it takes an nn.Module"
            )
        return subject.no_signature or check_precision(self.precision, subject.device)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        model = module_in_precision(self.precision, subject.model)
        script: Any = torch.jit.freeze(trace_flat(subject, model))
        for tensors in flat_calls(subject):
            _check_trace(script, FlatModel(model, subject.flat_signature()), tensors)
        torch.jit.save(script, directory / FILE)
        return {}

    def load(self, source: FormSource) -> Callable[..., Any]:
        """Load and optimize the script.

        This is done in the worker, since TorchScript does not save weights in the layouts that it
        chooses for a CPU.
        """
        script: Callable[..., Any] = torch.jit.optimize_for_inference(
            load_torchscript(source.directory / FILE, source.device)
        )
        return script


def _check_trace(script: Any, model: FlatModel, tensors: Sequence[torch.Tensor]) -> None:
    """Check that the trace gives the model's results for other calls.

    Raises:
        NotBuilt: The trace has made a size or a branch constant.
    """
    try:
        torch.testing.assert_close(script(*tensors), model(*tensors), rtol=0.02, atol=0.02)
    except (RuntimeError, AssertionError) as error:
        raise NotBuilt(
            f"its trace for one call does not answer another one, of {len(tensors[0])} rows, as the"
            " model does"
        ) from error


FORMS = (
    TorchScriptForm("torchscript", "TorchScript"),
    TorchScriptForm("torchscript-bf16", "TorchScript in bf16", "bf16"),
)
