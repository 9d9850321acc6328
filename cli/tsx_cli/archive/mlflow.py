"""Specs of archives for MLflow models: of the registry, of a run, or of a directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from tsx_archiver import DEFAULT_VERSION, ArchiveSpec, describe_model_file
from tsx_archiver.metadata.mlmodel import (
    DIRECTORY,
    FILE,
    MANIFEST_KEY,
    PYTORCH,
    MLmodel,
    read_mlmodel,
)
from tsx_archiver.names import model_name_from
from tsx_archiver.storage.private_directory import scratch_directory
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.inputs import SAMPLES

REGISTRY, RUNS = "models:/", "runs:/"
EXAMPLE = "serving_input_example.json"  # MLflow's file with a logged example
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
REQUIREMENTS = "requirements.txt"


def is_uri(path: Path) -> bool:
    return str(path).startswith((REGISTRY, RUNS))


def default_name(path: Path) -> str:
    """Derive a model's name from a registered model, a run's path, or a directory."""
    text = str(path)
    name = (
        re.split("[/@]", text.removeprefix(REGISTRY))[0]
        if text.startswith(REGISTRY)
        else path.absolute().name
    )
    return model_name_from(name)


@contextmanager
def mlflow_spec(
    path: Path,
    name: str | None,
    version: str | None,
    handler: str | None,
    tracking_uri: str | None,
    *,
    requirements: bool,
) -> Iterator[tuple[ArchiveSpec, list[str]]]:
    """Yield the spec of the archive, and notes; its files exist until the context ends.

    Args:
        path: A directory, or a models:/ or runs:/ URI.
        name: The name of the model.
        version: The version of the model.
        handler: The handler.
        tracking_uri: The address of MLflow's server.
        requirements: Whether to pack the model's requirements.

    Raises:
        CliError: The model cannot be downloaded.
        ArchiveError: The model cannot be packed.
    """
    with scratch_directory("tsx-mlflow-") as folder:
        origin: dict[str, Any] = {"name": default_name(path), "source": path.absolute().name}
        directory = path
        if is_uri(path):
            directory, facts = _download(str(path), tracking_uri, folder / "download")
            origin |= facts
        model = read_mlmodel(directory)
        origin |= {
            "flavor": model.flavor,
            **{key: model.data.get(key) for key in ("run_id", "model_id", "mlflow_version")},
        }
        model_handler = handler or model.handler
        model_name, model_version = (
            name or origin["name"],
            version or origin.get("version") or DEFAULT_VERSION,
        )
        notes = [
            f"{path}: MLflow model, flavour {model.flavor}",
            f"name {model_name}, version {model_version}",
            f"handler {model_handler}",
        ]
        notes += _pickle_notes(model, directory)
        packages = _requirements(directory, model_handler) if requirements else []
        if packages:
            (folder / REQUIREMENTS).write_text("\n".join(packages) + "\n")
            # Index options are not printed, since they may contain a password.
            listed = ", ".join(line for line in packages if not line.startswith("-"))
            notes.append(
                f"requirements: {listed}; a server with install_py_dep_per_model = true installs"
                " them"
            )
        (folder / "members").mkdir()
        (folder / "members" / DIRECTORY).symlink_to(directory.absolute())
        spec = ArchiveSpec(
            model_name=model_name,
            version=model_version,
            handler=model_handler,
            extra_files=[folder / "members"],
            requirements_file=folder / REQUIREMENTS if packages else None,
            contents=_sample(model, directory),
            extra_manifest={MANIFEST_KEY: {key: value for key, value in origin.items() if value}},
        )
        yield spec, notes


def _download(uri: str, tracking_uri: str | None, target: Path) -> tuple[Path, dict[str, Any]]:
    """Download a model, and return its directory and its origin.

    An alias, `latest` or a stage is resolved to its current version.
    """
    os.environ.setdefault(RETRIES, "2")  # By default, MLflow retries for minutes.
    try:
        import mlflow.artifacts  # an extra
        from mlflow.store.artifact.utils.models import get_model_name_and_version
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise UsageError(f"{uri} is read by MLflow: pip install 'tsx-serve[mlflow]'") from error
    target.mkdir()
    if tracking_uri is not None:
        # The download of a registered model takes no address; it uses the setting of the process.
        mlflow.set_tracking_uri(tracking_uri)
    origin: dict[str, Any] = {"source": uri}
    try:
        client = MlflowClient()
        name, *numbers = (
            get_model_name_and_version(client, uri) if uri.startswith(REGISTRY) else [""]
        )
        if numbers:  # A run and models:/ID have no registered model.
            version = client.get_model_version(name, numbers[0])
            origin = {
                "source": f"{REGISTRY}{name}/{version.version}",
                "version": str(version.version),
                "tags": dict(version.tags),
            }
        model = Path(mlflow.artifacts.download_artifacts(origin["source"], dst_path=str(target)))
    except Exception as error:  # Artifact stores raise the errors of many libraries.
        server = mlflow.get_tracking_uri()
        raise CliError(
            f"{uri} cannot be read from {server}: {error}; MLFLOW_TRACKING_URI names another server"
        ) from error
    if not (model / FILE).is_file():
        raise CliError(
            f"{uri} is no model: it has no {FILE}; give the path of a model, such as runs:/ID/model"
        )
    return model, origin


def _pickle_notes(model: MLmodel, directory: Path) -> list[str]:
    """Return a note if loading the model may run code that is stored in it."""
    weights = (
        directory / str(model.flavors.get("pytorch", {}).get("model_data", "data")) / "model.pth"
    )
    files = [path for path in directory.rglob("*") if path.suffix in (".pkl", ".pickle", ".joblib")]
    if weights.is_file() and describe_model_file(weights).kind != "torchscript":
        files.append(weights)
    if not files:
        return []
    return [
        f"note: {files[0].relative_to(directory)} is a pickle, so its workers run code from it:"
        " serve it only if you trust its author"
    ]


def _requirements(directory: Path, handler: str) -> list[str]:
    """Return the model's requirements and their index options, without the requirements of tsx.

    MLflow is left out if torch loads the model without it.
    """
    file = directory / REQUIREMENTS
    lines = [line.strip() for line in file.read_text().splitlines()] if file.is_file() else []
    excluded_packages = {
        _package(line) for line in metadata.requires("tsx-serve") or () if "extra ==" not in line
    }
    excluded_packages |= {"mlflow", "mlflow-skinny"} if handler == PYTORCH else set()
    model_requirements = [
        line
        for line in lines
        if line
        and not line.startswith(("#", "-r", "-c"))
        and _package(line) not in excluded_packages
    ]
    return (
        model_requirements if any(not line.startswith("-") for line in model_requirements) else []
    )


def _package(requirement: str) -> str:
    return re.sub(
        r"[-_.]+", "-", re.split(r"[\s\[<>=!~;@(]", requirement.strip(), maxsplit=1)[0]
    ).lower()


def _sample(model: MLmodel, directory: Path) -> dict[str, bytes]:
    """Return a file with an example request."""
    if (directory / EXAMPLE).is_file():
        return {f"{SAMPLES}/{EXAMPLE}": (directory / EXAMPLE).read_bytes()}
    return (
        {}
        if model.example is None
        else {f"{SAMPLES}/example.json": json.dumps(model.example).encode()}
    )
