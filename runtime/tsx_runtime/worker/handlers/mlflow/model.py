"""What the handlers of MLflow's models share: finding the model in the archive, and naming a module
that it lacks.
"""

from __future__ import annotations

from pathlib import Path

from tsx_archiver.errors import ArchiveError
from tsx_archiver.metadata.mlmodel import DIRECTORY, FILE, MLmodel, read_mlmodel
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context


def model_in(context: Context) -> tuple[Path, MLmodel]:
    """The model's directory in the archive, and its description. Raises LoadError."""
    archived = Path(context.system_properties["model_dir"]) / DIRECTORY
    # `tsx serve DIRECTORY` links the files, and MLflow refuses links out of its directory.
    directory = (archived / FILE).resolve().parent
    if not (directory / FILE).is_file():
        raise LoadError(
            f"The archive has no {DIRECTORY}/{FILE}. Pack the model with `tsx archive"
            " models:/NAME/VERSION`."
        )
    try:
        return directory, read_mlmodel(directory)
    except ArchiveError as error:
        raise LoadError(error.message) from error


def missing_module(error: ModuleNotFoundError) -> LoadError:
    return LoadError(
        f"The model needs the module {error.name}: install it where tsx runs, or set"
        " install_py_dep_per_model = true."
    )
