"""MLflow's scoring protocol: what a request holds, and errors that MLflow's clients read as well as tsx's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tsx_archiver.metadata.mlmodel import DIRECTORY, FILE, MLmodel, read_mlmodel
from tsx_runtime.errors import BadRequest
from tsx_runtime.worker.codecs.v2_json import MalformedTensors
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.steps.tables import rows_of_csv

JSON, CSV = "application/json", "text/csv"


def model_in(context: Context) -> tuple[Path, MLmodel]:
    """The model's directory in the archive, and its description. Raises LoadError."""
    directory = Path(context.system_properties["model_dir"]) / DIRECTORY
    if not (directory / FILE).is_file():
        raise LoadError(f"The archive has no {DIRECTORY}/{FILE}. Pack the model with `tsx archive models:/NAME/VERSION`.")
    return directory, read_mlmodel(directory)


def body_of(row: Any) -> Any:
    """None where the request has none."""
    return row.get("body") if row.get("data") is None else row["data"]


def content_type_of(context: Context, index: int) -> str:
    return str(context.get_request_header(index, "content-type") or JSON)


def as_instances(row: Any, content_type: str) -> Any:
    """The same request in a form that is answered `{"predictions": ...}` and whose rows come first. Raises MalformedTensors."""
    body = body_of(row)
    if content_type.partition(";")[0].strip() == CSV and body is not None:
        try:
            return {"body": {"instances": rows_of_csv(body if isinstance(body, str) else str(body, "utf-8"))}}
        except UnicodeDecodeError as error:
            raise MalformedTensors(f"The CSV is not UTF-8: {error}.") from error
    inputs = body.get("inputs") if isinstance(body, dict) else None
    if isinstance(inputs, dict):
        if not all(isinstance(column, list) for column in inputs.values()) or len({len(column) for column in inputs.values()}) > 1:
            raise MalformedTensors('"inputs" must have a list for each input, all with one entry a row.')
        return {"body": {"instances": [dict(zip(inputs, values, strict=True)) for values in zip(*inputs.values(), strict=True)]}}
    if isinstance(inputs, list) and not any(isinstance(each, dict) for each in inputs):  # else of the Open Inference Protocol
        return {"body": {"instances": inputs}}
    return row


def refuse(context: Context, index: int, message: str, status: int = 400, error_code: str = "BAD_REQUEST") -> str:
    """The body of a refusal; its status becomes that of the answer."""
    context.set_response_status(status, idx=index)
    context.set_response_content_type(index, JSON)
    return json.dumps({"code": status, "type": BadRequest.type, "message": message, "error_code": error_code}) + "\n"
