"""The model as TensorRT engines, built by torch-tensorrt.

The engines are stored in an AOTInductor package, which is loaded without pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from tsx_runtime.worker.forms.buckets import MAX_BATCH
from tsx_runtime.worker.forms.exporting import (
    check_exportable,
    example_tensors,
    export_flat,
    flat_calls,
)
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.kinds.precision import module_in_precision
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
        return check_exportable(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        import torch_tensorrt  # an extra

        signature = subject.flat_signature()
        shape_ranges = _shape_ranges(subject, signature)
        # Engines compute in the graph's types, so the weights are converted first.
        program = export_flat(subject, module_in_precision(self.precision, subject.model))
        inputs = [
            torch_tensorrt.Input(
                min_shape=smallest,
                opt_shape=usual,
                max_shape=largest,
                dtype=getattr(torch, input.dtype),
            )
            for (smallest, usual, largest), input in zip(
                shape_ranges, signature.inputs, strict=True
            )
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
        return {
            "least": [smallest for smallest, _, _ in shape_ranges],
            "most": [largest for _, _, largest in shape_ranges],
        }

    def load(self, source: FormSource) -> Callable[..., Any]:
        """Load the engines; calls with other shapes are answered by the archive's own model."""
        import torch_tensorrt  # noqa: F401  # registers the operator of an engine

        settings = source.settings
        model = load_aotinductor(source.directory / FILE, source.device, None)

        def run(*tensors: torch.Tensor) -> Any:
            if not _are_within_range(tensors, settings["least"], settings["most"]):
                return source.run_original(*tensors)
            results = model(*tensors)
            return [results] if isinstance(results, torch.Tensor) else list(results)

        return run


Shape = tuple[int, ...]


def _shape_ranges(subject: Subject, signature: Signature) -> list[tuple[Shape, Shape, Shape]]:
    """Return the smallest, usual and largest shape of each input.

    Batch sizes start at 1. Other free sizes range from the smallest to the largest of the calls.
    """
    rows = [call.rows for call in subject.calls]
    ranges = []
    for tensors, input in zip(
        zip(*flat_calls(subject), strict=True), signature.inputs, strict=True
    ):
        smallest, largest = (
            tuple(map(pick, zip(*(tensor.shape for tensor in tensors), strict=True)))
            for pick in (min, max)
        )
        first_sizes, last_sizes = (
            dict.fromkeys(input.rows, size) for size in (1, max(MAX_BATCH, *rows))
        )
        ranges.append(
            (_replace_sizes(smallest, first_sizes), largest, _replace_sizes(largest, last_sizes))
        )
    return ranges


def _replace_sizes(shape: Shape, sizes: Mapping[int, int]) -> Shape:
    return tuple(sizes.get(dimension, size) for dimension, size in enumerate(shape))


def _are_within_range(
    tensors: Sequence[torch.Tensor],
    lower_limits: Sequence[Sequence[int]],
    upper_limits: Sequence[Sequence[int]],
) -> bool:
    return all(
        low <= size <= high
        for tensor, lows, highs in zip(tensors, lower_limits, upper_limits, strict=True)
        for size, low, high in zip(tensor.shape, lows, highs, strict=True)
    )


FORMS = (
    TensorRtForm("tensorrt", "TensorRT"),
    TensorRtForm("tensorrt-fp16", "TensorRT, fp16", "fp16"),
)
