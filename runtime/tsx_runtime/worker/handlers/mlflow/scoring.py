"""What the handlers of MLflow's models share: the model's description, and refusals that MLflow's clients read as well as tsx's own."""

from __future__ import annotations

import json
from pathlib import Path

from tsx_archiver.metadata.mlmodel import DIRECTORY, FILE, MLmodel, read_mlmodel
from tsx_runtime.errors import BadRequest
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context

JSON = "application/json"


def model_in(context: Context) -> tuple[Path, MLmodel]:
    """The model's directory in the archive, and its description. Raises LoadError."""
    directory = Path(context.system_properties["model_dir"]) / DIRECTORY
    if not (directory / FILE).is_file():
        raise LoadError(f"The archive has no {DIRECTORY}/{FILE}. Pack the model with `tsx archive models:/NAME/VERSION`.")
    return directory, read_mlmodel(directory)


def missing_module(error: ModuleNotFoundError) -> LoadError:
    return LoadError(f"The model needs the module {error.name}: install it where tsx runs, or set install_py_dep_per_model = true.")


def refuse(context: Context, index: int, message: str, status: int = 400, error_code: str = "BAD_REQUEST") -> str:
    """The body of a refusal; its status becomes that of the answer."""
    context.set_response_status(status, idx=index)
    context.set_response_content_type(index, JSON)
    return json.dumps({"code": status, "type": BadRequest.type, "message": message, "error_code": error_code}) + "\n"
