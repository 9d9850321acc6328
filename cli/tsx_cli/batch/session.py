"""One invocation of `tsx batch`.

It opens the inputs and the output, runs the model, prints a summary, and stops at a signal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import typer

from tsx_archiver import open_archive
from tsx_archiver.quantities import parse_share
from tsx_cli.archive.source import require_packed
from tsx_cli.batch.journal import BatchJournal
from tsx_cli.batch.local import open_local
from tsx_cli.batch.precomputed import is_jobs_store, open_precomputed
from tsx_cli.batch.readers import InputReader, RowFormat
from tsx_cli.batch.rows import BatchEngine
from tsx_cli.batch.run import NO_LIMIT, BatchRun, MaxErrors
from tsx_cli.batch.s3 import S3, is_s3
from tsx_cli.batch.sources import BY_SUFFIX, FILES, STDIN, Sources
from tsx_cli.batch.stores import LocalStore, OutputStore, S3Store
from tsx_cli.batch.summary import BatchProgress, summary, summary_text
from tsx_cli.batch.writers import ENCODINGS, DirectoryWriter, FileWriter, StreamWriter, Writer
from tsx_cli.common.failure import INTERRUPTED, CliError, UsageError
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.options import finite, read_option
from tsx_cli.common.output import print_json
from tsx_cli.deploy.ray.spec import RAY_ADDRESS
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.log_format import escaped

SAGEMAKER = "sagemaker"
STOPPING_TEXT = b"\nstopping; Ctrl-C again stops at once\n"


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


def run_command(options: Options, settings: Settings) -> None:
    """Run the command, and print the summary.

    Raises:
        CliError: The run failed.
        TsxError: The model failed.
        ArchiveError: The archive cannot be read.
        typer.Exit: The run was stopped.
    """
    require_packed(options.model)
    price = (
        None
        if options.price_per_hour is None
        else finite(options.price_per_hour, "--price-per-hour")
    )
    max_errors = parse_max_errors(options.max_errors)
    if options.as_json and options.output == STDIN:
        raise UsageError(
            "--json prints the summary on standard output, where -o - has the rows; leave one of"
            " the two out"
        )
    s3 = S3(settings.s3_endpoint_url)
    reader = InputReader(
        options.inputs, options.input_format, RowFormat(options.field, options.id_field), s3
    )
    stop, is_finished = threading.Event(), False

    def interrupt() -> None:
        stop.set()
        reader.sources.end_stdin()
        # A signal handler must not use print, because it may interrupt a print of the command.
        # The write fails if the terminal is gone.
        with suppress(OSError):
            os.write(2, STOPPING_TEXT)

    opening = open_engine(options, reader, settings, stop)
    writer, store = open_output(options, reader, settings, s3)
    fingerprint = {
        "model": model_fingerprint(options.model, settings),
        "reader": reader.fingerprint,
        "writer": writer.fingerprint,
    }
    journal = BatchJournal(store, fingerprint, restart=options.restart)
    try:
        with interruptible(begin=interrupt), BatchProgress(reader) as progress, opening as engine:
            run = BatchRun(
                engine,
                reader,
                writer,
                journal,
                stop=stop,
                max_errors=max_errors,
                progress=progress.show,
                commit_every=finite(options.commit_every, "--commit-every"),
            )
            run.run()
        is_finished = run.done.complete
    finally:
        journal.close(finished=is_finished)
    report = summary(run, options.output, engine.batch_size, price)
    if options.as_json:
        print_json(report)
    else:
        print(
            escaped(summary_text(report)),
            file=sys.stderr if options.output == STDIN else sys.stdout,
        )
    if not is_finished:
        raise typer.Exit(INTERRUPTED)


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
    if is_jobs_store(output):
        if options.output_format:
            raise UsageError(f"{output} takes answers as they are; leave --output-format out")
        name = options.model_name or model_name(options.model, settings)
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
    store: OutputStore = S3Store(output, s3) if is_s3(output) else LocalStore(output)
    if format == "directory":
        return DirectoryWriter(store, numbered=options.id_field is not None), store
    return FileWriter(store, ENCODINGS[format]()), store


def model_name(model: Path, settings: Settings) -> str:
    with open_archive(
        model, cache=settings.archive_cache(), limits=settings.archive_limits()
    ) as archive:
        return archive.manifest.model_name


def model_fingerprint(model: Path, settings: Settings) -> str:
    """Return an archive's sha-256, or a digest of a directory's names, sizes and times.

    Raises:
        ArchiveError: The archive cannot be read.
    """
    if model.is_dir():
        return Sources([str(model)], FILES, S3()).survey()[0]
    with open_archive(
        model, cache=settings.archive_cache(), limits=settings.archive_limits()
    ) as archive:
        return str(archive.digest)


def parse_max_errors(text: str | None) -> MaxErrors:
    """Parse --max-errors.

    Raises:
        UsageError: The text is neither a number nor a percentage.
    """
    if text is None:
        return NO_LIMIT
    usage = "a number of rows such as 100, or a share of them such as 1%"
    if text.strip().isdecimal():
        return MaxErrors(rows=int(text))
    share = read_option(parse_share, text, "--max-errors", usage)
    if not (text.strip().endswith("%") and 0 <= share <= 1):
        raise UsageError(f"--max-errors takes {usage}, not {text!r}")
    return MaxErrors(share=share)


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
