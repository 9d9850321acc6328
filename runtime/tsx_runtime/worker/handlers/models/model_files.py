"""The loading of model files of any kind, as callables for a batch of tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map  # torch.export builds its results with this module.

from tsx_archiver import ArchiveError, describe_model_file
from tsx_archiver.metadata.onnx_file import data_files
from tsx_archiver.metadata.tabular import PACKAGES
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handlers.models.compiling import compile_ahead_of_time
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
    """Load a model file, whose kind is detected by its bytes.

    On the CPU, the weights are pages of the file, which workers share.

    Args:
        path: The serialized file.
        model_file: The file with the model's class, for files with only weights.
        device: The device of the model.
        weights_only: Whether pickled code is refused.
        compile_ahead: Whether AOTInductor compiles an exported program.
        init_args: The arguments of the model's class.
        class_name: The name of the model's class, or None if it is the only one.

    Raises:
        LoadError: The model cannot be loaded; the message says what to do.
    """
    check_present(path)
    # Only the file's name is shown, since its directory may be one of the cache.
    file = describe_model_file(path, called=Path(path.name))
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
    if file.kind in PACKAGES:
        raise LoadError(
            f"{path.name} is no model of torch. Pack it without --handler, for the handler tabular."
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
    """Raise LoadError if the archive does not have a model file."""
    if not path.is_file():
        raise LoadError(
            f"The model {path.name} is not in the archive. Name it with --serialized-file when"
            " packing."
        )


def load_torchscript(path: Path, device: torch.device) -> Any:
    """Load a TorchScript model.

    Raises:
        LoadError: torch cannot read the file.
    """
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
    """Return the constant tensors in a TorchScript graph, which are the weights if it is frozen."""
    nodes = model.graph.findAllNodes("prim::Constant") if hasattr(model, "forward") else []
    return [
        node.t("value")
        for node in nodes
        if node.hasAttribute("value") and node.kindOf("value") == "t"
    ]


def load_exported(path: Path, device: torch.device, *, compile_ahead: bool = False) -> Any:
    """Load an exported program.

    Raises:
        LoadError: torch cannot read the file.
    """
    try:
        program = torch.export.load(path)
    except Exception as error:  # the boundary to a foreign file: torch's readers raise anything
        raise LoadError(
            f"{path.name} cannot be loaded as an exported program by torch {torch.__version__}:"
            f" {_first_line(error)}. Programs load in the version that wrote them, or later ones:"
            " export it again."
        ) from error
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    model = compile_ahead_of_time(program, path, device) if compile_ahead else None
    if model is None:
        model = program.module()
        if device.type == "cpu":
            share_with_file([*model.parameters(), *model.buffers()], path)
    size = fixed_batch(program)
    return model if size is None else FixedBatch(model, size)


def load_aotinductor(path: Path, device: torch.device, compiled_for: str | None) -> Any:
    """Load a package of AOTInductor.

    Raises:
        LoadError: The package was compiled for another device, or torch cannot load it.
    """
    if compiled_for is not None and compiled_for != device.type:
        raise LoadError(
            f"{path.name} was compiled for {compiled_for}, but this worker runs on {device}. "
            f"Compile it on {device.type}, or set deviceType in model-config.yaml."
        )
    from torch._inductor import aoti_load_package  # The import takes seconds.

    try:
        return aoti_load_package(
            str(path), device_index=-1 if device.index is None else device.index
        )
    except RuntimeError as error:
        raise LoadError(
            f"{path.name} cannot be loaded as an AOTInductor package: {_first_line(error)}"
        ) from error


def load_onnx(path: Path, device: torch.device) -> OnnxModel:
    """Load an ONNX model by onnxruntime.

    Raises:
        LoadError: onnxruntime, or a file with weights, is missing, or the model is invalid.
    """
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
    # Threads that spin would take cores from other workers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0}))
    elif device.type == "cuda":
        logger.warning(
            "onnxruntime has no CUDA here, so %s runs on the CPU: pip install onnxruntime-gpu",
            path.name,
        )
    try:
        return OnnxModel(onnxruntime.InferenceSession(str(path), options, providers=providers))
    except Exception as error:  # The classes of onnxruntime's errors are not public.
        raise LoadError(
            f"{path.name} cannot be loaded by onnxruntime: {_first_line(error)}"
        ) from error


def fixed_batch(program: torch.export.ExportedProgram) -> int | None:
    """Return the batch size if a program takes one tensor of a fixed size, or else None."""
    names = program.graph_signature.user_inputs
    values = [node.meta.get("val") for node in program.graph.nodes if node.name in names]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    if len(names) == len(shapes) == 1 and len(shapes[0]) > 1 and isinstance(shapes[0][0], int):
        return shapes[0][0]
    return None


class FixedBatch:
    """A model whose program takes one batch size, into which other batches are split.

    `torch.export` makes the batch size constant unless its dimension is marked dynamic.
    """

    def __init__(self, model: Any, size: int) -> None:
        self.model = model
        self.size = size

    def __call__(self, rows: torch.Tensor) -> Any:
        if len(rows) == self.size:
            return self.model(rows)
        padding_rows = -len(rows) % self.size
        padded_rows = (
            torch.cat([rows, rows[-1:].expand(padding_rows, *rows.shape[1:])])
            if padding_rows
            else rows
        )
        results = [self.model(part) for part in torch.split(padded_rows, self.size)]
        return tree_map(lambda *parts: torch.cat(parts)[: len(rows)], *results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class OnnxModel:
    """An onnxruntime session that takes and returns tensors.

    It also has the methods of the session, such as `run` and `get_inputs`.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self._inputs = [entry.name for entry in session.get_inputs()]

    def __call__(self, *inputs: torch.Tensor, **named_inputs: torch.Tensor) -> Any:
        feed = dict(zip(self._inputs, inputs, strict=False)) | named_inputs
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
