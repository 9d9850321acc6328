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
from tsx_runtime.worker.forms.bound import VNNI_INSTRUCTIONS, cpu_instructions, is_x86
from tsx_runtime.worker.forms.exporting import (
    check_convertible,
    example_tensors,
    export_flat,
    flat_calls,
    trace_flat,
)
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FREE
from tsx_runtime.worker.handlers.models.model_files import load_onnx

FILE = "model.onnx"
INSTALL_COMMAND = "pip install 'tsx-serve[onnx]'"
CUDA_PROVIDER = "CUDAExecutionProvider"


class OnnxRuntimeForm(Form):
    packages: ClassVar[Mapping[str, str]] = {"onnxruntime": INSTALL_COMMAND}
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        if missing_package := next(
            (name for name in ("onnx", "onnxscript") if not importlib.util.find_spec(name)), None
        ):
            return f"{missing_package} is not installed: {INSTALL_COMMAND}"
        return check_convertible(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        write_graph(subject, directory / FILE)
        return {}

    def load(self, source: FormSource) -> Callable[..., Any]:
        session = load_onnx(source.directory / FILE, source.device)
        if source.device.type == "cuda" and CUDA_PROVIDER not in session.get_providers():
            raise LoadError("this onnxruntime has no CUDA: pip install onnxruntime-gpu")

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results = session(*tensors)
            results = results if isinstance(results, list) else [results]
            return [result.to(source.device) for result in results]

        return run


class OnnxInt8Form(OnnxRuntimeForm):
    """A graph in int8 whose ranges are calibrated.

    With ranges computed per batch, an outlier would reduce the precision of the other requests.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    # The graph depends on VNNI: without it, 8-bit products may saturate.
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process

        with TemporaryDirectory(dir=temporary_directory()) as directory_name:
            source, prepared = f"{directory_name}/source.onnx", f"{directory_name}/prepared.onnx"
            write_graph(subject, Path(source))
            quant_pre_process(source, prepared, skip_symbolic_shape=True)
            graph = onnx.load(prepared)
            # Quantization transposes weights, so that these shapes would be wrong. Without them,
            # all shapes are inferred again.
            del graph.graph.value_info[:]
            onnx.save(graph, prepared)
            _quantize(subject, prepared, str(directory / FILE), graph.graph)
        return {}


def _quantize(subject: Subject, source: str, target: str, graph: Any) -> None:
    """Quantize as onnxruntime advises for CPUs.

    In transformers, only layers with weights are quantized: other operations would lose accuracy
    and save little time.

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
        # Without VNNI, sums of products may exceed 16 bits.
        reduce_range=is_x86() and not VNNI_INSTRUCTIONS & cpu_instructions(),
        activation_type=QuantType.QUInt8 if is_x86() else QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


class _CalibrationInputs:
    """The calibration inputs, with the interface of onnxruntime's CalibrationDataReader."""

    def __init__(self, batches: Iterator[dict[str, Any]]) -> None:
        self._batches = batches

    def get_next(self) -> dict[str, Any] | None:
        return next(self._batches, None)


def write_graph(subject: Subject, path: Path) -> None:
    """Export the model to an ONNX file.

    TorchScript is exported by torch's older exporter, since the new one does not accept it.

    Raises:
        NotBuilt: The model cannot be exported.
        Exception: torch fails to export it.
    """
    if isinstance(subject.model, torch.jit.ScriptModule):
        inputs = {
            f"input_{number}": input for number, input in enumerate(subject.flat_signature().inputs)
        }
        free_dimensions = {
            name: [number for number, size in enumerate(input.shape) if size is FREE]
            for name, input in inputs.items()
        }
        torch.onnx.export(
            trace_flat(subject),
            example_tensors(subject),
            str(path),
            dynamo=False,
            verbose=False,
            input_names=list(inputs),
            dynamic_axes=free_dimensions,
        )
        return
    program = torch.onnx.export(export_flat(subject), dynamo=True, verbose=False)
    assert program is not None
    program.optimize()
    program.save(path)


FORMS = (OnnxRuntimeForm("onnx", "ONNX Runtime"), OnnxInt8Form("onnx-int8", "ONNX Runtime, int8"))
