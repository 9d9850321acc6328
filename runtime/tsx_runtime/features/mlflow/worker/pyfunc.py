"""The handler for MLflow's other flavours, which MLflow loads and calls, one request at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tsx_archiver.errors import ArchiveError
from tsx_archiver.metadata.mlmodel import DIRECTORY, FILE, MANIFEST_KEY, MLmodel, read_mlmodel
from tsx_runtime.errors import BadRequest, TsxError
from tsx_runtime.worker.exceptions import InvalidInput, LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import choose_device

JSON, PARQUET = "application/json", "application/vnd.apache.parquet"
# MLflow knows one name of each type. The first one here is sent by `curl -d`.
ALIASES = {
    "application/x-www-form-urlencoded": JSON,
    "application/x-parquet": PARQUET,
    "application/parquet": PARQUET,
}
HINT = "Send dataframe_split, or log the model with a signature that has the types of its tensors."
DEVICE = "MLFLOW_DEFAULT_PREDICTION_DEVICE"


class MLflowPyfunc:
    """A handler that answers like `mlflow models serve`.

    The only difference is that failures of the model have the status 500 instead of 400.
    """

    input_kind = "json"
    takes_raw_bodies = True

    def __init__(self) -> None:
        self.model: Any = None
        self.device: Any = None
        self.mlmodel = MLmodel()

    def initialize(self, context: Context) -> None:
        """Load the model by MLflow.

        Raises:
            LoadError: MLflow, the model or one of its modules is missing.
        """
        self.device = choose_device(context.system_properties.get("gpu_id"))
        directory, self.mlmodel = model_in(context)
        index = -1 if self.device.type == "cpu" else self.device.index or 0
        os.environ.setdefault(
            DEVICE, str(index if self.mlmodel.flavor == "transformers" else self.device)
        )
        try:
            import mlflow.pyfunc  # an extra
        except ModuleNotFoundError as error:
            raise LoadError(
                f"A model of the flavour {self.mlmodel.flavor} is loaded by MLflow: pip install"
                " 'tsx-serve[mlflow]'"
            ) from error
        with missing_modules():
            self.model = mlflow.pyfunc.load_model(str(directory))

    def handle(self, data: Any, context: Context) -> list[Any]:
        """Return the JSON text of MLflow for each request.

        Raises:
            InvalidInput: The body is not an input of the model.
        """
        if context.get_request_header(0, "describe") == "True":
            signature = self.mlmodel.data.get("signature")
            return [{"signature": signature, MANIFEST_KEY: context.manifest.get(MANIFEST_KEY)}]
        return [
            self._answer(row.get("body") or row.get("data") or b"", context, index)
            for index, row in enumerate(data)
        ]

    def _answer(self, body: Any, context: Context, index: int) -> str:
        from mlflow.exceptions import MlflowException  # an extra
        from mlflow.pyfunc.scoring_server import invocations

        if not isinstance(body, bytes | bytearray):
            raise InvalidInput(f"The model takes no tensors in bytes. {HINT}")
        kind = str(context.get_request_header(index, "content-type") or JSON)
        kind = ALIASES.get(kind.partition(";")[0].strip().lower(), kind)
        schema = self.model.metadata.get_input_schema()
        try:
            answer = invocations(bytes(body), kind, self.model, schema)
        except MlflowException as error:
            cause = error.__context__
            if (
                isinstance(cause, Exception)
                and "unexpected error while evaluating the model" in error.message
            ):
                if (
                    schema is None
                    and isinstance(cause, RuntimeError | TypeError)
                    and b'"dataframe_' not in body
                ):
                    raise InvalidInput(
                        "The model has no signature with the types of its input, and failed:"
                        f" {cause}. {HINT}"
                    ) from error
                # MLflow would treat any error of the model as the client's fault.
                raise cause from error
            status = error.get_http_status_code()
            details = {"message": error.message, "error_code": error.error_code}
            # The body is a tensor of the Open Inference Protocol.
            if status == BadRequest.status and b'"datatype"' in body:
                details["message"] += f" {HINT}"
        else:
            if answer.status < 400:
                context.set_response_content_type(index, answer.mimetype)
                return str(answer.response)
            status, details = answer.status, {"message": answer.response}
        context.set_response_status(status, idx=index)
        context.set_response_content_type(index, JSON)
        kind = (BadRequest if status < 500 else TsxError).type
        return json.dumps({"code": status, "type": kind, **details}) + "\n"


def model_in(context: Context) -> tuple[Path, MLmodel]:
    """Return the model's directory in the archive, and its description.

    Raises:
        LoadError: The archive has no MLflow model.
    """
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


@contextmanager
def missing_modules() -> Iterator[None]:
    """Raise LoadError if a module of the model is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise LoadError(
            f"The model needs the module {error.name}: install it where tsx runs, or set"
            " install_py_dep_per_model = true."
        ) from error
