"""The facts about each row of a sample: columns of numbers and categories, and the prediction."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np

from tsx_archiver.monitor.config import FieldKind, MonitorConfig
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.answers import describe_answer
from tsx_runtime.features.monitor.statistics.bodies import decode, split_answer, split_request
from tsx_runtime.features.monitor.statistics.facts import (
    Facts,
    Vector,
    category_of,
    cosine,
    image_facts,
    number_of,
    text_facts,
    vector_of,
)
from tsx_runtime.features.monitor.statistics.fields import (
    MAX_FIELDS,
    guess_kinds,
    schema_fields,
    value_at,
)

MAX_ROWS = 1000  # rows of a request that are examined
GUESS_ROWS = 50  # rows from which the kinds of fields are guessed


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
        facts, vector = describe_answer(answer)
        predicted = facts
        if config.prediction is not None:
            predicted, _ = describe_answer(value_at(answer, config.prediction))
            facts = {**facts, **predicted}
        columns: Facts = {}
        vectors = {} if vector is None else {"answer.similarity": vector}
        if self._rows_to_guess:
            guess_kinds(row, self._guess)
            self._rows_to_guess -= 1
            if not self._rows_to_guess:
                self.freeze()
        else:
            self._add_inputs(row, headers, columns, vectors)
            columns.update((f"answer.{name}", value) for name, value in facts.items())
            columns.update(
                (name, cosine(vectors[name], centre))
                for name, centre in self._centres.items()
                if name in vectors
            )
        confidence: Any = facts.get("confidence")
        key = value_at(row, config.key or "", headers)
        groups = ((path, category_of(value_at(row, path, headers))) for path in config.groups)
        return RowFacts(
            columns,
            predicted.get("class", predicted.get("number")),
            confidence,
            key if isinstance(key, str) else category_of(key),
            {path: group for path, group in groups if group is not None},
            vectors,
        )

    def _add_inputs(
        self, row: Any, headers: Mapping[str, str], columns: Facts, vectors: dict[str, Vector]
    ) -> None:
        for path, kind in self.fields.items():
            value, column = value_at(row, path, headers), f"input.{path}"
            if kind == "number":
                columns[column] = number_of(value)
            elif kind == "category":
                columns[column] = category_of(value)
            elif kind == "embedding":
                if (vector := vector_of(value)) is not None:
                    vectors[f"{column}.similarity"] = vector
            elif kind != "ignore":
                facts = text_facts(value) if kind == "text" else image_facts(value)
                columns.update((f"{column}.{name}", fact) for name, fact in facts.items())
