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

from tsx_runtime.worker.forms.exporting import exported, flat_calls, not_convertible, traced
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FREE

FILE = "model.xml"  # beside model.bin, which workers map
INSTALL = "pip install 'tsx-serve[openvino]'"
OFF, SMOOTH = -1.0, 0.95  # alphas of SmoothQuant; 0.95 is NNCF's default
COMPARED = 8  # calls, to choose between the two
OF_TRANSFORMERS = frozenset({"MVN", "ScaledDotProductAttention"})  # MVN: layer normalization


@dataclass(frozen=True)
class OpenVinoForm(Form):
    precision: str = "f32"  # of the calculation

    packages: ClassVar[Mapping[str, str]] = {"openvino": INSTALL}
    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        return not_convertible(subject)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        _openvino().save_model(self.graph(subject), directory / FILE, compress_to_fp16=False)
        return {"precision": self.precision}

    def graph(self, subject: Subject) -> Any:
        ov = _openvino()
        if not isinstance(subject.model, torch.jit.ScriptModule):
            return ov.convert_model(exported(subject))
        shapes = [
            [-1 if size is FREE else size for size in each.shape]
            for each in subject.flat_signature().inputs
        ]
        return ov.convert_model(traced(subject), input=[ov.PartialShape(shape) for shape in shapes])

    def load(self, source: FormSource) -> Callable[..., Any]:
        core = _openvino().Core()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,  # the server places its workers
            "INFERENCE_PRECISION_HINT": source.settings["precision"],
        }
        core.set_property({"ENABLE_MMAP": True})
        request = core.compile_model(
            core.read_model(source.directory / FILE), "CPU", settings
        ).create_infer_request()
        outputs, lock = (
            range(len(request.output_tensors)),
            threading.Lock(),
        )  # micro-batches may come from several threads

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            with lock:
                request.infer(_arrays(tensors), share_inputs=True, share_outputs=True)
                return [
                    torch.from_numpy(request.get_output_tensor(at).data.copy()) for at in outputs
                ]  # the next batch writes there

        return run


class OpenVinoBf16Form(OpenVinoForm):
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def applies(self, subject: Subject) -> str | None:
        return (
            super().applies(subject) if _has_bf16() else "this CPU has no instructions for bfloat16"
        )


class OpenVinoInt8Form(OpenVinoForm):
    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def applies(self, subject: Subject) -> str | None:
        return (
            super().applies(subject)
            if importlib.util.find_spec("nncf")
            else f"nncf is not installed: {INSTALL}"
        )

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Layers that are not in int8 run in bfloat16 if the CPU has it: its error is small
        compared with that of int8.
        """
        return {**super().build(subject, directory), "precision": "bf16" if _has_bf16() else "f32"}

    def graph(self, subject: Subject) -> Any:
        """Quantized by NNCF.

        A transformer is quantized with and without SmoothQuant; which loses less depends on its
        outliers.
        """
        original, calls, printed = super().graph(subject), flat_calls(subject), io.StringIO()
        with redirect_stdout(printed):  # progress bars and the log
            import nncf

            def quantized(smooth: float) -> Any:
                return nncf.quantize(
                    original.clone(),
                    nncf.Dataset(calls, _arrays),
                    subset_size=len(calls),
                    model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
                    advanced_parameters=nncf.AdvancedQuantizationParameters(
                        smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=smooth)
                    ),
                )

            is_transformer = any(
                node.get_type_name() in OF_TRANSFORMERS for node in original.get_ops()
            )
            if not is_transformer:
                return quantized(OFF)
            wanted = _results(original, calls)
            return min(
                (quantized(smooth) for smooth in (OFF, SMOOTH)),
                key=lambda graph: _difference(_results(graph, calls), wanted),
            )


def _results(graph: Any, calls: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """All outputs for the first calls."""
    request = (
        _openvino()
        .Core()
        .compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        .create_infer_request()
    )
    found = [request.infer(_arrays(tensors)).to_tuple() for tensors in calls[:COMPARED]]
    return [torch.from_numpy(array).double() for arrays in found for array in arrays]


def _difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return sum(float((one - other).norm() / other.norm().clamp(min=1e-12)) for one, other in pairs)


def _arrays(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple(tensor.contiguous().numpy() for tensor in tensors)


def _has_bf16() -> bool:
    return "BF16" in _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _openvino() -> Any:
    """Imported without telemetry: OpenVINO and NNCF send events to Intel when they are imported,
    unless the user has opted out.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # its import fails then, which both handle
    import openvino  # an extra

    return openvino


FORMS = (
    OpenVinoForm("openvino", "OpenVINO"),
    OpenVinoBf16Form("openvino-bf16", "OpenVINO, bfloat16", "bf16"),
    OpenVinoInt8Form("openvino-int8", "OpenVINO, int8"),
)
