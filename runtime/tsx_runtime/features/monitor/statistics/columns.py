"""The facts about each row of a sample: columns of numbers and categories, and the prediction."""

from __future__ import annotations

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
    cosine,
    image_facts,
    number_of,
    text_facts,
    vector_of,
)
from tsx_runtime.features.monitor.statistics.fields import FieldGuess, schema_fields, value_at

MAX_ROWS = 1000  # rows of a request that are examined
MAX_FIELDS = 200
GUESS_ROWS = 50  # rows from which the kinds of fields are guessed


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

    Attributes:
        fields: The kinds in use.
        omitted: The number of fields after the first 200, which are not monitored.
        unreadable: The number of samples whose request or answer is not of its content type.
    """

    def __init__(
        self,
        config: MonitorConfig,
        fields: Mapping[str, FieldKind] = {},
        schema: Mapping[str, Any] | None = None,
        centres: Mapping[str, Sequence[float]] = {},
    ) -> None:
        self.fields: dict[str, FieldKind] = {}
        self.unreadable = 0
        self.omitted = 0
        self._config = config
        self._centres = {name: np.asarray(centre, float) for name, centre in centres.items()}
        self._guess = None if fields else FieldGuess()
        self._set_fields({**schema_fields(schema or {}), **fields, **(config.fields or {})})

    def freeze(self) -> None:
        """End the guess of the fields now, with the rows that were seen."""
        if self._guess is not None:
            guess, self._guess = self._guess, None
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
        config = self._config
        facts, scores, vector = describe_answer(answer)
        prediction = facts.get("class", facts.get("number"))
        if config.prediction is not None:
            part, part_scores, _ = describe_answer(value_at(answer, config.prediction))
            prediction = part.get("class", part.get("number"))
            facts, scores = {**facts, **part}, part_scores or scores
        confidence, key = facts.get("confidence"), _find(row, headers, config.key or "")
        groups = {path: category_of(_find(row, headers, path)) for path in config.groups}
        columns: Facts = {}
        vectors = {} if vector is None else {"answer.similarity": vector}
        if self._guess is None:
            self._add_inputs(row, headers, columns, vectors)
            columns.update((f"answer.{name}", value) for name, value in facts.items())
            columns.update(
                (name, cosine(vectors[name], centre))
                for name, centre in self._centres.items()
                if name in vectors
            )
        else:
            self._guess.add(row)
            if self._guess.rows >= GUESS_ROWS:
                self.freeze()
        return RowFacts(
            columns,
            prediction,
            confidence if isinstance(confidence, float) else None,
            scores,
            key if isinstance(key, str) else category_of(key),
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
            value, column = _find(row, headers, path), f"input.{path}"
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


def _find(row: Any, headers: Mapping[str, str], path: str) -> Any:
    if path.startswith(HEADER_PREFIX):
        return headers.get(path.removeprefix(HEADER_PREFIX).lower())
    return value_at(row, path)
