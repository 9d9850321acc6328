"""Checks whether an archive contains an exported program, before the archive is opened."""

from __future__ import annotations

import zipfile
from pathlib import Path

EXPORTED = ".pt2"


def holds_exported_program(path: Path) -> bool:
    """Whether an archive or directory has a `.pt2` file. False for what cannot be read: opening it says why."""
    try:
        if path.is_dir():
            return any(path.glob(f"**/*{EXPORTED}"))
        if not path.is_file():  # opening a pipe would wait for its writer
            return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(EXPORTED) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return False
