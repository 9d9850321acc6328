"""One call of `tsx batch`: opens what the command line names, runs it, reports, and stops at a signal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import typer

from tsx_archiver import open_archive
from tsx_cli.batch.engines import open_engine
from tsx_cli.batch.journal import BatchJournal
from tsx_cli.batch.precomputed import is_jobs_store, open_precomputed
from tsx_cli.batch.readers import InputReader, RowFormat
from tsx_cli.batch.run import MaxErrors, run_batch
from tsx_cli.batch.s3 import is_s3
from tsx_cli.batch.sources import BY_SUFFIX, FILES, STDIN, Sources
from tsx_cli.batch.stores import LocalStore, OutputStore, S3Store
from tsx_cli.batch.summary import BatchProgress, summary, summary_text
from tsx_cli.batch.writers import ENCODINGS, DirectoryWriter, FileWriter, StreamWriter, Writer
from tsx_cli.bench.search.run_options import finite
from tsx_cli.common.failure import INTERRUPTED, UsageError
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.options import read_option, read_settings
from tsx_cli.common.output import print_json
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.quantities import parse_share


class Options(NamedTuple):
    model: Path
    inputs: tuple[str, ...]
    output: str
    input_format: str | None = None
    output_format: str | None = None
    field: str | None = None
    id_field: str | None = None
    workers: int | None = None
    batch_size: int | None = None
    max_errors: str | None = None
    commit_every: float = 5.0
    restart: bool = False
    on: str | None = None  # where, if not on this machine
    end_job: bool = False
    model_name: str | None = None
    expires: str | None = None


def run_command(
    options: Options, price_per_hour: float | None, config: Path | None, assignments: Sequence[str] | None, *, as_json: bool
) -> None:
    """Raises CliError, TsxError, ArchiveError; typer.Exit where it was stopped."""
    price = None if price_per_hour is None else finite(price_per_hour, "--price-per-hour")
    max_errors = parse_max_errors(options.max_errors)
    if as_json and options.output == STDIN:
        raise UsageError("--json prints the summary on standard output, where -o - has the rows; leave one of the two out")
    settings, _ = read_settings(config, assignments)
    reader = InputReader(options.inputs, options.input_format, RowFormat(options.field, options.id_field))
    stop, finished = threading.Event(), False
    writer, journal = open_output(options, reader, settings)
    try:
        with (
            interruptible(begin=stop.set),
            BatchProgress(reader) as progress,
            open_engine(
                options.on,
                options.model,
                reader,
                settings,
                stop,
                workers=options.workers,
                batch_size=options.batch_size,
                restart=options.restart,
                end_job=options.end_job,
            ) as engine,
        ):
            tally = run_batch(
                engine,
                reader,
                writer,
                journal,
                stop=stop,
                max_errors=max_errors,
                progress=progress.show,
                commit_every=options.commit_every,
            )
        finished = tally.finished
    finally:
        journal.close(finished=finished)
    found = summary(tally, options.output, engine.batch_size, price)
    if as_json:
        print_json(found)
    else:
        print(summary_text(found), file=sys.stderr if options.output == STDIN else sys.stdout)
    if not finished:
        raise typer.Exit(INTERRUPTED)


def open_output(options: Options, reader: InputReader, settings: Settings) -> tuple[Writer, BatchJournal]:
    """Raises UsageError, CliError."""
    if is_jobs_store(options.output):
        return _open_precomputed(options, reader, settings)
    if options.model_name or options.expires:
        raise UsageError("--model-name and --expires are for answers in a store (-o jobs+sqlite:///FILE); leave them out")
    format = options.output_format or _format_of(options.output)
    if options.output == STDIN:
        if format not in ("jsonl", "csv"):
            raise UsageError(f"standard output (-o -) takes JSON lines or, with --output-format csv, CSV, not {format}")
        writer: Writer = StreamWriter(ENCODINGS[format]())
        return writer, BatchJournal(None, {})
    if Sources(options.inputs, options.input_format).hold(options.output):
        raise UsageError(f"-o {options.output} is among the inputs, which would change with it; name a place outside of them")
    numbered = options.id_field is not None
    output = f"{options.output.rstrip('/')}/" if format == "directory" else options.output
    store: OutputStore = S3Store(output) if is_s3(output) else LocalStore(output)
    writer = DirectoryWriter(store, numbered=numbered) if format == "directory" else FileWriter(store, ENCODINGS[format]())
    return writer, _journal(store, writer, options, reader, settings)


def _open_precomputed(options: Options, reader: InputReader, settings: Settings) -> tuple[Writer, BatchJournal]:
    if options.output_format:
        raise UsageError(f"{options.output} takes answers as they are; leave --output-format out")
    name = options.model_name
    if name is None:
        with open_archive(options.model, cache=settings.cache_dir, limits=settings.archive_limits()) as archive:
            name = archive.manifest.model_name
    writer, store = open_precomputed(options.output, name, options.expires)
    return writer, _journal(store, writer, options, reader, settings)


def _journal(store: OutputStore, writer: Writer, options: Options, reader: InputReader, settings: Settings) -> BatchJournal:
    fingerprint = {"model": model_fingerprint(options.model, settings), "reader": reader.fingerprint, "writer": writer.fingerprint}
    return BatchJournal(store, fingerprint, restart=options.restart)


def model_fingerprint(model: Path, settings: Settings) -> str:
    """The archive's sha-256; of a directory, what changes with its files. Raises ArchiveError."""
    if model.is_dir():
        return Sources([str(model)], FILES).survey()[0]
    with open_archive(model, cache=settings.cache_dir, limits=settings.archive_limits()) as archive:
        return str(archive.digest)


def parse_max_errors(text: str | None) -> MaxErrors:
    """Raises UsageError."""
    if text is None:
        return MaxErrors()
    usage = "a number of rows such as 100, or a share of them such as 1%"
    if text.strip().endswith("%"):
        share = read_option(parse_share, text, "--max-errors", usage)
        if 0 <= share <= 1:
            return MaxErrors(share=share)
    elif text.strip().isdecimal():
        return MaxErrors(rows=int(text))
    raise UsageError(f"--max-errors takes {usage}, not {text!r}")


def _format_of(output: str) -> str:
    suffix, is_directory = PurePosixPath(output).suffix.lower(), output.endswith("/") or Path(output).is_dir()
    if output == STDIN:
        return "jsonl"
    if not suffix or is_directory:
        return "directory"
    if suffix not in BY_SUFFIX:
        raise UsageError(f"-o {output}: its name ends in none of {', '.join(BY_SUFFIX)}; add --output-format, or end a directory with /")
    return BY_SUFFIX[suffix]
