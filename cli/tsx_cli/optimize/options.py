"""The options of `tsx optimize` with their help, and the form in which a journal stores them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tsx_cli.bench.commands.options import INPUTS, OUTPUT, ContentType, Model, Output, Resume

__all__ = ["ContentType", "Model", "Output", "Resume"]

DEFAULT_TIME = "15m"
DEFAULT_SIZES = "1,8,32"

# Sections of the help, in addition to those of tsx bench.
ACCURACY, FORMS = "Accuracy", "Forms and time"


class Keep(str, Enum):
    BEST = "best"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class OptimizeOptions:
    """The options as the journal stores them; texts are not parsed yet."""

    inputs: tuple[str, ...] = ()
    content_type: str | None = None
    labels: str | None = None
    max_loss: str | None = None
    tolerance: str | None = None
    metric: str | None = None
    forms: tuple[str, ...] = ()  # If empty, all applicable forms are tried.
    batch_sizes: str = DEFAULT_SIZES
    rows: int | None = None
    device: str | None = None
    seed: int = 0


Inputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--input",
        metavar="FILE|DIR",
        help=(
            "Typical inputs: a directory, a recording, or a .jsonl file of requests. A quarter"
            " calibrates forms, the rest tests them."
        ),
        rich_help_panel=INPUTS,
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Use only so many of the inputs, drawn by --seed.",
        rich_help_panel=INPUTS,
    ),
]
Seed = Annotated[
    int, typer.Option(help="Seed by which the inputs are divided.", rich_help_panel=INPUTS)
]
Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=(
            "Right answers by file name (JSON, JSONL or CSV); by default the answers of the model"
            " as it is are right."
        ),
        rich_help_panel=ACCURACY,
    ),
]
MaxLoss = Annotated[
    str | None,
    typer.Option(
        metavar="BOUND",
        help="Loss that is accepted, such as 'top1>=-0.5%', 'cosine>=0.999' or 'perplexity<=+1%'.",
        rich_help_panel=ACCURACY,
    ),
]
Tolerance = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Also keep every number of every answer: rtol=1e-2,atol=1e-3, or exact.",
        rich_help_panel=ACCURACY,
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:FUNCTION",
        help="Also your own metric, a function of (answers, labels); more is better.",
        rich_help_panel=ACCURACY,
    ),
]
Forms = Annotated[
    str | None,
    typer.Option(
        "--forms",
        metavar="LIST",
        help="Only these forms, such as bf16,onnx.",
        rich_help_panel=FORMS,
    ),
]
BatchSizes = Annotated[
    str, typer.Option(metavar="LIST", help="Batch sizes to measure.", rich_help_panel=FORMS)
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="cpu|cuda", help="By default a GPU where there is one.", rich_help_panel=FORMS
    ),
]
TimeLimit = Annotated[str, typer.Option(help="Time limit of the whole run.", rich_help_panel=FORMS)]
KeepOf = Annotated[
    Keep,
    typer.Option(
        help="Write into the archive: the best form, all that are accurate and faster, or none.",
        rich_help_panel=OUTPUT,
    ),
]
Remove = Annotated[
    bool,
    typer.Option(
        "--remove",
        help="Only remove the forms that an earlier run has written into the archive.",
        rich_help_panel=OUTPUT,
    ),
]
