"""The handler of models for tables, which predicts for the rows of all requests at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import to_json

from tsx_archiver import DEFAULT_VERSION
from tsx_runtime.errors import BadRequest
from tsx_runtime.features.tabular.worker.columns import InvalidRows
from tsx_runtime.features.tabular.worker.models import (
    NO_PREDICTION,
    TableModel,
    TablePrediction,
    load_model,
)
from tsx_runtime.worker.codecs.json_text import JsonText
from tsx_runtime.worker.codecs.tables import TYPES, is_json_table, read_rows
from tsx_runtime.worker.codecs.v2_binary import (
    OutputRequest,
    TensorResponse,
    parse_output_request,
)
from tsx_runtime.worker.codecs.v2_json import read_input
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.steps.labels import load_label_mapping

INVALID_STATUS = 422
CLASS_NAMES = "index_to_name.json"


class TableRequest(NamedTuple):
    """A request for a prediction.

    Attributes:
        rows: Objects, or lists of values in the order of the columns.
        is_single: Whether the answer is an object, and not a list.
        are_tensors: Whether the rows are binary tensors, which the worker also writes.
        output_request: The tensors that JSON of the Open Inference Protocol asks for, or None.
    """

    rows: list[Any]
    is_single: bool = False
    are_tensors: bool = False
    output_request: OutputRequest | None = None


class TabularHandler:
    """A handler for models of scikit-learn, XGBoost and LightGBM."""

    input_kind = "json"
    takes_raw_bodies = True  # Content types decide between JSON, CSV and Parquet.
    model: TableModel
    signature: dict[str, Any]

    def initialize(self, context: Context) -> None:
        """Load the model.

        Raises:
            LoadError: The model cannot be loaded; the message says what to do.
        """
        properties = context.system_properties
        directory = Path(properties["model_dir"])
        file = context.manifest.get("model", {}).get("serializedFile")
        if file is None or not (directory / file).is_file():
            raise LoadError(
                "The archive has no model file. Pack it with `tsx archive FILE`, where FILE is the"
                " model of scikit-learn, XGBoost or LightGBM."
            )
        self.names = load_label_mapping(directory / CLASS_NAMES) or {}
        self.model = load_model(
            directory / file,
            context.model_name,
            is_trusted=bool(properties.get("trust_pickle")),
        )
        self.signature = self._describe(file)

    def _describe(self, file: str) -> dict[str, Any]:
        columns = self.model.columns
        properties: dict[str, Any] = {"prediction": {}}
        if self.model.is_classifier:
            probability = {"type": "number"}
            properties["probabilities"] = {"type": "object", "additionalProperties": probability}
        return {
            "input": columns.schema,
            "output": {"type": "object", "properties": properties, "required": list(properties)},
            "description": f"Predict by {file} from {len(columns.names)} columns.",
            "content_types": list(TYPES),
            "example": columns.example,
        }

    def handle(self, data: Any, context: Context) -> list[Any]:
        """Predict for the rows of all requests in one call, and refuse invalid requests."""
        if context.get_request_header(0, "describe") == "True":
            return [self.signature]
        answers: list[Any] = [None] * len(data)
        requests: dict[int, TableRequest] = {}
        for idx, row in enumerate(data):
            try:
                request = self._read(row, context.get_request_header(idx, "content-type"))
                rows = self.model.columns.check(request.rows, is_single=request.is_single)
                requests[idx] = request._replace(rows=rows)
            except InvalidRows as error:
                context.set_response_status(INVALID_STATUS, idx=idx)
                content = to_json({"detail": error.details}, inf_nan_mode="null", fallback=str)
                answers[idx] = JsonText(content.decode())
        rows = [row for request in requests.values() for row in request.rows]
        prediction = self.model.predict(self.model.columns.frame(rows)) if rows else NO_PREDICTION
        start = 0
        for idx, request in requests.items():
            stop = start + len(request.rows)
            answers[idx] = self._answer(prediction.part(start, stop), request, idx, context)
            start = stop
        return answers

    def _read(self, row: Any, content_type: str | None) -> TableRequest:
        """Return the rows of a request, before their values are checked.

        Raises:
            InvalidRows: The request has no rows.
        """
        if not isinstance(row, dict):  # an instance of an envelope
            return TableRequest([row], True)
        try:
            tensors = {name: value for name, value in row.items() if isinstance(value, np.ndarray)}
            if tensors:  # In the binary form, the first tensor is the body as well.
                columns = {name: value for name, value in row.items() if name != "body"}
                return TableRequest(_rows_of_tensors(columns or row), are_tensors=True)
            body = row.get("body", row.get("data"))
            if not isinstance(body, bytes | bytearray):  # a form, or an instance of an envelope
                values = {
                    name: value.decode() if isinstance(value, bytearray) else value
                    for name, value in row.items()
                }
                return TableRequest([values], True)
            if b'"datatype"' in body and is_json_table(body, content_type):
                document = json.loads(body)
                if isinstance(document, dict) and isinstance(document.get("inputs"), list):
                    inputs = map(read_input, document["inputs"])
                    rows = _rows_of_tensors(
                        {str(tensor["name"]): tensor["data"] for tensor in inputs}
                    )
                    return TableRequest(rows, output_request=parse_output_request(document))
            return TableRequest(*read_rows(body, content_type, self.model.columns.text_types))
        except (ValueError, BadRequest) as error:
            detail = {"type": "table_invalid", "loc": ["body"], "msg": str(error), "input": None}
            raise InvalidRows([detail]) from error

    def _answer(
        self, prediction: TablePrediction, request: TableRequest, idx: int, context: Context
    ) -> Any:
        if request.output_request is not None:
            version = str(context.manifest["model"].get("modelVersion", DEFAULT_VERSION))
            tensors = prediction.tensors()
            return TensorResponse(tensors, request.output_request, idx, context, version)
        if request.are_tensors:
            return prediction.tensors()
        answers = prediction.records(self.names)
        return answers[0] if request.is_single else answers


def _rows_of_tensors(tensors: dict[str, Any]) -> list[Any]:
    """Return the rows of a single tensor of rows, or of a tensor for each column.

    Raises:
        ValueError: The tensors differ in length.
    """
    arrays = [np.asarray(values, object) for values in tensors.values()]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        rows: list[Any] = arrays[0].tolist()
        return rows
    columns = [array.ravel().tolist() for array in arrays]
    return [dict(zip(tensors, row, strict=True)) for row in zip(*columns, strict=True)]
