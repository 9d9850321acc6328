"""The model as compiled by torch.compile, with its weights as constants.

A worker compiles it for all batch sizes when it loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from tsx_runtime.worker.forms.exporting import example_tensors, not_exportable
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.kinds.precision import module_in, unsupported, without_inference
from tsx_runtime.worker.forms.machine_code import for_inductor, no_compiler
from tsx_runtime.worker.forms.signature import FREE, Signature

# Batch sizes that cause compilations. Torch compiles size 1 separately, and chooses kernels by
# size, such as other convolutions from 16 on. The sizes between them need no compilation.
SIZES = (8, 32, 1, 2, 3, 17, 64)


@dataclass(frozen=True)
class CompileForm(Form):
    precision: str = ""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})
    compiles: ClassVar[bool] = True

    def applies(self, subject: Subject) -> str | None:
        return (
            not_exportable(subject) or unsupported(self.precision, subject.device) or no_compiler()
        )

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Compile the model once: a model that cannot be compiled fails now, not in a worker."""
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

        compiled = torch.compile(module_in(self.precision, for_inductor(model)))

        def call(tensors: Sequence[torch.Tensor]) -> list[Any]:
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = signature.arguments(
                    [without_inference(tensor) for tensor in tensors]
                )
                return tree_leaves(compiled(*args, **kwargs))

        with torch._inductor.config.patch(freezing=True):
            for rows in SIZES:
                call(_example(signature, shapes, rows, device))

        def run(*tensors: torch.Tensor) -> list[Any]:
            # No client waits for a compiler.
            with torch.compiler.set_stance("eager_on_recompile"):
                return call(tensors)

        return run


def _example(
    signature: Signature, shapes: Sequence[Sequence[int]], rows: int, device: torch.device
) -> list[torch.Tensor]:
    """Return a batch with this number of rows, whose free sizes are marked as dynamic.

    Sizes of 1 are constants for the compiler.
    """
    tensors = []
    for input, shape in zip(signature.inputs, shapes, strict=True):
        sizes = [rows if at in input.rows else size for at, size in enumerate(shape)]
        tensor = torch.ones(sizes, dtype=getattr(torch, input.dtype), device=device)
        for at, size in enumerate(input.shape):
            if size is FREE and sizes[at] > 1:
                torch._dynamo.mark_dynamic(tensor, at)
        tensors.append(tensor)
    return tensors


FORMS = (
    CompileForm("compile", "torch.compile"),
    CompileForm("compile-bf16", "torch.compile in bf16", "bf16"),
)
