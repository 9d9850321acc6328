"""The model as engines of TensorRT, built by torch-tensorrt.

They lie in a package of AOTInductor, which loads without pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from tsx_runtime.worker.forms.buckets import MAX_BATCH
from tsx_runtime.worker.forms.exporting import (
    example_tensors,
    export_flat,
    flat_calls,
    not_exportable,
)
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.kinds.precision import module_in
from tsx_runtime.worker.forms.signature import Signature
from tsx_runtime.worker.handlers.models.model_files import load_aotinductor

FILE = "model.pt2"


@dataclass(frozen=True)
class TensorRtForm(Form):
    precision: str = ""

    packages: ClassVar[Mapping[str, str]] = {"torch_tensorrt": "pip install 'tsx-serve[tensorrt]'"}
    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"native", "torch", "gpu", "packages"})

    def applies(self, subject: Subject) -> str | None:
        return not_exportable(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        import torch_tensorrt  # an extra

        signature = subject.flat_signature()
        shapes = _ranges(subject, signature)
        # Engines compute in the types of the graph.
        program = export_flat(subject, module_in(self.precision, subject.model))
        inputs = [
            torch_tensorrt.Input(
                min_shape=least, opt_shape=usual, max_shape=most, dtype=getattr(torch, input.dtype)
            )
            for (least, usual, most), input in zip(shapes, signature.inputs, strict=True)
        ]
        compiled = torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, device=subject.device)
        torch_tensorrt.save(
            compiled,
            str(directory / FILE),
            output_format="aot_inductor",
            arg_inputs=list(example_tensors(subject)),
            retrace=True,
            dynamic_shapes=signature.dynamic_shapes(),
        )
        return {"least": [least for least, _, _ in shapes], "most": [most for _, _, most in shapes]}

    def load(self, source: FormSource) -> Callable[..., Any]:
        """Load the engines; calls outside their range of shapes go to the archive's own model."""
        import torch_tensorrt  # noqa: F401  # registers the operator of an engine

        settings = source.settings
        model = load_aotinductor(source.directory / FILE, source.device, None)

        def run(*tensors: torch.Tensor) -> Any:
            if not _within(tensors, settings["least"], settings["most"]):
                return source.run_original(*tensors)
            results = model(*tensors)
            return [results] if isinstance(results, torch.Tensor) else list(results)

        return run


Shape = tuple[int, ...]


def _ranges(subject: Subject, signature: Signature) -> list[tuple[Shape, Shape, Shape]]:
    """Return the smallest, usual and largest shape of each input.

    Batches start at 1; other free sizes are those of the calls.
    """
    rows = [call.rows for call in subject.calls]
    ranges = []
    for tensors, input in zip(
        zip(*flat_calls(subject), strict=True), signature.inputs, strict=True
    ):
        least, usual = (
            tuple(map(pick, zip(*(tensor.shape for tensor in tensors), strict=True)))
            for pick in (min, max)
        )
        first, last = (dict.fromkeys(input.rows, size) for size in (1, max(MAX_BATCH, *rows)))
        ranges.append((_with(least, first), usual, _with(usual, last)))
    return ranges


def _with(shape: Shape, sizes: Mapping[int, int]) -> Shape:
    return tuple(sizes.get(at, size) for at, size in enumerate(shape))


def _within(
    tensors: Sequence[torch.Tensor], least: Sequence[Sequence[int]], most: Sequence[Sequence[int]]
) -> bool:
    return all(
        low <= size <= high
        for tensor, lows, highs in zip(tensors, least, most, strict=True)
        for size, low, high in zip(tensor.shape, lows, highs, strict=True)
    )


FORMS = (
    TensorRtForm("tensorrt", "TensorRT"),
    TensorRtForm("tensorrt-fp16", "TensorRT, fp16", "fp16"),
)
