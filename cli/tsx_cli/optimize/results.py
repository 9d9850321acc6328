"""The schema of results.json of `tsx optimize`.

Names of times end in `_ms` or `_seconds`, names of sizes in `_mib`. Fractions are from 0 to 1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tsx_archiver.metadata.forms import REFERENCE
from tsx_cli.bench.load.results import Environment, Inputs, ModelInfo, Part

FORMAT = 1
MAX_FEASIBLE_ROWS = 10_000_000


# A kept form is written into the archive. A passed form is accurate and faster. A slower form is
# accurate, but not faster beyond the noise. The rows of an unproven form keep the limit, but there
# are too few. The rows of an inaccurate form break the limit.
FormState = Literal[
    "kept", "passed", "slower", "unproven", "inaccurate", "failed", "not applicable", "not tried"
]


class SizeFigures(Part):
    """The figures of one batch size, which a form and the reference ran in turn."""

    batch_size: int
    median_ms: float
    reference_ms: float
    ratio: float  # reference's time / form's time; above 1 the form is faster
    low: float  # 95 % interval of the ratio
    high: float


class GuardVerdict(Part):
    """The comparison of answers to the held-out rows with the reference or with labels."""

    passed: bool
    metric: str  # such as top1
    limit: str  # such as top1>=-0.5%
    value: float  # the form's score
    reference: float  # the reference's score; 1 if its answers are the truth
    # The decline from the reference; for metrics without bounds, relative to the reference.
    loss: float
    loss_bound: float  # upper bound of the loss with 95 % confidence
    rows: int
    rows_needed: int | None = None  # estimate for a form that is unproven
    text: str  # the verdict in a sentence


class FormResult(Part):
    name: str
    label: str
    state: FormState
    reason: str = ""  # empty for kept and passed
    guard: GuardVerdict | None = None
    batches_agree: bool | None = (
        None  # whether answers in all batch sizes agree with those to single rows
    )
    sizes: list[SizeFigures] = Field(default_factory=list)
    speedup: float | None = None  # geometric mean of the ratios
    speedup_low: float | None = None
    speedup_high: float | None = None
    build_seconds: float | None = None
    load_seconds: float | None = None  # time of a worker until it is ready
    memory_mib: float | None = None  # memory of a worker after its batches
    size_mib: float | None = None  # size of the form's files


def reference_result(size_mib: float | None) -> FormResult:
    """Return the result of the unchanged model, before it is measured."""
    return FormResult(name=REFERENCE, label="the model as it is", state="passed", size_mib=size_mib)


class OptimizeResults(Part):
    format: int = FORMAT
    kind: Literal["optimize"] = "optimize"
    started: str  # ISO 8601, with the offset
    ended: str | None = None
    complete: bool = True
    command: str = ""
    model: ModelInfo
    environment: Environment
    inputs: Inputs
    calibration_rows: int
    held_out_rows: int
    limit: str  # the guard's limits
    batch_sizes: list[int]
    reference: FormResult  # The ratios of its sizes are 1.
    forms: list[FormResult] = Field(default_factory=list)
    best: str | None = None  # name of a form; None is the reference
    why: str = ""  # explanation of the choice
    notes: list[str] = Field(default_factory=list)
