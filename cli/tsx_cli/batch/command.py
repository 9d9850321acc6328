"""The command line of `tsx batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tsx_cli.common.failure import UsageError
from tsx_cli.common.options import AsJson, Assignments, Config, read_settings

app = typer.Typer(add_completion=False)


@app.command("batch")
def batch_command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL.mar", help="The archive, or a model's directory.")
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="OUTPUT",
            help=(
                "A file (.jsonl, .csv, .parquet), a directory for a file per row, s3://..., - for"
                " standard output, "
                "or jobs+sqlite:///FILE, a store from which a server answers."
            ),
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...",
            help=(
                "Files, directories, s3://BUCKET/KEY, s3://BUCKET/PREFIX/, or - for standard input."
                " A row per line of .jsonl and .csv, "
                "per row of .parquet, and per file of anything else and of a directory."
            ),
        ),
    ] = None,
    input_option: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="INPUT", help="The same as the argument INPUT; may be repeated."
        ),
    ] = None,
    input_format: Annotated[
        Literal["files", "jsonl", "csv", "parquet"] | None,
        typer.Option(
            "--input-format",
            help="How all inputs are read, whatever their names; `files`: a row per file.",
        ),
    ] = None,
    output_format: Annotated[
        Literal["jsonl", "csv", "parquet", "directory"] | None,
        typer.Option("--output-format", help="By default as the output's name says."),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            "--field",
            metavar="NAME",
            help="Send this column or field alone, as text or bytes, in place of the row.",
        ),
    ] = None,
    id_field: Annotated[
        str | None,
        typer.Option(
            "--id-field",
            metavar="NAME",
            help="The column or field that is a row's id; by default FILE:LINE.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Worker processes; by default as measured, else what the machine has room for.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rows in a batch; by default as measured, else found on the first rows."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="WHERE",
            help=(
                "A Ray cluster, as ray://HOST:PORT, HOST:PORT or auto, or sagemaker for a batch"
                " transform job; by default this machine."
            ),
        ),
    ] = None,
    end_job: Annotated[
        bool,
        typer.Option(
            "--stop", help="Stop the job that the same command started with --on sagemaker."
        ),
    ] = False,
    max_errors: Annotated[
        str | None,
        typer.Option(
            "--max-errors", metavar="N|P%", help="End the run once more rows than this have failed."
        ),
    ] = None,
    commit_every: Annotated[
        float,
        typer.Option(
            min=0.01,
            metavar="SECONDS",
            help="At most this much work is done again after an interruption.",
        ),
    ] = 5.0,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Start over, replacing an unfinished run or an existing output."
        ),
    ] = False,
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model-name",
            metavar="NAME",
            help="With -o jobs+...: the model's name there; by default the archive's.",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires",
            metavar="TIME",
            help="With -o jobs+...: time until an answer expires; 30d by default.",
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Price of this machine per hour, in any currency; adds the cost to the summary.",
        ),
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Run a model over many inputs, without a server, and write the answers in the inputs' order.

    The same command continues a run that was interrupted: each row is in the output once. A row
    that fails is an error record.

    Exit code 0: all rows are written, failed ones included; 1: the run failed, or --max-errors was
    exceeded; 130: it was interrupted.
    """
    # These modules import the server's front end; late imports keep --help quick.
    from tsx_cli.batch.options import Options
    from tsx_cli.batch.session import run_command

    if not (inputs := [*(inputs or ()), *(input_option or ())]):
        raise UsageError("name what the model runs over: `tsx batch MODEL.mar INPUT... -o OUTPUT`")
    options = Options(
        model=model,
        inputs=inputs,
        output=output,
        input_format=input_format,
        output_format=output_format,
        field=field,
        id_field=id_field,
        workers=workers,
        batch_size=batch_size,
        on=on,
        end_job=end_job,
        max_errors=max_errors,
        commit_every=commit_every,
        restart=restart,
        model_name=model_name,
        expires=expires,
        price_per_hour=price_per_hour,
        as_json=as_json,
    )
    run_command(options, read_settings(config, assignments)[0])
