"""The columns of a model, and the check of rows before they reach it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import ConfigDict, Field, ValidationError, create_model

MAX_DETAILS = 100

_Number = Annotated[float, Field(allow_inf_nan=False)]
_TYPES: dict[str, Any] = {"number": _Number, "text": str, "any": _Number | str}


class InvalidRows(ValueError):
    """The error for rows that do not fit the columns, with FastAPI's details."""

    def __init__(self, details: list[dict[str, Any]]) -> None:
        super().__init__(f"{len(details)} values do not fit the columns of the model")
        self.details = details


class Column(NamedTuple):
    """A column of a model.

    Attributes:
        name: Its name.
        kind: The type of its values.
        nullable: Whether a value may be missing.
        choices: The only values that the model knows; empty if it takes all of its kind.
        categories: The categories of the column in a data frame, in the order of their codes.
    """

    name: str
    kind: Literal["number", "text", "any"] = "any"
    nullable: bool = True
    choices: tuple[Any, ...] = ()
    categories: Sequence[Any] | None = None

    @property
    def annotation(self) -> Any:
        kind: Any = Literal.__getitem__(self.choices) if self.choices else _TYPES[self.kind]
        return kind | None if self.nullable else kind

    @property
    def example(self) -> Any:
        values = self.choices or self.categories or ("text" if self.kind == "text" else 0.0,)
        return values[0]


class Columns:
    """The columns of a model in their order; without names, columns are known by their numbers."""

    def __init__(self, columns: Sequence[Column], *, are_named: bool = True) -> None:
        self._columns = columns
        self._are_named = are_named
        fields: Any = {
            f"column_{index}": (column.annotation, Field(alias=column.name, title=column.name))
            for index, column in enumerate(columns)
        }
        config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        self._record = create_model("Record", __config__=config, **fields)
        self.names = [column.name for column in columns]
        self.text_types = {column.name: str for column in columns if column.kind == "text"}

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of one row: an object, or an array for columns without names."""
        if self._are_named:
            schema: dict[str, Any] = self._record.model_json_schema()
            return schema
        size = len(self.names)
        return {"type": "array", "items": {"type": "number"}, "minItems": size, "maxItems": size}

    @property
    def example(self) -> Any:
        record = {column.name: column.example for column in self._columns}
        return record if self._are_named else list(record.values())

    def check(self, rows: Sequence[Any], *, is_single: bool) -> list[list[Any]]:
        """Return the values of rows in the order of the columns.

        Args:
            rows: Objects, or lists of values in the order of the columns.
            is_single: Whether the only row is the whole body, for the location of an error.

        Raises:
            InvalidRows: A column is missing or unknown, or a value has a wrong type.
        """
        values: list[list[Any]] = []
        details: list[dict[str, Any]] = []
        for index, row in enumerate(rows):
            location = ["body"] if is_single else ["body", index]
            cells = list(row.values()) if isinstance(row, dict) and not self._are_named else row
            if isinstance(cells, list):
                if len(cells) != len(self.names):
                    kind = "too_short" if len(cells) < len(self.names) else "too_long"
                    text = f"A row should have {len(self.names)} values, not {len(cells)}"
                    details.append({"type": kind, "loc": location, "msg": text, "input": row})
                    continue
                cells = dict(zip(self.names, cells, strict=True))
            try:
                record = self._record.model_validate(cells)
                values.append([_or_nan(value) for value in record.__dict__.values()])
            except ValidationError as error:
                details += [
                    {**fault, "loc": [*location, *fault["loc"]]}
                    for fault in error.errors(include_url=False, include_context=False)
                ]
            if len(details) > MAX_DETAILS:
                break
        if details:
            raise InvalidRows(details[:MAX_DETAILS])
        return values

    def frame(self, rows: list[list[Any]]) -> Any:
        """Return rows as the model takes them: a data frame, or an array without names."""
        if not self._are_named:
            return np.array(rows, float)
        frame = pd.DataFrame(rows, columns=self.names)
        return frame.astype(
            {
                column.name: (
                    "float64"
                    if column.categories is None
                    else pd.CategoricalDtype(column.categories)
                )
                for column in self._columns
                if column.kind == "number" or column.categories is not None
            }
        )


def _or_nan(value: Any) -> Any:
    return math.nan if value is None else value
