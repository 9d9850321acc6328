"""The model as engines of TensorRT, by torch-tensorrt, in a package of AOTInductor, which is loaded without Python's pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from tsx_runtime.worker.forms.buckets import LARGEST, example
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FlatModel, Signature
from tsx_runtime.worker.handlers.models.model_files import load_aotinductor
from tsx_runtime.worker.handlers.models.precision import in_precision

FILE = "model.pt2"


@dataclass(frozen=True)
class TensorRtForm(Form):
    precision: str = "fp32"

    packages: ClassVar[Mapping[str, str]] = {"torch_tensorrt": "pip install 'tsx-serve[tensorrt]'"}
    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"native", "torch", "gpu", "packages"})

    def applies(self, subject: Subject) -> str | None:
        if not isinstance(subject.model, torch.nn.Module) or isinstance(subject.model, torch.jit.ScriptModule):
            return f"the model is a {type(subject.model).__name__}, which torch.export does not take: it takes an nn.Module"
        return subject.no_signature or None

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        import torch_tensorrt  # an extra

        signature = subject.signature
        assert signature is not None
        tensors = tuple(example(subject, max(call.rows for call in subject.calls)))
        shapes = _ranges(subject, signature)
        # The engines compute in the types of the graph that they are made of.
        model = subject.model if self.precision == "fp32" else in_precision(subject.model, self.precision, subject.device)
        program = torch.export.export(FlatModel(model, signature), tensors, dynamic_shapes=(signature.dynamic_shapes(),), strict=False)
        inputs = [
            torch_tensorrt.Input(min_shape=least, opt_shape=usual, max_shape=most, dtype=getattr(torch, own.dtype))
            for (least, usual, most), own in zip(shapes, signature.inputs, strict=True)
        ]
        compiled = torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, device=subject.device)
        torch_tensorrt.save(
            compiled,
            str(directory / FILE),
            output_format="aot_inductor",
            arg_inputs=list(tensors),
            retrace=True,
            dynamic_shapes=signature.dynamic_shapes(),
        )
        return {"least": [least for least, _, _ in shapes], "most": [most for _, _, most in shapes]}

    def load(self, source: FormSource) -> Callable[..., Any]:
        """Calls outside of the shapes that the engines were made for go to the archive's own model."""
        import torch_tensorrt  # noqa: F401  # registers the operator that runs an engine

        signature, settings = source.signature, source.settings
        assert signature is not None
        model = load_aotinductor(source.directory / FILE, source.device, None)

        def run(*tensors: torch.Tensor) -> Any:
            if not _within(tensors, settings["least"], settings["most"]):
                return FlatModel(source.reference(), signature)(*tensors)
            results = model(*(tensor.contiguous() for tensor in tensors))
            return [results] if isinstance(results, torch.Tensor) else list(results)

        return run


Shape = tuple[int, ...]


def _ranges(subject: Subject, signature: Signature) -> list[tuple[Shape, Shape, Shape]]:
    """The smallest, usual and largest shape of each input: batches from 1 on, other free sizes as they were called with."""
    rows = [call.rows for call in subject.calls]
    calls = [tensors for call in subject.calls if (tensors := signature.tensors(call.args, call.kwargs)) is not None]
    found = []
    for inputs, own in zip(zip(*calls, strict=True), signature.inputs, strict=True):
        least, usual = (tuple(map(pick, zip(*(tensor.shape for tensor in inputs), strict=True))) for pick in (min, max))
        first, last = (dict.fromkeys(own.rows, size) for size in (1, max(LARGEST, *rows)))
        found.append((_with(least, first), usual, _with(usual, last)))
    return found


def _with(shape: Shape, sizes: Mapping[int, int]) -> Shape:
    return tuple(sizes.get(at, size) for at, size in enumerate(shape))


def _within(tensors: Sequence[torch.Tensor], least: Sequence[Sequence[int]], most: Sequence[Sequence[int]]) -> bool:
    return all(
        low <= size <= high
        for tensor, lows, highs in zip(tensors, least, most, strict=True)
        for size, low, high in zip(tensor.shape, lows, highs, strict=True)
    )


FORMS = (TensorRtForm("tensorrt", "TensorRT"), TensorRtForm("tensorrt-fp16", "TensorRT, fp16", "fp16"))
