"""One invocation of `tsx batch`.

It opens the inputs and the output, runs the model, prints a summary, and stops at a signal.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import typer

from tsx_cli.archive.source import require_packed
from tsx_cli.batch.journal import BatchJournal
from tsx_cli.batch.options import Options, open_engine, open_output
from tsx_cli.batch.readers import InputReader, RowFormat
from tsx_cli.batch.run import BatchRun, parse_max_errors
from tsx_cli.batch.s3 import S3
from tsx_cli.batch.sources import FILES, STDIN, Sources
from tsx_cli.batch.summary import BatchProgress, summary, summary_text
from tsx_cli.common.failure import INTERRUPTED, UsageError
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.options import finite, open_cached
from tsx_cli.common.output import print_json
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.log_format import escaped

STOPPING_TEXT = b"\nstopping; Ctrl-C again stops at once\n"


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


def model_fingerprint(model: Path, settings: Settings) -> str:
    """Return an archive's sha-256, or a digest of a directory's names, sizes and times.

    Raises:
        ArchiveError: The archive cannot be read.
    """
    if model.is_dir():
        return Sources([str(model)], FILES, S3()).survey()[0]
    with open_cached(model, settings) as archive:
        return str(archive.digest)
