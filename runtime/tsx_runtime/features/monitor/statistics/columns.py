"""The facts about each row of a sample: columns of numbers and categories, and the prediction."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np

from tsx_archiver.monitor.config import FieldKind, MonitorConfig
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.bodies import decode, split_answer, split_request
from tsx_runtime.features.monitor.statistics.facts import (
    Facts,
    Vector,
    category_of,
    cosine,
    describe_answer,
    image_facts,
    number_of,
    text_facts,
    value_at,
    values_of,
    vector_of,
)

MAX_ROWS = 1000  # rows of a request that are examined
GUESS_ROWS = 50  # rows from which the kinds of fields are guessed
MAX_FIELDS = 200
MAX_NODES = 1000  # parts of a schema
MAX_GUESS_CHARS = 50  # A longer text is no category.
MAX_GUESS_WORDS = 4
ENCODED_STARTS = ("data:image/", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # images in base64
SCHEMA_KINDS: dict[Any, FieldKind] = {
    "boolean": "category",
    "integer": "number",
    "number": "number",
}


class RowFacts(NamedTuple):
    """What is known about one row of a request, and about its answer."""

    columns: dict[str, float | str | None]
    """By name; empty while the kinds of the fields are guessed. A missing value may be absent."""
    prediction: str | float | None
    """The class or the number that feedback is compared with."""
    confidence: float | None
    key: str | None
    groups: dict[str, str]
    vectors: dict[str, Vector]
    """Embeddings by the column of their similarity to the baseline's centre."""


class Extractor:
    """Extracts facts from the requests and answers of one version.

    The kind of a field is that of the configuration, else that of `fields`, else that of the
    schema. Without `fields`, other fields and their kinds are guessed from the first 50 rows, of
    which the facts have no columns.

    Args:
        config: The configuration of the monitoring.
        fields: The kinds that the handler or the baseline names.
        schema: The JSON schema of a request.
        centres: The mean vectors of embeddings, by the column of their similarity.

    Attributes:
        fields: The kinds in use.
        unreadable: The number of samples whose request or answer is not of its content type.
    """

    def __init__(
        self,
        config: MonitorConfig,
        fields: Mapping[str, FieldKind] = {},
        schema: Mapping[str, Any] | None = None,
        centres: Mapping[str, Sequence[float]] = {},
    ) -> None:
        self.fields = {**schema_fields(schema or {}), **fields, **(config.fields or {})}
        self.unreadable = 0
        self._config = config
        self._centres = {name: np.array(centre) for name, centre in centres.items()}
        self._guess: dict[str, FieldKind] = {}
        self._rows_to_guess = GUESS_ROWS
        if fields:
            self.freeze()

    def freeze(self) -> None:
        """End the guess of the fields now, with the rows that were seen."""
        self._rows_to_guess = 0
        fields = {**self._guess, **self.fields}
        self.fields = dict(islice(fields.items(), MAX_FIELDS))

    def rows(self, sample: MonitorSample) -> list[RowFacts]:
        """Return the facts about each row of a sample, of the first 1,000 at most.

        The list is empty for a failed answer, and for a request that cannot be read.
        """
        if not 200 <= sample.status < 300:
            return []
        rows: list[Any] = []
        answers: list[Any] = []
        try:
            rows = split_request(decode(sample.body, sample.headers.get("content-type", "")))
            answers = split_answer(decode(sample.answer, sample.answer_type), len(rows))
        except (ValueError, csv.Error):
            self.unreadable += 1
        pairs = islice(zip_longest(rows, answers), MAX_ROWS)
        return [self._facts(row, answer, sample.headers) for row, answer in pairs]

    def _facts(self, row: Any, answer: Any, headers: Mapping[str, str]) -> RowFacts:
        config = self._config
        facts = predicted = describe_answer(answer)
        if config.prediction is not None:
            predicted = describe_answer(value_at(answer, config.prediction))
            facts = {**facts, **predicted}
        columns: Facts = {}
        if self._rows_to_guess:
            guess_kinds(row, self._guess)
            self._rows_to_guess -= 1
            if not self._rows_to_guess:
                self.freeze()
        else:
            for path, kind in self.fields.items():
                value, column = value_at(row, path, headers), f"input.{path}"
                if kind == "number":
                    columns[column] = number_of(value)
                elif kind == "category":
                    columns[column] = category_of(value)
                elif kind == "embedding":
                    columns[f"{column}.similarity"] = vector_of(value)
                elif kind != "ignore":
                    named = text_facts(value) if kind == "text" else image_facts(value)
                    columns.update((f"{column}.{name}", fact) for name, fact in named.items())
            columns.update((f"answer.{name}", fact) for name, fact in facts.items())
        vectors = {name: fact for name, fact in columns.items() if isinstance(fact, np.ndarray)}
        for name, vector in vectors.items():
            columns[name] = cosine(vector, self._centres.get(name, vector[:0]))
        key = value_at(row, config.key or "", headers)
        return RowFacts(
            columns,
            predicted.get("class", predicted.get("number")),
            facts.get("confidence"),
            key if isinstance(key, str) else category_of(key),
            {
                path: group
                for path in config.groups
                if (group := category_of(value_at(row, path, headers)))
            },
            vectors,
        )


def guess_kinds(row: Any, kinds: dict[str, FieldKind]) -> None:
    """Add the kinds of a row's fields to those of other rows.

    Fields of mixed kinds, and those of structures, are ignored.
    """
    for path, value in islice(values_of(row), MAX_FIELDS):
        if value is not None:
            kind = _kind_of(value)
            if (known := kinds.setdefault(path, kind)) != kind:
                kinds[path] = "text" if {known, kind} == {"text", "category"} else "ignore"


def _kind_of(value: Any) -> FieldKind:
    if isinstance(value, bool):
        return "category"
    if isinstance(value, int | float):
        return "number"
    if not isinstance(value, str) or value.startswith(ENCODED_STARTS):
        return "image" if image_facts(value) else "ignore"
    is_short = len(value) <= MAX_GUESS_CHARS and len(value.split()) <= MAX_GUESS_WORDS
    return "category" if is_short else "text"


def schema_fields(schema: Any) -> dict[str, FieldKind]:
    """Return the kinds of fields that the JSON schema of a request determines.

    Texts without an `enum` are not among them, since they may be categories.
    """
    kinds: dict[str, FieldKind] = {}
    pending = [("", schema)]
    try:
        for path, item in islice(pending, MAX_NODES):  # The list grows meanwhile.
            node = schema["$defs"][item["$ref"].rpartition("/")[2]] if "$ref" in item else item
            if kind := "category" if "enum" in node else SCHEMA_KINDS.get(node.get("type")):
                kinds[path] = kind
            pending += [(path, option) for option in node.get("anyOf", ())]
            if not path and "items" in node:  # a list of rows
                pending.append((path, node["items"]))
            for name, value in node.get("properties", {}).items():
                pending.append((f"{path}.{name}" if path else name, value))
    except (AttributeError, LookupError, TypeError):
        return {}  # The handler's schema is no JSON schema.
    return kinds
