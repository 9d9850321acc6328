"""The search for the model in an image's directory.

The directory contains an archive, an unpacked archive, or the layout of SageMaker's PyTorch
toolkit. That has no manifest, but the user's functions in `code/inference.py`, next to the files
that they load.
https://sagemaker.readthedocs.io/en/stable/frameworks/pytorch/using_pytorch.html
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_archiver import (
    ARCHIVE_SUFFIXES,
    Manifest,
    ModelConfig,
    OpenArchive,
    load_model_config,
    refuse_foreign_link,
)
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.errors import SettingError
from tsx_runtime.server.startup import StartModel, start_model

BASE_DIRECTORY = "SAGEMAKER_BASE_DIR"
MANIFEST = Path("MAR-INF", "MANIFEST.json")
HANDLER = "sagemaker_toolkit"  # a built-in handler of the worker
PROGRAM = "inference.py"
WEIGHTS = (".pt", ".pth", ".pt2")
CONFIG = "model-config.yaml"
# Batch size if the model can run requests together. An idle worker does not wait for a full batch.
BATCH_SIZE = 32


def model_directory(env: Mapping[str, str]) -> Path:
    """Return the directory of the model in SageMaker's layout."""
    return Path(env.get(BASE_DIRECTORY) or "/opt/ml") / "model"


def find_model(directory: Path, env: Mapping[str, str], name: str | None = None) -> StartModel:
    """Return the only model of a directory.

    Raises:
        SettingError: The directory has no model, or several; the message lists its files.
    """
    if (directory / MANIFEST).is_file():
        return start_model(directory, name)
    paths = (
        sorted(path for path in directory.iterdir() if not path.name.startswith("."))
        if directory.is_dir()
        else []
    )
    archives = [path for path in paths if path.name.endswith(ARCHIVE_SUFFIXES)]
    if len(archives) == 1:
        return start_model(archives[0], name)
    if (
        not archives
        and paths
        and (toolkit := toolkit_model(directory, env, name or "model")) is not None
    ):
        return toolkit
    content = (
        f"{len(archives)} archives: {_list_names(archives)}"
        if archives
        else f"no archive, but {_list_names(paths)}"
        if paths
        else "nothing"
    )
    expected = (
        "one .mar, or the unpacked content of one (tsx archive unpack), or code/inference.py beside"
        " one .pt or .pth"
    )
    raise SettingError(f"{directory} holds {content}; it must hold {expected}")


def _list_names(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[:5])
    return f"{names} and {len(paths) - 5} more" if len(paths) > 5 else names


def toolkit_model(
    directory: Path, env: Mapping[str, str], name: str = "model"
) -> StartModel | None:
    """Return the model of a directory with the toolkit's layout, or None for other layouts.

    Raises:
        SettingError: The file in SAGEMAKER_PROGRAM does not exist.
        ArchiveError: The model-config.yaml is invalid.
    """
    code, program = directory / "code", env.get("SAGEMAKER_PROGRAM", "").strip() or PROGRAM
    submit_directory = Path(env.get("SAGEMAKER_SUBMIT_DIRECTORY", "").strip() or code)
    if submit_directory.is_dir() and submit_directory.resolve().is_relative_to(directory.resolve()):
        # A directory elsewhere is where the code came from; SageMaker has copied it to `code`.
        code = submit_directory
    script = code / program
    if not script.is_file():
        if env.get("SAGEMAKER_PROGRAM", "").strip():
            raise SettingError(
                f"SAGEMAKER_PROGRAM is '{program}', but {script} is not there. Pack it below code/"
                " in model.tar.gz."
            )
        if len([path for path in directory.glob("*") if path.suffix in WEIGHTS]) != 1:
            return None
    refuse_foreign_link(script, directory, directory)
    archive = _open_archive(directory, script, code, env, name)
    return StartModel(directory, _registration(archive, script, name), archive=archive)


def _open_archive(
    directory: Path, script: Path, code: Path, env: Mapping[str, str], name: str
) -> OpenArchive:
    model: dict[str, Any] = {
        "modelName": name,
        "handler": env.get("SAGEMAKER_HANDLER", "").strip() or HANDLER,
    }
    config, problems = ModelConfig(), []
    if (code / "requirements.txt").is_file():
        model["requirementsFile"] = str((code / "requirements.txt").relative_to(directory))
    if (directory / CONFIG).is_file():
        refuse_foreign_link(directory / CONFIG, directory, directory)
        model["configFile"] = CONFIG
        config, config_problems = load_model_config(directory / CONFIG)
        problems = [f"{CONFIG}: {problem}" for problem in config_problems]
    layout = {
        "code": os.path.relpath(code, directory),
        "program": str(script.relative_to(code)) if script.is_file() else "",
    }
    return OpenArchive(
        directory,
        directory.absolute(),
        Manifest({"model": model, "sagemaker": layout}, name),
        config,
        problems,
    )


def _registration(archive: OpenArchive, script: Path, name: str) -> RegisterOrder:
    """Return the options of the registration, with a batch size if requests can form batches.

    `batchSize` and `slo` of the archive take precedence.
    """
    source = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""
    config = archive.config
    is_batchable = (
        (config.independent_rows or has_batch_function(source))
        and config.batch_size is None
        and config.slo is None
    )
    size = BATCH_SIZE if is_batchable else None
    return RegisterOrder(
        url=archive.source.name, model_name=name, loaded_at_startup=True, batch_size=size
    )


def has_batch_function(source: str) -> bool:
    """Tell whether a program defines a function for a whole batch; the program is not run.

    Without such a function, a batch's requests would run one by one, and all wait for the last.
    """
    return re.search(r"^(?!\s*#).*\bbatch_predict_fn\b", source, re.MULTILINE) is not None
