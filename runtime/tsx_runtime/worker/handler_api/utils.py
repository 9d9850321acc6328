"""TorchServe's utilities for handlers: `ts.handler_utils`, `ts.metrics` and `ts.utils`."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import yaml

logger = logging.getLogger("tsx.worker")


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """Import a class by its dotted name.

    Args:
        class_name: A name such as `transformers.LlamaForCausalLM`.
        module_prefix: The module of the class, if `class_name` does not contain it.

    Raises:
        ImportError: There is no such module or class.

    Examples:
        >>> import_class("OrderedDict", "collections")
        <class 'collections.OrderedDict'>
    """
    dotted = f"{module_prefix}.{class_name}" if module_prefix else class_name
    module, _, name = dotted.rpartition(".")
    if not module:
        raise ImportError(
            f"{class_name!r} has no module: give it as module.Class, or name the module as"
            " module_prefix"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ImportError(f"module {module!r} has no class {name!r}") from error


def check_valid_pt2_backend(backend: str) -> bool:
    """Tell whether torch.compile has a backend of this name on this machine."""
    from tsx_runtime.worker.handlers.models.compiling import is_backend  # It imports torch.

    return is_backend(backend)


def get_yaml_config(yaml_file_path: str | Path) -> Any:
    """Read a YAML file.

    Raises:
        OSError: The file cannot be read.
        yaml.YAMLError: The file is not YAML.
    """
    return yaml.safe_load(Path(yaml_file_path).read_text("utf-8"))


def emit_metrics(metrics: Iterable[Any] | None) -> None:
    """Log each metric in TorchServe's format.

    This is not needed for `context.metrics`, which are sent with the next response anyway.
    """
    for metric in metrics or ():
        logger.info("[METRICS]%s", metric)


def get_cpu_usage(pid: int | str) -> int:
    """Return the resident bytes of a process, or 0 without it. The name comes from TorchServe."""
    import psutil  # Few handlers call this.

    try:
        return int(psutil.Process(int(pid)).memory_info().rss)
    except psutil.NoSuchProcess:
        logger.error("there is no process %s", pid)
        return 0


def check_process_mem_usage(stdin: TextIO) -> None:
    """Read process ids, separated by commas, and print a line `pid:bytes` for each."""
    for pid in stdin.readline().strip().split(","):
        if pid:
            sys.stdout.write(f"{int(pid)}:{get_cpu_usage(pid)}\n")
