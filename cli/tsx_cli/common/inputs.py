"""The input files of commands: their kinds, the samples of a model, and lists of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SAMPLES = "samples"
INDEX_TO_NAME = "index_to_name.json"


def samples_in(directory: Path) -> list[Path]:
    """The inputs that a model brings along for trying it."""
    return sorted(
        path
        for path in (directory / SAMPLES).glob("*")
        if path.is_file() and not path.name.startswith(".")
    )


def split_list(values: Iterable[str] | None) -> list[str]:
    """`--extra-files a,b --extra-files c` as TorchServe writes it and as others would."""
    return [part for value in values or () for part in value.split(",") if part]
