"""Utilities that TorchServe offers to handlers under `ts.handler_utils`, `ts.metrics` and
`ts.utils`.
"""

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
    """The class of a dotted name, below `module_prefix` where one is given: ("LlamaForCausalLM",
    "transformers").
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
    """Whether torch.compile has a backend of this name here."""
    from tsx_runtime.worker.handlers.models.compiling import is_backend  # here: it imports torch

    return is_backend(backend)


def get_yaml_config(yaml_file_path: str | Path) -> Any:
    """Return the content of a YAML file. Raises OSError and yaml.YAMLError."""
    return yaml.safe_load(Path(yaml_file_path).read_text("utf-8"))


def emit_metrics(metrics: Iterable[Any] | None) -> None:
    """Log each metric as TorchServe does.

    Values of `context.metrics` leave with the next answer in any case.
    """
    for metric in metrics or ():
        logger.info("[METRICS]%s", metric)


def get_cpu_usage(pid: int | str) -> int:
    """Resident bytes of a process, in spite of the name; 0 for a process that does not exist."""
    import psutil  # here: few handlers ask for it

    try:
        return int(psutil.Process(int(pid)).memory_info().rss)
    except psutil.NoSuchProcess:
        logger.error("there is no process %s", pid)
        return 0


def check_process_mem_usage(stdin: TextIO) -> None:
    """Read process ids, separated by commas, from `stdin`; write a line `pid:bytes` for each to the
    standard output.
    """
    for pid in stdin.readline().strip().split(","):
        if pid:
            sys.stdout.write(f"{int(pid)}:{get_cpu_usage(pid)}\n")
