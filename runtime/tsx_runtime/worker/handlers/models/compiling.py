"""The setting `pt2` of model-config.yaml: compilation by torch.compile or AOTInductor."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tsx_archiver.metadata.compile_settings import compile_options
from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.worker.exceptions import LoadError

logger = logging.getLogger("tsx.worker")


def compile_ahead_of_time(
    program: torch.export.ExportedProgram, path: Path, device: torch.device
) -> Any:
    """Compile a program for the device; if this fails, log a warning and return None.

    The program is compiled once, and the code is then kept in torch's cache.
    """
    # The import takes seconds.
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    try:
        package = _cache_path(path, device)
        if not package.exists():
            # Another worker may be compiling the program at the same time.
            temporary_package = package.with_suffix(f".{os.getpid()}.pt2")
            aoti_compile_and_package(program, package_path=str(temporary_package))
            temporary_package.replace(package)
        return aoti_load_package(str(package))
    # the boundary to a compiler, which may raise anything
    except Exception as error:
        logger.warning(
            "%s is not compiled, it runs as it was exported: %s",
            path.name,
            str(error).partition("\n")[0],
        )
        return None


def _cache_path(path: Path, device: torch.device) -> Path:
    from torch._inductor.codecache import cache_dir

    digest = hashlib.sha256(f"{torch.__version__} {device.type}".encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    directory = Path(cache_dir()) / "tsx"
    try:
        # No other user may write to it, since its files are run as code.
        private_directory(directory, strict=True)
    except PermissionError as error:
        raise PermissionError(f"{error.strerror}; set TORCHINDUCTOR_CACHE_DIR") from error
    return directory / f"{digest.hexdigest()}.pt2"


def load_library(path: str, device: torch.device) -> Any:
    """Load a library written by `torch._export.aot_compile`. Loading runs the library's code.

    Raises:
        LoadError: torch cannot load the library.
    """
    from torch._export import aot_load  # The import takes seconds.

    try:
        return aot_load(path, device.type)
    except (RuntimeError, OSError) as error:
        text = str(error).strip().partition("\n")[0]
        raise LoadError(
            f"{Path(path).name} cannot be loaded by torch {torch.__version__}: {text}. Libraries"
            " load in the version that compiled them: export the model with torch.export.save, and"
            " leave `pt2: {export: {aot_compile: true}}`, so that it is compiled here."
        ) from error


def is_backend(name: str) -> bool:
    """Tell whether torch.compile has a backend; log a warning if not."""
    backends = torch.compiler.list_backends(exclude_tags=())
    if name in backends:
        return True
    logger.warning(
        "%r is not a backend of torch.compile here; there is: %s", name, ", ".join(backends)
    )
    return False


def compile_model(model: Any, pt2: Any) -> Any:
    """Compile a model as configured; if this fails, log a warning and return the model itself.

    torch compiles at the first call. Graphs that cannot be compiled run in eager mode.
    """
    options = compile_options(pt2)
    if options is None:
        return model
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        logger.warning(
            "pt2 in model-config.yaml asks for torch.compile, which does not support a %s",
            type(model).__name__,
        )
        return model
    backend = options.get("backend")
    if isinstance(backend, str) and not is_backend(backend):
        return model
    try:
        result = torch.compile(model, **options)
    # The options are invalid, or this platform has no compiler.
    except (TypeError, RuntimeError, ValueError) as error:
        logger.warning("the model is not compiled, it runs eager: %s", error)
        return model
    logger.info(
        "Compiled model with %s",
        ", ".join(f"{name} {value}" for name, value in options.items()) or "the default backend",
    )
    import torch._dynamo.config as dynamo  # The import takes a second.

    # If a graph cannot be compiled, torch logs a warning and runs it in eager mode.
    dynamo.suppress_errors = True
    return result
