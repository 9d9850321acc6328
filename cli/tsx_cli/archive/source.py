"""Decides what a command's path is: a model of Hugging Face or MLflow, an archive, or a file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal, TypeAlias

from tsx_cli.archive.huggingface import is_pretrained
from tsx_cli.archive.mlflow import is_mlflow
from tsx_cli.common.failure import UsageError
from tsx_cli.common.inputs import is_archive

SourceKind: TypeAlias = Literal["Hugging Face", "MLflow", "archive", "file"]


def source_kind(path: Path) -> SourceKind:
    """Decide by the content of a directory, and by the name of anything else, URIs included."""
    if is_pretrained(path):
        return "Hugging Face"
    if is_mlflow(path):
        return "MLflow"
    return "archive" if is_archive(path) else "file"


def require_packed(path: Path) -> None:
    """Refuse a model that a command takes only as an archive. Raises UsageError."""
    kind = source_kind(path)
    if kind in ("Hugging Face", "MLflow"):
        command = f"tsx archive {shlex.quote(str(path))}"
        raise UsageError(f"'{path}' is a model of {kind}, and an archive is needed here: {command}")
