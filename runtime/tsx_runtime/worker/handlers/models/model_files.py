"""Loads a model file of any kind into a callable for a batch of tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map  # what torch.export itself shapes results with

from tsx_archiver import ArchiveError, describe_model_file
from tsx_archiver.metadata.onnx_file import data_files
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handlers.models.compiling import compiled_ahead
from tsx_runtime.worker.handlers.models.sharing import share_with_file
from tsx_runtime.worker.handlers.models.weights import NO_ARGUMENTS, load_eager, read_weights

logger = logging.getLogger("tsx.worker")


def load_model_file(
    path: Path,
    model_file: Path | None,
    device: torch.device,
    *,
    weights_only: bool = True,
    compile_ahead: bool = False,
    init_args: Mapping[str, Any] = NO_ARGUMENTS,
    class_name: str | None = None,
) -> Any:
    """The kind is detected by the bytes, not by the name.

    On the CPU the weights share the file's pages with other workers.
    """
    check_present(path)
    file = describe_model_file(
        path, called=Path(path.name)
    )  # the directory may be one of the cache, whose name means nothing to users
    if file.kind == "torchscript":
        return load_torchscript(path, device)
    if file.kind == "exported":
        return load_exported(path, device, compile_ahead=compile_ahead)
    if file.kind == "aotinductor":
        return load_aotinductor(path, device, file.device)
    if file.kind == "onnx":
        return load_onnx(path, device)
    if compile_ahead:
        logger.warning(
            "pt2 asks for aot_compile, which takes an exported program (torch.export.save): %s runs"
            " uncompiled",
            path.name,
        )
    if file.kind == "unknown":
        problem = file.problem or f"{path.name} is not a known kind of model."
        raise LoadError(f"{problem} Pack the archive again with a valid file.")
    if model_file is not None:
        model = load_eager(
            model_file, path, weights_only=weights_only, init_args=init_args, class_name=class_name
        )
        return model.to(device).eval()
    if file.whole_object is not None and not weights_only:
        model = read_weights(path, weights_only=False)
        if isinstance(model, nn.Module):
            return model.to(device).eval()
    raise LoadError(
        f"No model weights could be loaded: {path.name} holds weights but not the model that they"
        " belong to. Pack its class with --model-file, or export the whole model with"
        " torch.export.save."
    )


def check_present(path: Path) -> None:
    if not path.is_file():
        raise LoadError(
            f"The model {path.name} is not in the archive. Name it with --serialized-file when"
            " packing."
        )


def load_torchscript(path: Path, device: torch.device) -> Any:
    try:
        model = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]  # torch's
    except RuntimeError as error:
        raise LoadError(
            f"{path.name} cannot be loaded as TorchScript: {_first_line(error)}"
        ) from error
    model.eval()
    if device.type == "cpu":
        share_with_file([*model.parameters(), *model.buffers(), *constants_of(model)], path)
    return model


def constants_of(model: Any) -> list[torch.Tensor]:
    """A frozen TorchScript model has its weights in its graph."""
    nodes = model.graph.findAllNodes("prim::Constant") if hasattr(model, "forward") else []
    return [
        node.t("value")
        for node in nodes
        if node.hasAttribute("value") and node.kindOf("value") == "t"
    ]


def load_exported(path: Path, device: torch.device, *, compile_ahead: bool = False) -> Any:
    try:
        program = torch.export.load(path)
    except (
        Exception
    ) as error:  # torch raises whatever its readers raise; this is the boundary to a foreign file
        raise LoadError(
            f"{path.name} cannot be loaded as an exported program by torch {torch.__version__}:"
            f" {_first_line(error)}. Programs load in the version that wrote them, or later ones:"
            " export it again."
        ) from error
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    model = compiled_ahead(program, path, device) if compile_ahead else None
    if model is None:
        model = program.module()
        if device.type == "cpu":
            share_with_file([*model.parameters(), *model.buffers()], path)
    size = fixed_batch(program)
    return model if size is None else FixedBatch(model, size)


def load_aotinductor(path: Path, device: torch.device, compiled_for: str | None) -> Any:
    if compiled_for is not None and compiled_for != device.type:
        raise LoadError(
            f"{path.name} was compiled for {compiled_for}, but this worker runs on {device}. "
            f"Compile it on {device.type}, or set deviceType in model-config.yaml."
        )
    from torch._inductor import (
        aoti_load_package,
    )  # here: importing the compiler takes seconds, and only this kind needs it

    try:
        return aoti_load_package(
            str(path), device_index=-1 if device.index is None else device.index
        )
    except RuntimeError as error:
        raise LoadError(
            f"{path.name} cannot be loaded as an AOTInductor package: {_first_line(error)}"
        ) from error


def load_onnx(path: Path, device: torch.device) -> OnnxModel:
    try:
        import onnxruntime  # an extra
    except ModuleNotFoundError as error:
        raise LoadError(
            f"{path.name} is an ONNX model, which needs onnxruntime: pip install 'tsx-serve[onnx]'"
        ) from error
    try:
        missing = [name for name, file in data_files(path).items() if not file.is_file()]
    except ArchiveError as error:
        raise LoadError(error.message) from error
    if missing:
        raise LoadError(
            f"{path.name} has weights in {missing[0]}, which the archive does not contain. Pack it"
            " again with that file."
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # a thread that spins takes a core from the others
    wanted: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        wanted.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0}))
    elif device.type == "cuda":
        logger.warning(
            "onnxruntime has no CUDA here, so %s runs on the CPU: pip install onnxruntime-gpu",
            path.name,
        )
    try:
        return OnnxModel(onnxruntime.InferenceSession(str(path), options, providers=wanted))
    except Exception as error:  # onnxruntime's own classes are not public
        raise LoadError(
            f"{path.name} cannot be loaded by onnxruntime: {_first_line(error)}"
        ) from error


def fixed_batch(program: torch.export.ExportedProgram) -> int | None:
    """The batch size that a program was exported for, where it takes one tensor and no other size
    of it.
    """
    names = program.graph_signature.user_inputs
    values = [node.meta.get("val") for node in program.graph.nodes if node.name in names]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    if len(names) == len(shapes) == 1 and len(shapes[0]) > 1 and isinstance(shapes[0][0], int):
        return shapes[0][0]
    return None


class FixedBatch:
    """Cuts any batch to the size that a program takes, as `torch.export` writes them unless a
    dimension is marked dynamic.
    """

    def __init__(self, model: Any, size: int) -> None:
        self.model = model
        self.size = size

    def __call__(self, rows: torch.Tensor) -> Any:
        if len(rows) == self.size:
            return self.model(rows)
        short = -len(rows) % self.size
        full = torch.cat([rows, rows[-1:].expand(short, *rows.shape[1:])]) if short else rows
        results = [self.model(part) for part in torch.split(full, self.size)]
        return tree_map(lambda *parts: torch.cat(parts)[: len(rows)], *results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class OnnxModel:
    """An onnxruntime session that takes and gives tensors; its own methods (`run`, `get_inputs`,
    ...) are there too.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self._inputs = [entry.name for entry in session.get_inputs()]

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        feed = dict(zip(self._inputs, inputs, strict=False)) | named
        if missing := [name for name in self._inputs if name not in feed]:
            raise ValueError(
                f"the ONNX model needs the inputs {', '.join(self._inputs)}; {', '.join(missing)}"
                " was not given"
            )
        results = [
            torch.from_numpy(value)
            for value in self.session.run(
                None, {name: value.cpu().numpy() for name, value in feed.items()}
            )
        ]
        return results[0] if len(results) == 1 else results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
