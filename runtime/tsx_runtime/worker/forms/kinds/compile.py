"""The model, compiled by torch.compile, with its weights as constants.

A worker compiles it for all batch sizes while loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from tsx_runtime.worker.forms.exporting import check_exportable, example_tensors
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.kinds.precision import (
    check_precision,
    copy_if_inference_tensor,
    module_in_precision,
)
from tsx_runtime.worker.forms.machine_code import check_compiler, prepare_for_inductor
from tsx_runtime.worker.forms.signature import FREE, Signature

# The batch sizes for which torch compiles. It compiles size 1 separately, and chooses kernels by
# the size, such as other convolutions from 16 on. Other sizes use the compiled code of these.
COMPILED_SIZES = (8, 32, 1, 2, 3, 17, 64)


@dataclass(frozen=True)
class CompileForm(Form):
    precision: str = ""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})
    compiles: ClassVar[bool] = True

    def applies(self, subject: Subject) -> str | None:
        return (
            check_exportable(subject)
            or check_precision(self.precision, subject.device)
            or check_compiler()
        )

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Compile the model once, so that a model that cannot be compiled fails now."""
        shapes = [list(tensor.shape) for tensor in example_tensors(subject)]
        self._compile(subject.model, subject.flat_signature(), shapes, subject.device)
        return {"shapes": shapes}

    def load(self, source: FormSource) -> Callable[..., Any]:
        return self._compile(
            source.load_copy(), source.flat_signature(), source.settings["shapes"], source.device
        )

    def _compile(
        self,
        model: Any,
        signature: Signature,
        shapes: Sequence[Sequence[int]],
        device: torch.device,
    ) -> Callable[..., Any]:
        """Compile the model.

        Args:
            model: The model to compile, which may be changed.
            signature: The signature of its calls.
            shapes: The shapes of the tensors of one call.
            device: The device of the model.
        """
        import torch._inductor.config  # The import takes seconds.

        compiled = torch.compile(module_in_precision(self.precision, prepare_for_inductor(model)))

        def call(tensors: Sequence[torch.Tensor]) -> list[Any]:
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = signature.arguments(
                    [copy_if_inference_tensor(tensor) for tensor in tensors]
                )
                return tree_leaves(compiled(*args, **kwargs))

        with torch._inductor.config.patch(freezing=True):
            for rows in COMPILED_SIZES:
                call(_example_batch(signature, shapes, rows, device))

        def run(*tensors: torch.Tensor) -> list[Any]:
            # A call that would need a compilation runs eagerly, so that no client waits for a
            # compiler.
            with torch.compiler.set_stance("eager_on_recompile"):
                return call(tensors)

        return run


def _example_batch(
    signature: Signature, shapes: Sequence[Sequence[int]], rows: int, device: torch.device
) -> list[torch.Tensor]:
    """Return a batch of ones with this number of rows, whose free sizes are marked as dynamic.

    A size of 1 cannot be marked: the compiler treats it as a constant.
    """
    tensors = []
    for input, shape in zip(signature.inputs, shapes, strict=True):
        sizes = [rows if dimension in input.rows else size for dimension, size in enumerate(shape)]
        tensor = torch.ones(sizes, dtype=getattr(torch, input.dtype), device=device)
        for dimension, size in enumerate(input.shape):
            if size is FREE and sizes[dimension] > 1:
                torch._dynamo.mark_dynamic(tensor, dimension)
        tensors.append(tensor)
    return tensors


FORMS = (
    CompileForm("compile", "torch.compile"),
    CompileForm("compile-bf16", "torch.compile in bf16", "bf16"),
)
