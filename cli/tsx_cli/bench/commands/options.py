"""The options of `tsx bench` and their help."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_TIME = "2m"

# The panels of the help.
INPUTS, SPACE, LOAD, ANSWERS, OUTPUT = (
    "Inputs",
    "Configurations to try",
    "Load and time",
    "Answers",
    "Output",
)


class Mode(str, Enum):
    CLOSED = "closed"
    OPEN = "open"


class Arrivals(str, Enum):
    CONSTANT = "constant"
    POISSON = "poisson"
    RECORDED = "recorded"


Model = Annotated[
    Path | None, typer.Argument(metavar="MODEL", help="An archive, or a model's directory.")
]
SloBounds = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="BOUNDS",
        help=(
            "Bounds to keep, such as 'p99<100ms', 'p50<20ms,errors<0.1%', or of event streams"
            " 'ttft.p99<300ms,tpot.p99<50ms'."
        ),
    ),
]
Inputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--input",
        metavar="FILE|DIR",
        help=(
            "Inputs to send: files, directories, a .jsonl file of requests, or a recording; by"
            " default the archive's samples."
        ),
        rich_help_panel=INPUTS,
    ),
]
InputKind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Generate inputs: image, png, text, json, file or chat (prompts).",
        rich_help_panel=INPUTS,
    ),
]
InputShape = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Shape of generated inputs, such as 1,28,28.",
        rich_help_panel=INPUTS,
    ),
]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTHS",
        help=(
            "Generate prompts of so many words, about a token each: 64, uniform:16,256, or"
            " lognormal:64,0.6 (median and sigma)."
        ),
        rich_help_panel=INPUTS,
    ),
]
MaxTokens = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTHS",
        help="With prompts: the most tokens of an answer, in the same forms; by default 64.",
        rich_help_panel=INPUTS,
    ),
]
ContentType = Annotated[
    str | None,
    typer.Option(
        help="Content type of the inputs; by default guessed from their names.",
        rich_help_panel=INPUTS,
    ),
]
BatchSizes = Annotated[
    str,
    typer.Option(
        metavar="RANGE",
        help="1,2,4, or 1..32: both ends and the powers of two between.",
        rich_help_panel=SPACE,
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="RANGE",
        help="Number of workers; by default up to the number of cores.",
        rich_help_panel=SPACE,
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="cpu, cuda, or both; by default the archive's setting.",
        rich_help_panel=SPACE,
    ),
]
Precisions = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="fp32, fp16 or bf16; by default the archive's setting.",
        rich_help_panel=SPACE,
    ),
]
Compiled = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="LIST",
        help="torch.compile: off, on, or off,on; by default the archive's setting.",
        rich_help_panel=SPACE,
    ),
]
Forms = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help=(
            "Forms that the archive keeps (tsx optimize), and reference; by default all. Precision"
            " and compilation are the reference's."
        ),
        rich_help_panel=SPACE,
    ),
]
Threads = Annotated[
    str | None,
    typer.Option(
        metavar="RANGE",
        help="Threads per worker; by default its share of the cores, and smaller numbers.",
        rich_help_panel=SPACE,
    ),
]
LoadMode = Annotated[
    Mode,
    typer.Option(
        help=(
            "closed: a connection sends its next request after an answer. open: requests arrive at"
            " a rate."
        ),
        rich_help_panel=LOAD,
    ),
]
Connections = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Only these numbers of connections, such as 1,8,64.",
        rich_help_panel=LOAD,
    ),
]
Rates = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="With --mode open: only at these rates, in requests per second.",
        rich_help_panel=LOAD,
    ),
]
ArrivalsOf = Annotated[
    Arrivals | None,
    typer.Option(
        metavar="KIND",
        help="With --mode open: how requests arrive: poisson, if not given, constant or recorded.",
        rich_help_panel=LOAD,
    ),
]
Duration = Annotated[
    str, typer.Option(help="Duration of one round, without its warm-up.", rich_help_panel=LOAD)
]
RoundTime = Annotated[
    str | None,
    typer.Option(
        "--duration",
        help=(
            "Duration of one round, without its warm-up; by default 1 to 3 seconds, as the time"
            " allows."
        ),
        rich_help_panel=LOAD,
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        min=1,
        max=20,
        help=(
            "Final rounds, in which the best, the second-best and the baseline configuration take"
            " turns."
        ),
        rich_help_panel=LOAD,
    ),
]
Width = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Add rounds until the winner's throughput is known to this precision.",
        rich_help_panel=LOAD,
    ),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        help=f"Time limit of the whole run; {DEFAULT_TIME} if not given, none with --exhaustive.",
        rich_help_panel=LOAD,
    ),
]
Exhaustive = Annotated[
    bool,
    typer.Option(
        "--exhaustive",
        help="Measure every configuration, whatever the prediction.",
        rich_help_panel=LOAD,
    ),
]
Tolerance = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Tolerance when comparing answers: rtol=1e-2,atol=1e-3 by default, or exact.",
        rich_help_panel=ANSWERS,
    ),
]
SameTop = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Instead of a tolerance: the number of top labels that must be the same.",
        rich_help_panel=ANSWERS,
    ),
]
AllowDifferent = Annotated[
    bool,
    typer.Option(
        "--allow-different",
        help="Accept a winner whose answers differ from the archive's.",
        rich_help_panel=ANSWERS,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Directory for the results; by default a new one.",
        rich_help_panel=OUTPUT,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Continue an interrupted run.", rich_help_panel=OUTPUT),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Profile a worker of the best configuration at the end.",
        rich_help_panel=OUTPUT,
    ),
]
Write = Annotated[
    bool,
    typer.Option(
        "--write",
        help="Write the winning settings and the measurements into the archive.",
        rich_help_panel=OUTPUT,
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificate to trust, in addition to this machine's and certificate_file.",
    ),
]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        min=0,
        help=(
            "Price of this machine per hour, in any currency; adds the cost of a million requests."
        ),
        rich_help_panel=OUTPUT,
    ),
]
JUnit = Annotated[
    str | None,
    typer.Option(
        "--junit",
        metavar="FILE",
        help="Also write the verdicts as JUnit XML, for a CI server.",
        rich_help_panel=OUTPUT,
    ),
]
ServerCores = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Cores of the server, such as 0-3; by default those that --generator-cores leaves.",
        rich_help_panel=LOAD,
    ),
]
GeneratorCores = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Cores of the load generator, such as 4,5 (Linux).",
        rich_help_panel=LOAD,
    ),
]
Ramp = Annotated[
    bool,
    typer.Option(
        "--ramp",
        help="Also raise the rate of an open loop until a bound breaks, and find the knee.",
        rich_help_panel=LOAD,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of random arrivals.", rich_help_panel=LOAD)]
