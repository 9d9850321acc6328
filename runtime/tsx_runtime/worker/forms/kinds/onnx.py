"""The model as an ONNX graph, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from tsx_runtime.worker.forms.exporting import exported, not_exportable
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.handlers.models.model_files import load_onnx

FILE = "model.onnx"


class OnnxRuntimeForm(Form):
    packages: ClassVar[Mapping[str, str]] = {
        "onnxruntime": "pip install 'tsx-serve[onnx]'",
        "onnxscript": "pip install 'tsx-serve[onnx]'",
    }
    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        return not_exportable(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        program = torch.onnx.export(exported(subject), dynamo=True, verbose=False)
        assert program is not None
        program.optimize()
        program.save(directory / FILE)
        return {}

    def load(self, source: FormSource) -> Callable[..., Any]:
        session = load_onnx(source.directory / FILE, source.device)

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results = session(*tensors)
            return results if isinstance(results, list) else [results]

        return run


FORMS = (OnnxRuntimeForm("onnx", "ONNX Runtime"),)
