"""The options of `tsx bench`, with what their help says."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_TIME = "2m"


class Mode(str, Enum):
    CLOSED = "closed"
    OPEN = "open"


class Arrivals(str, Enum):
    CONSTANT = "constant"
    POISSON = "poisson"
    RECORDED = "recorded"


Model = Annotated[Path | None, typer.Argument(metavar="MODEL", help="An archive, or a model's directory.")]
SloBounds = Annotated[
    str | None, typer.Option("--slo", metavar="BOUNDS", help="What must hold, such as 'p99<100ms' or 'p50<20ms,errors<0.1%'.")
]
Inputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--input",
        metavar="FILE|DIR",
        help="What is sent: files, directories, a .jsonl of requests, a recording; the archive's samples if not given.",
    ),
]
InputKind = Annotated[str | None, typer.Option(metavar="KIND", help="Make inputs up: image, png, text, json or file.")]
InputShape = Annotated[str | None, typer.Option(metavar="N,N,...", help="Shape of the inputs that are made up, such as 1,28,28.")]
ContentType = Annotated[str | None, typer.Option(help="Content type of the inputs, where their names do not tell it.")]
BatchSizes = Annotated[str, typer.Option(metavar="RANGE", help="1,2,4, or 1..32: both ends and the powers of two between.")]
Workers = Annotated[str | None, typer.Option(metavar="RANGE", help="How many workers; up to the number of cores if not given.")]
Devices = Annotated[str | None, typer.Option(metavar="LIST", help="cpu, cuda, or both; as the archive says if not given.")]
Precisions = Annotated[str | None, typer.Option(metavar="LIST", help="Of fp32, fp16, bf16; as the archive says if not given.")]
Compiled = Annotated[
    str | None, typer.Option("--compile", metavar="LIST", help="torch.compile: off, on, or off,on; as the archive says if not given.")
]
Threads = Annotated[
    str | None, typer.Option(metavar="RANGE", help="Threads of each worker; its share of the cores, and fewer, if not given.")
]
LoadMode = Annotated[Mode, typer.Option(help="closed: a connection asks again once it is answered. open: requests come at a rate.")]
Connections = Annotated[str | None, typer.Option(metavar="LIST", help="Only with so many connections, such as 1,8,64.")]
Rates = Annotated[str | None, typer.Option(metavar="LIST", help="With --mode open: only at these rates, in requests per second.")]
ArrivalsOf = Annotated[Arrivals | None, typer.Option(help="With --mode open: how requests come; poisson if not given.")]
Duration = Annotated[str, typer.Option(help="Of one round, without its warm-up.")]
RoundTime = Annotated[
    str | None,
    typer.Option("--duration", help="Of one round, without its warm-up; 1 to 3 seconds, as the time allows, if not given."),
]
Rounds = Annotated[int, typer.Option(min=1, max=20, help="Rounds of the best, the next best and the baseline, in turn.")]
Width = Annotated[str, typer.Option(metavar="SHARE", help="More rounds until the winner's throughput is known so well.")]
TimeLimit = Annotated[str | None, typer.Option(help=f"Of the whole run; {DEFAULT_TIME} if not given, none with --exhaustive.")]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Measure every configuration, whatever is predicted.")]
Tolerance = Annotated[
    str | None, typer.Option(metavar="TEXT", help="How far answers may be apart: rtol=1e-2,atol=1e-3 if not given, or exact.")
]
SameTop = Annotated[int | None, typer.Option(metavar="N", help="In place of a tolerance: so many of the best labels must be the same.")]
AllowDifferent = Annotated[bool, typer.Option("--allow-different", help="What answers differently than the archive as it is may win.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Directory for what is found; a new one if not given.")]
Resume = Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with a run that was interrupted.")]
Profile = Annotated[bool, typer.Option("--profile", help="At the end, see where a worker of the best one spends its time.")]
Write = Annotated[bool, typer.Option("--write", help="Put the winning settings, and what was measured, into the archive.")]
Upload = Annotated[
    str | None,
    typer.Option(metavar="cloudwatch:NAMESPACE", help="Send the figures to CloudWatch as well, with the environment's credentials."),
]
Seed = Annotated[int, typer.Option(help="Of what is random: the arrivals.")]
