"""The baseline of a model: summaries of its inputs and answers, without rows.

It is a JSON file in the archive. `tsx monitor baseline` writes it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from tsx_archiver.errors import CannotPack
from tsx_archiver.monitor.config import FieldKind

MEMBER = "monitor-baseline.json"
MAX_BYTES = 1_000_000
MAX_COLUMNS = 1000
FORMAT = 1
OTHERS = "(others)"  # the category of all rare categories

Count = Annotated[int, Field(ge=0, le=2**53)]


class NumberSummary(BaseModel):
    """The distribution of a number, such as an input, the length of a text or a confidence."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Literal["number"] = "number"
    count: Count = Field(description="number of values, without missing ones")
    missing: Count = Field(default=0, description="number of rows without a value")
    edges: tuple[FiniteFloat, ...] = Field(
        default=(),
        description="increasing inner edges of the bins: quantiles of the baseline's values",
    )
    counts: tuple[Count, ...] = Field(
        default=(0,), description="values in each bin; bin i has edges[i-1] < value <= edges[i]"
    )
    mean: float = 0.0

    @model_validator(mode="after")
    def _check_bins(self) -> NumberSummary:
        if len(self.counts) != len(self.edges) + 1:
            raise ValueError("a number has one more bin than edges")
        if any(not low < high for low, high in pairwise(self.edges)):
            raise ValueError("the edges of a number's bins do not increase")
        return self


class CategorySummary(BaseModel):
    """The distribution of categories, such as classes or countries."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Literal["category"] = "category"
    count: Count
    missing: Count = 0
    counts: dict[str, Count] = Field(
        default={}, description="rows by category; rare ones are `(others)`"
    )


ColumnSummary = NumberSummary | CategorySummary


class MonitorBaseline(BaseModel):
    """Summaries of rows, by column.

    The columns of an input are named `input.PATH`, or `input.PATH.FACT` for a fact about a text, an
    image or an embedding (such as `input.photo.brightness`). Those of an answer are named
    `answer.class`, `answer.confidence`, `answer.entropy`, `answer.number`, `answer.similarity` and
    `answer.PATH`.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    tsx: Literal["monitor-baseline"] = "monitor-baseline"
    format: int = FORMAT
    rows: int = Field(ge=0)
    created: float = Field(description="seconds since 1970")
    source: str = Field("", description="what the rows were, such as the name of a file")
    fields: dict[str, FieldKind] = Field({}, description="kinds of the inputs by their paths")
    columns: dict[str, ColumnSummary] = Field({}, max_length=MAX_COLUMNS)
    centres: dict[str, list[float]] = Field(
        {}, description="mean vectors of embeddings, by the column of their similarity"
    )
    accuracy: float | None = Field(None, description="share of right answers, if labels were given")
    mean_error: float | None = Field(None, description="mean absolute error, if labels were given")


def read_baseline(directory: Path) -> MonitorBaseline | None:
    """Read the baseline of an unpacked archive; return None if it has none.

    Raises:
        CannotPack: The file is not a baseline, or is of another format.
    """
    path = directory / MEMBER
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CannotPack(f"{path} cannot be read: {error.strerror}.") from error
    return parse_baseline(text, str(path))


def parse_baseline(text: bytes, label: str) -> MonitorBaseline:
    """Parse a baseline; `label` names it in errors.

    Raises:
        CannotPack: It is not a baseline, or is of another format.
    """
    advice = "Make it again: tsx monitor baseline"
    if len(text) > MAX_BYTES:
        raise CannotPack(f"{label} has more than {MAX_BYTES:,} bytes. {advice}.")
    try:
        baseline = MonitorBaseline.model_validate_json(text)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise CannotPack(f"{label} is not a baseline: {reason}. {advice}.") from error
    if baseline.format != FORMAT:
        raise CannotPack(
            f"{label} is a baseline of format {baseline.format}; this tsx reads {FORMAT}. {advice}."
        )
    return baseline
