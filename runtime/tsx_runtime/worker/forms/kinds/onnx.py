"""The model as an ONNX graph, run by ONNX Runtime, in float32 or in int8."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch

from tsx_archiver.storage.private_directory import temporary_directory
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.forms.bound import VNNI, cpu_instructions, is_x86
from tsx_runtime.worker.forms.exporting import (
    example_tensors,
    export_flat,
    flat_calls,
    not_convertible,
    trace_flat,
)
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FREE
from tsx_runtime.worker.handlers.models.model_files import load_onnx

FILE = "model.onnx"
INSTALL = "pip install 'tsx-serve[onnx]'"
ON_GPU = "CUDAExecutionProvider"


class OnnxRuntimeForm(Form):
    packages: ClassVar[Mapping[str, str]] = {"onnxruntime": INSTALL}
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        if lacking := next(
            (name for name in ("onnx", "onnxscript") if not importlib.util.find_spec(name)), None
        ):
            return f"{lacking} is not installed: {INSTALL}"
        return not_convertible(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        write_graph(subject, directory / FILE)
        return {}

    def load(self, source: FormSource) -> Callable[..., Any]:
        session = load_onnx(source.directory / FILE, source.device)
        if source.device.type == "cuda" and ON_GPU not in session.get_providers():
            raise LoadError("this onnxruntime has no CUDA: pip install onnxruntime-gpu")

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results = session(*tensors)
            results = results if isinstance(results, list) else [results]
            return [result.to(source.device) for result in results]

        return run


class OnnxInt8Form(OnnxRuntimeForm):
    """A graph in int8 with calibrated ranges.

    In dynamic ranges, an outlier would spoil its neighbours.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    # Without VNNI, 8-bit products may saturate.
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process

        with TemporaryDirectory(dir=temporary_directory()) as directory_name:
            source, prepared = f"{directory_name}/source.onnx", f"{directory_name}/prepared.onnx"
            write_graph(subject, Path(source))
            quant_pre_process(source, prepared, skip_symbolic_shape=True)
            graph = onnx.load(prepared)
            # Quantization transposes weights, whose shapes are in it. All shapes are inferred
            # again.
            del graph.graph.value_info[:]
            onnx.save(graph, prepared)
            _quantize(subject, prepared, str(directory / FILE), graph.graph)
        return {}


def _quantize(subject: Subject, source: str, target: str, graph: Any) -> None:
    """Quantize as onnxruntime advises for CPUs.

    In transformers only layers with weights are in int8: the rest loses accuracy and saves little
    time.

    Args:
        subject: The model with its calibration calls.
        source: The file of the graph.
        target: The file to write.
        graph: The content of `source`.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    names = [input.name for input in graph.input]
    batches = (
        {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        for tensors in flat_calls(subject)
    )
    is_transformer = any(node.op_type == "LayerNormalization" for node in graph.node)
    quantize_static(
        source,
        target,
        _CalibrationInputs(batches),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "Gemm", "MatMul"] if is_transformer else None,
        per_channel=True,
        reduce_range=is_x86() and not VNNI & cpu_instructions(),  # Products may exceed 16 bits.
        activation_type=QuantType.QUInt8 if is_x86() else QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


class _CalibrationInputs:
    """The inputs as a CalibrationDataReader of onnxruntime."""

    def __init__(self, batches: Iterator[dict[str, Any]]) -> None:
        self._batches = batches

    def get_next(self) -> dict[str, Any] | None:
        return next(self._batches, None)


def write_graph(subject: Subject, path: Path) -> None:
    """Export the model to an ONNX file.

    TorchScript goes through torch's older exporter, the only one that takes it.

    Raises:
        NotBuilt: The model cannot be exported.
        Exception: torch fails to export it.
    """
    if isinstance(subject.model, torch.jit.ScriptModule):
        inputs = {f"input_{at}": input for at, input in enumerate(subject.flat_signature().inputs)}
        free = {
            name: [at for at, size in enumerate(input.shape) if size is FREE]
            for name, input in inputs.items()
        }
        torch.onnx.export(
            trace_flat(subject),
            example_tensors(subject),
            str(path),
            dynamo=False,
            verbose=False,
            input_names=list(inputs),
            dynamic_axes=free,
        )
        return
    program = torch.onnx.export(export_flat(subject), dynamo=True, verbose=False)
    assert program is not None
    program.optimize()
    program.save(path)


FORMS = (
    OnnxRuntimeForm("onnx", "ONNX Runtime"),
    OnnxInt8Form("onnx-int8", "ONNX Runtime, int8"),
)
