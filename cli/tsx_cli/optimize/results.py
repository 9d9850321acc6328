"""results.json of `tsx optimize`.

Times end in `_ms` or `_seconds`, sizes in `_mib`; shares go from 0 to 1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tsx_cli.bench.load.results import Environment, Inputs, ModelInfo, Part

FORMAT = 1
MANY = 10_000_000  # rows: more than can be had


# kept: written into the archive, or the best; passed: accurate, and faster; slower: accurate, and
# not faster beyond the noise; unproven: the held-out rows keep the limit, and are too few to prove
# it; inaccurate: they break it
FormState = Literal[
    "kept", "passed", "slower", "unproven", "inaccurate", "failed", "not applicable", "not tried"
]


class SizeFigures(Part):
    """Batches of one size, of a form and of the reference, which took turns."""

    batch_size: int
    median_ms: float
    reference_ms: float
    ratio: float  # reference time / own time: above 1 is faster
    low: float  # 95 % interval of the ratio
    high: float


class GuardVerdict(Part):
    """The answers for the held-out rows, compared with the reference or with labels."""

    passed: bool
    metric: str  # top1
    limit: str  # top1>=-0.5%
    value: float  # of the form
    reference: float  # of the reference: 1 if its own answers are the truth
    # reference - value, or value - reference if less is better; as a share of the reference for
    # unbounded metrics
    loss: float
    loss_bound: float  # the loss is not larger, with 95 % confidence
    rows: int
    rows_needed: int | None = (
        None  # where these rows keep the limit, and are too few to prove it: about how many would
    )
    text: str  # the verdict in a sentence: why it is not passed, or what it rests on


class FormResult(Part):
    name: str
    label: str
    state: FormState
    reason: str = ""  # in words, of all states but kept and passed
    guard: GuardVerdict | None = None
    batches_agree: bool | None = (
        None  # whether answers in batches of all sizes agree with those to single rows
    )
    sizes: list[SizeFigures] = Field(default_factory=list)
    speedup: float | None = None  # geometric mean of the ratios
    speedup_low: float | None = None
    speedup_high: float | None = None
    build_seconds: float | None = None
    load_seconds: float | None = None  # of a worker, from its load order to its readiness
    memory_mib: float | None = None  # of a worker after its batches
    size_mib: float | None = None  # of its files


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
    limit: str  # in words, as the guard applies it
    batch_sizes: list[int]
    reference: FormResult  # its sizes have ratio 1
    forms: list[FormResult] = Field(default_factory=list)
    best: str | None = None  # the name of a form; None: the reference stays
    why: str = ""  # the choice in a sentence or two
    notes: list[str] = Field(default_factory=list)
