"""A look at what will be loaded, quick enough to be taken before anything is opened."""

from __future__ import annotations

import zipfile
from pathlib import Path

EXPORTED = ".pt2"


def holds_exported_program(path: Path) -> bool:
    """Whether an archive or directory has a `.pt2` file. What cannot be read says no: opening it tells why."""
    try:
        if path.is_dir():
            return any(path.glob(f"**/*{EXPORTED}"))
        if not path.is_file():  # opening a pipe would wait for its writer
            return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(EXPORTED) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return False
