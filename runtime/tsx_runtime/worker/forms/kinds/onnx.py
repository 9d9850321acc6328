"""The model as an ONNX graph, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FlatModel
from tsx_runtime.worker.handlers.models.model_files import load_onnx

FILE = "model.onnx"


class OnnxRuntimeForm(Form):
    packages: ClassVar[Mapping[str, str]] = {
        "onnxruntime": "pip install 'tsx-serve[onnx]'",
        "onnxscript": "pip install 'tsx-serve[onnx]'",
    }
    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        return subject.no_signature or None

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        signature = subject.signature
        assert signature is not None
        call = max(subject.calls, key=lambda each: each.rows)
        tensors = signature.tensors(call.args, call.kwargs)
        assert tensors is not None
        program = torch.onnx.export(
            FlatModel(subject.model, signature).eval(),
            tuple(tensors),
            dynamo=True,
            dynamic_shapes=(signature.dynamic_shapes(),),
            verbose=False,
        )
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
