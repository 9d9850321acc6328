"""The options of `tsx batch`, and the engine and the output that they choose."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import typer

from tsx_cli.batch.local import open_local
from tsx_cli.batch.precomputed import STORE_PREFIX, open_precomputed
from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.rows import BatchEngine
from tsx_cli.batch.s3 import S3
from tsx_cli.batch.sources import BY_SUFFIX, STDIN
from tsx_cli.batch.stores import LocalStore, OutputStore, open_store
from tsx_cli.batch.writers import ENCODINGS, DirectoryWriter, FileWriter, StreamWriter, Writer
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import open_cached
from tsx_cli.deploy.ray.spec import RAY_ADDRESS
from tsx_runtime.settings.schema import Settings

SAGEMAKER = "sagemaker"


class Options(NamedTuple):
    """The unparsed options of the command line."""

    model: Path
    inputs: Sequence[str]
    output: str
    input_format: str | None
    output_format: str | None
    field: str | None
    id_field: str | None
    workers: int | None
    batch_size: int | None
    on: str | None
    end_job: bool
    max_errors: str | None
    commit_every: float
    restart: bool
    model_name: str | None
    expires: str | None
    price_per_hour: float | None
    as_json: bool


def open_engine(
    options: Options, reader: InputReader, settings: Settings, stop: threading.Event
) -> AbstractContextManager[BatchEngine]:
    """Return the engine for `--on`; entering it may also raise TsxError and ArchiveError.

    Raises:
        UsageError: The options contradict each other.
        CliError: An extra is missing, or the engine cannot be used.
    """
    on, model, workers, batch_size = options.on, options.model, options.workers, options.batch_size
    if options.end_job and on != SAGEMAKER:
        raise UsageError(
            "--stop ends a job of --on sagemaker; a run on this machine or a cluster ends with"
            " Ctrl-C"
        )
    if on is None:
        return open_local(model, settings, workers, batch_size)
    if on == SAGEMAKER:
        # A late import, because this module imports all of tsx deploy.
        from tsx_cli.batch.sagemaker.engine import SageMakerEngine

        job = SageMakerEngine(model, reader, workers, batch_size, stop, restart=options.restart)
        if options.end_job:
            print(f"{job.end_job()} is stopping", file=sys.stderr)
            raise typer.Exit
        return nullcontext(job)
    if not re.fullmatch(RAY_ADDRESS, on):
        raise UsageError(f"--on takes ray://HOST:PORT, HOST:PORT, auto or {SAGEMAKER}, not {on!r}")
    try:
        from tsx_cli.batch.ray.engine import open_ray  # an extra
    except ImportError as error:
        raise CliError(f"--on {on} needs Ray: pip install 'tsx-serve[ray]' ({error})") from error
    return open_ray(on, model, settings, workers, batch_size)


def open_output(
    options: Options, reader: InputReader, settings: Settings, s3: S3
) -> tuple[Writer, OutputStore | None]:
    """Return the output's writer and its store; a stream has no store.

    Raises:
        UsageError: The options contradict the output.
        CliError: The output cannot be written.
    """
    output = options.output
    if output.startswith(STORE_PREFIX):
        if options.output_format:
            raise UsageError(f"{output} takes answers as they are; leave --output-format out")
        name = options.model_name or _model_name(options.model, settings)
        writer, path = open_precomputed(output, name, options.expires)
        reader.sources.check_output(path)
        return writer, LocalStore(path)
    if options.model_name or options.expires:
        raise UsageError(
            "--model-name and --expires are for answers in a store (-o jobs+sqlite:///FILE); leave"
            " them out"
        )
    format = options.output_format or _format_of(output)
    if output == STDIN:
        if format not in ("jsonl", "csv"):
            raise UsageError(
                "standard output (-o -) takes JSON lines or, with --output-format csv, CSV, not"
                f" {format}"
            )
        return StreamWriter(ENCODINGS[format]()), None
    reader.sources.check_output(output)
    if format != "directory" and Path(output).is_dir():
        raise UsageError(
            f"-o {output} is a directory, and --output-format {format} is one file; name the file"
        )
    output = f"{output.rstrip('/')}/" if format == "directory" else output
    store = open_store(output, s3)
    if format == "directory":
        return DirectoryWriter(store, numbered=options.id_field is not None), store
    return FileWriter(store, ENCODINGS[format]()), store


def _model_name(model: Path, settings: Settings) -> str:
    with open_cached(model, settings) as archive:
        return archive.manifest.model_name


def _format_of(output: str) -> str:
    suffix = PurePosixPath(output).suffix.lower()
    is_directory = output.endswith("/") or Path(output).is_dir()
    if output == STDIN:
        return "jsonl"
    if not suffix or is_directory:
        return "directory"
    if suffix not in BY_SUFFIX:
        raise UsageError(
            f"-o {output}: its name ends in none of {', '.join(BY_SUFFIX)}; add --output-format, or"
            " end a directory with /"
        )
    return BY_SUFFIX[suffix]
