"""The kind of a source: a workflow, an archive, a directory, a Python file, or a model file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal, TypeAlias

from tsx_archiver import ARCHIVE_SUFFIXES
from tsx_archiver.metadata.huggingface import is_huggingface
from tsx_archiver.metadata.mlmodel import FILE
from tsx_archiver.names import similar_file
from tsx_archiver.opening import model_root
from tsx_cli.archive.mlflow import is_uri
from tsx_cli.archive.python_files.models import is_python_file
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.sources import is_hub

SourceKind: TypeAlias = Literal[
    "workflow", "archive", "Hugging Face", "MLflow", "Python", "directory", "file"
]


def classify(path: Path) -> SourceKind:
    """Tell the kind of a directory by its content, and of a file or URI by its name."""
    is_directory = path.is_dir()
    root = model_root(path) if is_directory else path
    if path.name.endswith(".war") or (root / "WAR-INF").is_dir():
        return "workflow"
    if (root / "MAR-INF").is_dir() or (not is_directory and path.name.endswith(ARCHIVE_SUFFIXES)):
        return "archive"
    if is_hub(str(path)) or is_huggingface(path):
        return "Hugging Face"
    if is_uri(path) or (path / FILE).is_file():
        return "MLflow"
    if is_directory:
        return "directory"
    return "Python" if is_python_file(path) else "file"


def require_packed(path: Path) -> None:
    """Refuse a source that is not an archive.

    Raises:
        UsageError: The source is a workflow, or a model that must be packed first.
    """
    kind = classify(path)
    if kind == "workflow":
        raise UsageError(f"'{path}' is a workflow; name its models one by one")
    if kind in ("Hugging Face", "MLflow", "Python"):
        noun = "a Python file" if kind == "Python" else f"a model of {kind}"
        command = f"tsx archive {shlex.quote(str(path))}"
        raise UsageError(f"'{path}' is {noun}, and an archive is needed here: {command}")


def require_archive(path: Path) -> None:
    """Refuse a source that is missing, or is not an archive.

    Raises:
        UsageError: The source is a workflow, or a model that must be packed first.
        CliError: There is no such file.
    """
    require_packed(path)
    if not path.exists():
        raise CliError(
            f"there is no file '{path}'{similar_file(path) or ';'} name an archive or a model's"
            " directory"
        )
