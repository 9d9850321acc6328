"""`tsx archive`: the command lines that pack a model, and inspect, unpack or verify an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tsx_cli.archive.trust import TrustOptions, TrustPickle, TrustRemoteCode
from tsx_cli.common.failure import CliError, for_all
from tsx_cli.common.inputs import split_list
from tsx_cli.common.lazy import DefaultGroup
from tsx_cli.common.options import (
    Adapters,
    AsJson,
    ExtraFiles,
    Handler,
    ModelFile,
    Task,
)


class ArchiveGroup(DefaultGroup):
    default = "pack"


Form = Literal["default", "zip-store", "tgz", "no-archive"]
Archive = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="A .mar, .model or .tar.gz file, or an unpacked directory."
    ),
]

app = typer.Typer(cls=ArchiveGroup, add_completion=False, no_args_is_help=True)


@app.callback()
def archive() -> None:
    pass


@app.command("pack", hidden=True)
def pack_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help=(
                "Trained models, MLflow's, or Hugging Face's (a directory, or"
                " hf:ORG/NAME@REVISION); each becomes one archive."
            ),
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; by default that of the file.")
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", "-v", help="Version of the model; 1.0 if not given.")
    ] = None,
    handler: Handler = None,
    model_file: ModelFile = None,
    extra_files: ExtraFiles = None,
    requirements_file: Annotated[
        Path | None,
        typer.Option("--requirements-file", "-r", help="Python packages the handler needs."),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config-file", "-c", help="The model's model-config.yaml.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory for the archive, or its file name.")
    ] = Path(),
    format: Annotated[
        Form,
        typer.Option(
            help=(
                "A .mar with its code deflated, a .mar with all members stored, .tar.gz, or an"
                " unpacked directory."
            )
        ),
    ] = "default",
    index_to_name: Annotated[
        bool, typer.Option(help="Add the index_to_name.json next to the model file.")
    ] = True,
    samples: Annotated[
        list[Path] | None,
        typer.Option(
            "--sample",
            metavar="FILE|DIR",
            help="Inputs to check with; a new archive includes them.",
        ),
    ] = None,
    should_check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help=(
                "Send all samples alone and in batches, and compare the answers. Without either:"
                " load the model and send one."
            ),
        ),
    ] = None,
    test_import: Annotated[
        bool,
        typer.Option(
            "--import/--no-import",
            help=(
                "First import the handler and the model file as a worker will; --no-import runs"
                " nothing of the model, and loads nothing."
            ),
        ),
    ] = True,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Absolute or relative tolerance for numbers.")
    ] = 1e-4,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            help="MLflow's server, for models:/NAME/VERSION, models:/NAME@ALIAS and runs:/ID/PATH."
        ),
    ] = None,
    task: Task = None,
    adapters: Adapters = None,
    trust_remote_code: TrustRemoteCode = False,
    trust_pickle: TrustPickle = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Overwrite an existing archive.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pack trained models, each into one .mar file: `tsx archive model.pt`.

    The name, version and kind of the model are detected and printed. For a model file named like a
    command below, write ./inspect.

    With --check, FILE may also be an existing archive. Exit code 3: it loaded, but there was no
    sample to send.
    """
    from tsx_cli.archive import actions
    from tsx_cli.archive.huggingface import HuggingFaceOptions
    from tsx_cli.archive.model_file import HandlerFiles
    from tsx_cli.archive.packing import PackingOptions

    parts = HandlerFiles(handler, model_file, split_list(extra_files), index_to_name)
    options = PackingOptions(
        parts,
        name,
        version,
        requirements_file,
        config_file,
        output,
        format,
        force,
        samples or [],
        test_import and not should_check,
        test_import and should_check is None,
        tracking_uri,
        HuggingFaceOptions(task, adapters or []),
        TrustOptions(trust_remote_code, trust_pickle),
    )
    actions.pack_files(files or [], options, bool(should_check), tolerance, as_json)


@app.command()
def inspect(file: Archive, as_json: AsJson = False) -> None:
    """Show what an archive contains, without unpacking it."""
    from tsx_cli.archive import actions

    actions.inspect(file, as_json)


@app.command()
def verify(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Archives, or unpacked directories.")
    ],
    as_json: AsJson = False,
) -> None:
    """Check every byte of archives against their directories and checksums.

    The exit code is 1 if something is wrong. With --json, each archive has its own JSON document.
    """
    from tsx_archiver import ArchiveError
    from tsx_cli.archive import actions

    for_all(files, lambda file: actions.verify(file, as_json), CliError, ArchiveError)


@app.command()
def unpack(
    file: Archive,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New directory; by default named after the model."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Unpack an archive into a new directory, after checking that it is safe."""
    from tsx_cli.archive import actions

    actions.unpack(file, output, as_json)
