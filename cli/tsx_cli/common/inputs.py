"""The input files of commands: the samples of a model, and lists of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SAMPLES = "samples"
INDEX_TO_NAME = "index_to_name.json"


def samples_in(directory: Path) -> list[Path]:
    """Return the sample inputs in a model's directory."""
    return sorted(
        path
        for path in (directory / SAMPLES).glob("*")
        if path.is_file() and not path.name.startswith(".")
    )


def split_list(values: Iterable[str] | None) -> list[str]:
    """Split values at commas: `--extra-files a,b --extra-files c` gives a, b and c."""
    return [part for value in values or () for part in value.split(",") if part]
