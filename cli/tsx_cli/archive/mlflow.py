"""MLflow's models as archives: of the registry, of a run, or of a directory with an `MLmodel`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
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
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.inputs import SAMPLES

REGISTRY, RUNS = "models:/", "runs:/"
EXAMPLE = "serving_input_example.json"  # as MLflow writes the example that a model was logged with
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
REQUIREMENTS = "requirements.txt"


def is_uri(path: Path) -> bool:
    return str(path).startswith((REGISTRY, RUNS))


def default_name(path: Path) -> str:
    """The registered model's, the last part of a run's path, or the directory's."""
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
    """What to pack, and lines about it; files of it are there until the context ends.

    `requirements`: whether the model's own are packed.

    Raises CliError and ArchiveError.
    """
    with TemporaryDirectory(prefix="tsx-mlflow-", dir=temporary_directory()) as made:
        place = Path(made)
        origin: dict[str, Any] = {"name": default_name(path), "source": path.absolute().name}
        directory = path
        if is_uri(path):
            directory, found = _downloaded(str(path), tracking_uri, place / "download")
            origin |= found
        model = read_mlmodel(directory)
        origin |= {
            "flavor": model.flavor,
            **{key: model.data.get(key) for key in ("run_id", "model_id", "mlflow_version")},
        }
        chosen = handler or model.handler
        title, numbered = (
            name or origin["name"],
            version or origin.get("version") or DEFAULT_VERSION,
        )
        notes = [
            f"{path}: MLflow model, flavour {model.flavor}",
            f"name {title}, version {numbered}",
            f"handler {chosen}",
        ]
        notes += _pickled(model, directory)
        packages = _requirements(directory, chosen) if requirements else []
        if packages:
            (place / REQUIREMENTS).write_text("\n".join(packages) + "\n")
            named = ", ".join(
                line for line in packages if not line.startswith("-")
            )  # an index may have a password
            notes.append(
                f"requirements: {named}; a server with install_py_dep_per_model = true installs"
                " them"
            )
        (place / "members").mkdir()
        (place / "members" / DIRECTORY).symlink_to(directory.absolute())
        spec = ArchiveSpec(
            model_name=title,
            version=numbered,
            handler=chosen,
            extra_files=[place / "members"],
            requirements_file=place / REQUIREMENTS if packages else None,
            contents=_sample(model, directory),
            extra_manifest={MANIFEST_KEY: {key: value for key, value in origin.items() if value}},
        )
        yield spec, notes


def _downloaded(uri: str, tracking_uri: str | None, place: Path) -> tuple[Path, dict[str, Any]]:
    """The model's directory, and where it comes from: an alias, `latest` or a stage as the version
    that it is now.
    """
    os.environ.setdefault(RETRIES, "2")  # else a server that is not there is waited for for minutes
    try:
        import mlflow.artifacts  # an extra
        from mlflow.store.artifact.utils.models import get_model_name_and_version
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise UsageError(f"{uri} is read by MLflow: pip install 'tsx-serve[mlflow]'") from error
    place.mkdir()
    if tracking_uri is not None:
        mlflow.set_tracking_uri(
            tracking_uri
        )  # for the process: what downloads a registered model looks nowhere else
    origin: dict[str, Any] = {"source": uri}
    try:
        client = MlflowClient()
        name, *numbers = (
            get_model_name_and_version(client, uri) if uri.startswith(REGISTRY) else [""]
        )
        if numbers:  # else of a run, or models:/ID, of a model that is in no registry
            version = client.get_model_version(name, numbers[0])
            origin = {
                "source": f"{REGISTRY}{name}/{version.version}",
                "version": str(version.version),
                "tags": dict(version.tags),
            }
        found = Path(mlflow.artifacts.download_artifacts(origin["source"], dst_path=str(place)))
    except Exception as error:  # a store of artifacts raises whatever its own library does
        server = mlflow.get_tracking_uri()
        raise CliError(
            f"{uri} cannot be read from {server}: {error}; MLFLOW_TRACKING_URI names another server"
        ) from error
    if not (found / FILE).is_file():
        raise CliError(
            f"{uri} is no model: it has no {FILE}; give the path of a model, such as runs:/ID/model"
        )
    return found, origin


def _pickled(model: MLmodel, directory: Path) -> list[str]:
    """A line for a model whose loading runs code from it."""
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
    """The model's own, without what comes with tsx, and without MLflow where torch alone loads it;
    with the indexes that have them.
    """
    file = directory / REQUIREMENTS
    lines = [line.strip() for line in file.read_text().splitlines()] if file.is_file() else []
    ours = {
        _package(line) for line in metadata.requires("tsx-serve") or () if "extra ==" not in line
    }
    ours |= {"mlflow", "mlflow-skinny"} if handler == PYTORCH else set()
    kept = [
        line
        for line in lines
        if line and not line.startswith(("#", "-r", "-c")) and _package(line) not in ours
    ]
    return kept if any(not line.startswith("-") for line in kept) else []


def _package(requirement: str) -> str:
    return re.sub(
        r"[-_.]+", "-", re.split(r"[\s\[<>=!~;@(]", requirement.strip(), maxsplit=1)[0]
    ).lower()


def _sample(model: MLmodel, directory: Path) -> dict[str, bytes]:
    """A request to try the model with, which the server's page offers too."""
    if (directory / EXAMPLE).is_file():
        return {f"{SAMPLES}/{EXAMPLE}": (directory / EXAMPLE).read_bytes()}
    return (
        {}
        if model.example is None
        else {f"{SAMPLES}/example.json": json.dumps(model.example).encode()}
    )
