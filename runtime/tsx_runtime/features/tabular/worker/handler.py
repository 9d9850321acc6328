"""The handler of models for tables, which predicts for the rows of all requests at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import BeforeValidator, ConfigDict, TypeAdapter

from tsx_runtime.features.python_files.worker.annotations import typed_dict
from tsx_runtime.features.python_files.worker.handler import PythonFileHandler
from tsx_runtime.features.python_files.worker.reading import BODY, RequestReader
from tsx_runtime.features.python_files.worker.schemas import resolve
from tsx_runtime.features.python_files.worker.writing import ResponseWriter
from tsx_runtime.features.tabular.worker.models import TableModel, load_model
from tsx_runtime.worker.codecs.requests import content_type_of
from tsx_runtime.worker.codecs.tables import UPLOAD_TYPES, is_table, read_document, rows_of
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context


class TabularHandler(PythonFileHandler):
    """A handler for models of scikit-learn, XGBoost and LightGBM."""

    table: TableModel

    def initialize(self, context: Context) -> None:
        """Load the model.

        Raises:
            LoadError: The model cannot be loaded; the message says what to do.
        """
        properties = context.system_properties
        path = Path(properties["model_dir"], context.manifest["model"].get("serializedFile") or "")
        if not path.is_file():
            raise LoadError("The archive has no model file. Pack it with `tsx archive FILE`.")
        is_trusted = bool(properties.get("trust_pickle"))
        self.table = load_model(path, context.model_name, is_trusted=is_trusted)
        fields: dict[str, Any] = {"prediction": Any, "probabilities": dict[str, float]}
        answer: Any = typed_dict("Answer", fields, () if self.table.classes else ("probabilities",))
        self._reader = TableReader(self.table.columns)
        self._writer = TableWriter(answer | list[answer], path.name, nan=context.json_nan)
        self._predict, self._is_batched, self._context = self._answer, True, context
        self.signature = self._describe(f"Predict by {path.name}.")

    def _answer(self, requests: list[Any]) -> list[Any]:
        """Return the answers to requests, each of which is a row or a list of rows."""
        tables = [request if isinstance(request, list) else [request] for request in requests]
        rows = [row for table in tables for row in table]
        answers = self._predict_rows(rows) if rows else iter(())
        return [
            [next(answers) for _ in request] if isinstance(request, list) else next(answers)
            for request in requests
        ]

    def _predict_rows(self, rows: list[Any]) -> Iterator[dict[str, Any]]:
        frame = pd.DataFrame(rows, columns=list(self.table.columns))
        values, probabilities = self.table.predict(frame)
        for index, value in enumerate(values.tolist()):
            answer = {"prediction": value}
            if probabilities is not None:
                row = probabilities[index].tolist()
                answer["probabilities"] = dict(zip(self.table.classes, row, strict=True))
            yield answer


class TableReader(RequestReader):
    """The reader of requests that are a row or a list of rows, as dicts."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        record = typed_dict("Record", columns, ())
        record.__pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        row: Any = Annotated[record, BeforeValidator(partial(_as_record, list(columns)))]
        parameter = inspect.Parameter("row", inspect.Parameter.POSITIONAL_ONLY, annotation=row)
        super().__init__([parameter], is_batched=False)
        self.upload_types = (*UPLOAD_TYPES, *self.upload_types)
        self._is_json = False
        self._table: Any = TypeAdapter(list[row]).validator
        # Numbers in such a column of CSV stay as they are written.
        self._text_types = {
            name: str
            for name, schema in self._properties.items()
            if resolve(schema, self.schema).get("type") == "string"
        }

    def _read_whole(self, value: Any, meta: str) -> Any:
        if isinstance(value, bytes | bytearray):
            value = read_document(value, content_type_of(meta), self._text_types)
        rows = rows_of(value)
        return (self._table if is_table(rows) else self._validator).validate_python(rows)

    def _read_fields(self, row: Mapping[str, Any], meta: str, parts: Mapping[str, Any]) -> Any:
        """Read a form, a tensor of rows, or a tensor for each column."""
        if not any(isinstance(values, np.ndarray | list) for values in row.values()):
            return super()._read_fields(row, meta, parts)
        # In the binary form, the first tensor is the body as well.
        arrays = {name: np.asarray(data, object) for name, data in row.items() if name != BODY}
        first = next(iter(arrays.values()))
        if len(arrays) == 1 and first.ndim > 1:
            return self._read_whole(first.tolist(), meta)
        columns = {name: array.ravel() for name, array in arrays.items()}
        return self._read_whole(pd.DataFrame(columns), meta)


class TableWriter(ResponseWriter):
    """The writer of answers, whose tensors have a row for each row of the table."""

    def _fields(self, value: Any) -> dict[str, Any]:
        answers = pd.DataFrame(value if isinstance(value, list) else [value])
        columns = {name: pd.DataFrame(list(column)) for name, column in answers.items()}
        return {name: np.array(frame.values.tolist()) for name, frame in columns.items()}


def _as_record(names: list[str], row: Any) -> Any:
    if not isinstance(row, list):
        return row
    if len(row) != len(names):
        raise ValueError(f"a row should have {len(names)} values, not {len(row)}")
    return dict(zip(names, row, strict=True))
