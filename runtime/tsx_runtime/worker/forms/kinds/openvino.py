"""The model as an OpenVINO graph on the CPU, in float32, bfloat16 or int8."""

from __future__ import annotations

import importlib.util
import io
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from tsx_runtime.worker.forms.exporting import (
    check_convertible,
    export_flat,
    flat_calls,
    trace_flat,
)
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FREE

FILE = "model.xml"  # OpenVINO puts the weights next to it, into model.bin, which workers map.
INSTALL_COMMAND = "pip install 'tsx-serve[openvino]'"
# Alphas of SmoothQuant; 0.95 is NNCF's default.
SMOOTH_QUANT_OFF, SMOOTH_QUANT_ALPHA = -1.0, 0.95
COMPARED_CALLS = 8  # calls whose results decide between these two
TRANSFORMER_OPS = frozenset({"MVN", "ScaledDotProductAttention"})  # MVN: layer normalization


@dataclass(frozen=True)
class OpenVinoForm(Form):
    precision: str = "f32"  # the type for computations

    packages: ClassVar[Mapping[str, str]] = {"openvino": INSTALL_COMMAND}
    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        return check_convertible(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        _import_openvino().save_model(self.graph(subject), directory / FILE, compress_to_fp16=False)
        return {"precision": self.precision}

    def graph(self, subject: Subject) -> Any:
        ov = _import_openvino()
        if not isinstance(subject.model, torch.jit.ScriptModule):
            return ov.convert_model(export_flat(subject))
        shapes = [
            [-1 if size is FREE else size for size in input.shape]
            for input in subject.flat_signature().inputs
        ]
        return ov.convert_model(
            trace_flat(subject), input=[ov.PartialShape(shape) for shape in shapes]
        )

    def load(self, source: FormSource) -> Callable[..., Any]:
        core = _import_openvino().Core()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,  # The server itself pins its workers to cores.
            "INFERENCE_PRECISION_HINT": source.settings["precision"],
        }
        core.set_property({"ENABLE_MMAP": True})
        request = core.compile_model(
            core.read_model(source.directory / FILE), "CPU", settings
        ).create_infer_request()
        # Micro-batches may come from several threads.
        output_indexes, lock = range(len(request.output_tensors)), threading.Lock()

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            with lock:
                request.infer(_as_arrays(tensors), share_inputs=True, share_outputs=True)
                # The results are copied, since the next batch overwrites the request's tensors.
                return [
                    torch.from_numpy(request.get_output_tensor(index).data.copy())
                    for index in output_indexes
                ]

        return run


class OpenVinoBf16Form(OpenVinoForm):
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def applies(self, subject: Subject) -> str | None:
        missing = "this CPU has no instructions for bfloat16"
        return super().applies(subject) if _has_bf16() else missing


class OpenVinoInt8Form(OpenVinoForm):
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def applies(self, subject: Subject) -> str | None:
        return (
            super().applies(subject)
            if importlib.util.find_spec("nncf")
            else f"nncf is not installed: {INSTALL_COMMAND}"
        )

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Build the form; layers that stay in floats run in bfloat16 if the CPU supports it.

        The error of bfloat16 is small compared with the error of int8.
        """
        return {**super().build(subject, directory), "precision": "bf16" if _has_bf16() else "f32"}

    def graph(self, subject: Subject) -> Any:
        """Quantize the graph by NNCF.

        A transformer is quantized with and without SmoothQuant, and the more accurate result is
        kept. Which one it is depends on the model's outliers.
        """
        original, calls, discarded_output = (
            super().graph(subject),
            flat_calls(subject),
            io.StringIO(),
        )
        # NNCF prints progress bars and its log, which are discarded.
        with redirect_stdout(discarded_output):
            import nncf

            def quantize(smooth: float) -> Any:
                return nncf.quantize(
                    original.clone(),
                    nncf.Dataset(calls, _as_arrays),
                    subset_size=len(calls),
                    model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
                    advanced_parameters=nncf.AdvancedQuantizationParameters(
                        smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=smooth)
                    ),
                )

            is_transformer = any(
                node.get_type_name() in TRANSFORMER_OPS for node in original.get_ops()
            )
            if not is_transformer:
                return quantize(SMOOTH_QUANT_OFF)
            expected = _run_graph(original, calls)
            return min(
                (quantize(smooth) for smooth in (SMOOTH_QUANT_OFF, SMOOTH_QUANT_ALPHA)),
                key=lambda graph: _difference(_run_graph(graph, calls), expected),
            )


def _run_graph(graph: Any, calls: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Run the graph for the first calls, and return all outputs."""
    request = (
        _import_openvino()
        .Core()
        .compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        .create_infer_request()
    )
    results = [request.infer(_as_arrays(tensors)).to_tuple() for tensors in calls[:COMPARED_CALLS]]
    return [torch.from_numpy(array).double() for arrays in results for array in arrays]


def _difference(results: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(results, expected, strict=True)
    return sum(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


def _as_arrays(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple(tensor.contiguous().numpy() for tensor in tensors)


def _has_bf16() -> bool:
    return "BF16" in _import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _import_openvino() -> Any:
    """Import OpenVINO without its telemetry.

    OpenVINO and NNCF send events to Intel at import, unless the user has opted out. Both continue
    without telemetry if its module cannot be imported.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None makes the import fail
    import openvino  # an extra

    return openvino


FORMS = (
    OpenVinoForm("openvino", "OpenVINO"),
    OpenVinoBf16Form("openvino-bf16", "OpenVINO, bfloat16", "bf16"),
    OpenVinoInt8Form("openvino-int8", "OpenVINO, int8"),
)
