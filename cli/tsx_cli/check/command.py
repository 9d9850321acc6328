"""`tsx check`: the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tsx_cli.common.options import AsJson

Contract = Literal["sagemaker", "lambda", "container"]

app = typer.Typer(add_completion=False)


@app.command("check")
def check_command(
    archive: Annotated[Path, typer.Argument(metavar="MODEL.mar", help="The archive to deploy.")],
    contract: Annotated[
        Contract,
        typer.Option("--target", "--contract", help="The platform to imitate on this machine."),
    ],
    samples: Annotated[
        list[Path] | None,
        typer.Option(
            "--sample",
            metavar="FILE|DIR",
            help="Inputs to send; by default the archive's samples; may be repeated.",
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout",
            help=(
                "Time limit to become ready (10m by default); for Lambda, of an invocation (60s by"
                " default)."
            ),
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            help="An environment variable of the deployment; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check an archive against a platform's contract on this machine, without a container runtime.

    The image's entry point is started and gets the platform's requests, within its limits. Exit
    code 1: a requirement is not met; the output says what to do.
    """
    # This module imports the server's front end; a late import keeps --help quick.
    from tsx_cli.check.run import check

    check(archive, contract, samples or [], timeout, env or [], as_json=as_json)
