"""Decides what a command's word is: a workflow, an archive, a model of Hugging Face or MLflow, or a
file.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal, TypeAlias

from tsx_archiver import ARCHIVE_SUFFIXES
from tsx_archiver.metadata.huggingface import is_huggingface
from tsx_archiver.metadata.mlmodel import FILE
from tsx_archiver.opening import model_root
from tsx_cli.archive.mlflow import is_uri
from tsx_cli.common.failure import UsageError
from tsx_runtime.sources.hub import is_hub

SourceKind: TypeAlias = Literal[
    "workflow", "archive", "Hugging Face", "MLflow", "directory", "file"
]


def classify(word: Path) -> SourceKind:
    """Decide by the content of a directory, and by the name of anything else, URIs included."""
    is_directory = word.is_dir()
    root = model_root(word) if is_directory else word
    if word.name.endswith(".war") or (root / "WAR-INF").is_dir():
        return "workflow"
    if (root / "MAR-INF").is_dir() or (not is_directory and word.name.endswith(ARCHIVE_SUFFIXES)):
        return "archive"
    if is_hub(str(word)) or is_huggingface(word):
        return "Hugging Face"
    if is_uri(word) or (word / FILE).is_file():
        return "MLflow"
    return "directory" if is_directory else "file"


def require_packed(path: Path) -> None:
    """Refuse what a command takes only as an archive. Raises UsageError."""
    kind = classify(path)
    if kind == "workflow":
        raise UsageError(f"'{path}' is a workflow; name its models one by one")
    if kind in ("Hugging Face", "MLflow"):
        command = f"tsx archive {shlex.quote(str(path))}"
        raise UsageError(f"'{path}' is a model of {kind}, and an archive is needed here: {command}")
