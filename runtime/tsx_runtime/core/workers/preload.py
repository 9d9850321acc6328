"""The modules that the fork server imports before it forks workers."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

PRELOAD = "tsx_runtime.worker.launch.preload"
# Importing this module takes a second longer, so it is used only if it is needed.
PRELOAD_EXPORTED = "tsx_runtime.worker.launch.preload_export"
EXPORTED_SUFFIX = ".pt2"


def preload_for(paths: Iterable[Path]) -> str:
    """Return the module with what the models in archives and directories need."""
    return PRELOAD_EXPORTED if any(map(holds_exported_program, paths)) else PRELOAD


def holds_exported_program(path: Path) -> bool:
    """Tell whether an archive or directory has a `.pt2` file.

    The result is False for an unreadable archive: opening it will report the reason.
    """
    try:
        if path.is_dir():
            return any(path.glob(f"**/*{EXPORTED_SUFFIX}"))
        if not path.is_file():  # Opening a named pipe would wait for its writer.
            return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(EXPORTED_SUFFIX) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return False
