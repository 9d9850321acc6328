"""One invocation of `tsx optimize`.

It prepares a run from the options, runs it, and writes the results into the archive.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tsx_archiver.storage.private_directory import temporary_directory
from tsx_cli.bench.commands.progress import Progress
from tsx_cli.bench.load.results import command_line, model_info, now
from tsx_cli.bench.search.machine import environment
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.options import open_cached
from tsx_cli.common.run_directory import write_results
from tsx_cli.optimize.builder import FormBuilder, check_buildable, device_of, model_size_mib
from tsx_cli.optimize.journal import OptimizeJournal, PastOptimization, read_optimize_journal
from tsx_cli.optimize.options import Keep, OptimizeOptions
from tsx_cli.optimize.prove import Criteria
from tsx_cli.optimize.report import write_report
from tsx_cli.optimize.results import OptimizeResults, reference_result
from tsx_cli.optimize.rows import read_rows
from tsx_cli.optimize.run import Optimization
from tsx_cli.optimize.write_back import digest_of, keep_chosen_forms
from tsx_runtime.settings.schema import Settings


@dataclass(frozen=True)
class OptimizeRequest:
    """The parameters of a run, new or resumed."""

    model: Path
    options: OptimizeOptions
    directory: Path
    time_limit: float  # seconds
    keep: Keep
    past: PastOptimization | None = None
    quiet: bool = False


def resumed_optimization(
    directory: Path, model: Path | None, time_limit: float, keep: Keep, *, quiet: bool
) -> OptimizeRequest:
    """Return the request that continues a run.

    Raises:
        CliError: There is nothing to resume.
    """
    past = read_optimize_journal(directory)
    measured_model, options = past.arguments(directory, OptimizeOptions)
    return OptimizeRequest(
        model or measured_model, options, directory, time_limit, keep, past, quiet
    )


def run_optimization(request: OptimizeRequest, settings: Settings) -> OptimizeResults:
    """Try all forms, and write results.json and the forms of --keep.

    `complete` of the results is False if the run is interrupted.
    """
    options, past = request.options, request.past
    with (
        open_cached(request.model, settings) as archive,
        tempfile.TemporaryDirectory(
            prefix="tsx-optimize-", dir=temporary_directory()
        ) as temporary_path,
    ):
        check_buildable(archive)
        rows, inputs = read_rows(archive, options)
        criteria = Criteria(options, rows.labels, rows.class_names)
        deadline = time.monotonic() + request.time_limit
        with (
            Progress(deadline, quiet=request.quiet) as progress,
            OptimizeJournal(request.directory, new=past is None) as journal,
        ):
            progress.show_activity("examining this machine")
            results = OptimizeResults(
                started=now() if past is None else past.started,
                command=command_line(),
                model=model_info(request.model, archive),
                environment=environment(),
                inputs=inputs,
                calibration_rows=len(rows.calibration),
                held_out_rows=len(rows.held_out),
                limit="",
                batch_sizes=criteria.measured_sizes,
                reference=reference_result(model_size_mib(archive)),
            )
            fingerprint = results.environment.fingerprint
            digest, inputs_digest = digest_of(archive), rows.digest()
            if past is None:
                journal.begin(
                    options,
                    request.model,
                    sha256=digest,
                    inputs=inputs_digest,
                    fingerprint=fingerprint,
                    started=results.started,
                )
            else:
                past.check(request.model, digest, fingerprint)
                past.check_inputs(inputs_digest)
            builder = FormBuilder(
                archive,
                device_of(options.device, archive),
                rows.calibration,
                criteria.sizes[-1],
                Path(temporary_path),
                request.directory,
                past is not None,
            )
            run = Optimization(
                options,
                criteria,
                rows.held_out,
                builder,
                results,
                journal,
                progress,
                deadline,
                past,
            )
            with interruptible(builder.kill_build):
                try:
                    run.run()
                except KeyboardInterrupt:
                    results.complete = False
                    results.notes.append(
                        "The run was interrupted, and nothing was written into the archive."
                        " --resume continues it."
                    )
                except BaseException:
                    results.complete = False
                    with suppress(OSError):  # The original error must be reported.
                        if results.forms:
                            write_report(results, request.directory)
                    raise
            write_results(results, request.directory)
            if results.complete and request.keep is not Keep.NONE:
                keep_chosen_forms(
                    request.model, request.keep, digest, results, builder, journal, settings
                )
    return results
