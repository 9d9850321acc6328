"""The facts about each row of a sample: columns of numbers and categories, and the prediction."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tsx_archiver.monitor.config import HEADER_PREFIX, FieldKind, MonitorConfig
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.answers import describe_answer
from tsx_runtime.features.monitor.statistics.bodies import decode, split_answer, split_request
from tsx_runtime.features.monitor.statistics.facts import (
    Facts,
    Vector,
    category_of,
    image_facts,
    number_of,
    text_facts,
    vector_of,
)
from tsx_runtime.features.monitor.statistics.fields import (
    MAX_FIELDS,
    FieldGuess,
    schema_fields,
    value_at,
)

MAX_ROWS = 1000  # rows of a request that are examined
GUESS_ROWS = 50  # rows from which the kinds of fields are guessed
SIMILARITY = "similarity"
MAX_KEY_CHARS = 200


class RowFacts(NamedTuple):
    """What is known about one row of a request, and about its answer."""

    columns: dict[str, float | str | None]
    """By name; empty while the kinds of the fields are guessed. A missing value may be absent."""
    prediction: str | float | None
    """The class or the number that feedback is compared with."""
    confidence: float | None
    scores: dict[str, float] | None
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
    """

    def __init__(
        self,
        config: MonitorConfig,
        fields: Mapping[str, FieldKind] = {},
        schema: Mapping[str, Any] | None = None,
        centres: Mapping[str, Sequence[float]] = {},
    ) -> None:
        self.fields: dict[str, FieldKind] = {}
        self.unreadable = 0  # samples whose request or answer is not of its content type
        self.omitted = 0  # fields that are not monitored since there are too many
        self._config = config
        self._centres = {name: np.asarray(centre, float) for name, centre in centres.items()}
        self._guess = None if fields else FieldGuess()
        self._set_fields({**schema_fields(schema or {}), **fields, **(config.fields or {})})

    def freeze(self) -> None:
        """End the guess of the fields now, with the rows that were seen."""
        if self._guess is not None:
            guess, self._guess = self._guess, None
            self.omitted += guess.omitted
            self._set_fields({**guess.kinds(), **self.fields})

    def rows(self, sample: MonitorSample) -> list[RowFacts]:
        """Return the facts about each row of a sample, of the first 1,000 at most.

        The list is empty for a failed answer, and for a request that cannot be read.
        """
        if not 200 <= sample.status < 300:
            return []
        try:
            rows = split_request(decode(sample.body, sample.headers.get("content-type", "")))
        except ValueError:
            self.unreadable += 1
            return []
        try:
            answers = split_answer(decode(sample.answer, sample.answer_type), len(rows))
        except ValueError:
            self.unreadable += 1
            answers = [None] * len(rows)
        return [
            self._facts(row, answer, sample.headers)
            for row, answer in islice(zip(rows, answers, strict=True), MAX_ROWS)
        ]

    def _facts(self, row: Any, answer: Any, headers: Mapping[str, str]) -> RowFacts:
        config, described = self._config, describe_answer(answer)
        if config.prediction is not None:
            part = describe_answer(value_at(answer, config.prediction))
            described = described._replace(
                columns={**described.columns, **part.columns},
                prediction=part.prediction,
                confidence=part.confidence or described.confidence,
                scores=part.scores or described.scores,
                vector=described.vector if part.vector is None else part.vector,
            )
        columns: Facts = {}
        vectors: dict[str, Vector] = {}
        if self._guess is None:
            self._add_inputs(row, headers, columns, vectors)
            for name, value in described.columns.items():
                columns[f"answer.{name}"] = value
            if described.vector is not None:
                self._add_vector("answer", described.vector, columns, vectors)
        else:
            self._guess.add(row)
            if self._guess.rows >= GUESS_ROWS:
                self.freeze()
        groups = {path: category_of(_find(row, headers, path)) for path in config.groups}
        key = None if config.key is None else _find(row, headers, config.key)
        return RowFacts(
            columns,
            described.prediction,
            described.confidence,
            described.scores,
            key[:MAX_KEY_CHARS] if isinstance(key, str) else category_of(key),
            {path: group for path, group in groups.items() if group is not None},
            vectors,
        )

    def _set_fields(self, fields: Mapping[str, FieldKind]) -> None:
        self.fields = dict(islice(fields.items(), MAX_FIELDS))
        self.omitted += len(fields) - len(self.fields)

    def _add_inputs(
        self, row: Any, headers: Mapping[str, str], columns: Facts, vectors: dict[str, Vector]
    ) -> None:
        for path, kind in self.fields.items():
            if kind == "ignore":
                continue
            value, column = _find(row, headers, path), f"input.{path}"
            if kind == "number":
                columns[column] = number_of(value)
            elif kind == "category":
                columns[column] = category_of(value)
            elif kind == "embedding":
                if (vector := vector_of(value)) is not None:
                    self._add_vector(column, vector, columns, vectors)
            else:
                facts = text_facts(value) if kind == "text" else image_facts(value)
                for name, fact in facts.items():
                    columns[f"{column}.{name}"] = fact

    def _add_vector(
        self, column: str, vector: Vector, columns: Facts, vectors: dict[str, Vector]
    ) -> None:
        column = f"{column}.{SIMILARITY}"
        vectors[column] = vector
        centre = self._centres.get(column)
        if centre is not None and centre.shape == vector.shape:
            lengths = np.linalg.norm(vector) * np.linalg.norm(centre)
            columns[column] = float(vector @ centre / max(lengths, sys.float_info.min))


def _find(row: Any, headers: Mapping[str, str], path: str) -> Any:
    if path.startswith(HEADER_PREFIX):
        return headers.get(path[len(HEADER_PREFIX) :].lower())
    return value_at(row, path)
