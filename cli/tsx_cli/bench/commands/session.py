"""The setup of a run: its archive, inputs and directory, and an earlier run to resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tsx_cli.bench.commands.profile import profile_best
from tsx_cli.bench.commands.progress import Progress
from tsx_cli.bench.commands.run import Bench
from tsx_cli.bench.load.payloads import Payload, mix
from tsx_cli.bench.load.results import Results, command_line, model_info, now
from tsx_cli.bench.report.journal import Journal, PastRun, read_journal
from tsx_cli.bench.search.confirm import FULL_ROUND_S
from tsx_cli.bench.search.machine import Watch, environment
from tsx_cli.bench.search.options import BenchOptions, payloads_of
from tsx_cli.bench.search.server import choose_cores, pinned, sweep
from tsx_cli.bench.search.trial import TrialTarget
from tsx_cli.bench.search.variants import kept_forms
from tsx_cli.common.failure import CliError
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.options import open_cached
from tsx_cli.common.run_directory import write_results
from tsx_runtime.settings.schema import Settings


@dataclass(frozen=True)
class RunRequest:
    """The parameters of one run, new or resumed."""

    model: Path
    options: BenchOptions
    directory: Path
    time_limit: float | None  # seconds
    past: PastRun | None = None
    quiet: bool = False
    profile: bool = False  # whether to profile a worker of the best configuration


def resumed_run(
    directory: Path, model: Path | None, time_limit: float | None, *, quiet: bool
) -> RunRequest:
    """Prepare the continuation of a run.

    Raises:
        CliError: The directory contains no run.
    """
    past_run = read_journal(directory)
    measured_model, options = past_run.arguments(directory, BenchOptions)
    return RunRequest(model or measured_model, options, directory, time_limit, past_run, quiet)


def run_bench(request: RunRequest, settings: Settings) -> Results:
    """Measure until the run is finished, out of time or interrupted.

    The directory receives the journal and results.json. `complete` of the results is False after an
    interruption.
    """
    options, past = request.options, request.past
    sweep()
    pinning = choose_cores(options.server_cores, options.generator_cores)
    # This process runs on the cores of the server, since it only waits while the generator runs.
    cores = () if pinning is None else tuple(pinning.server)
    with pinned(cores), open_cached(request.model, settings) as archive:
        payloads, source = payloads_of(options, archive)
        started_at = time.monotonic()
        end_time = started_at + (float("inf") if request.time_limit is None else request.time_limit)
        with (
            Progress(end_time, quiet=request.quiet) as progress,
            Journal(request.directory, new=past is None) as journal,
        ):
            progress.show_activity("examining this machine")
            results = Results(
                started=now() if past is None else past.started,
                command=command_line(),
                model=model_info(request.model, archive),
                slo=options.slo,
                environment=environment(),
                inputs=mix(payloads, source),
                pinning=pinning,
                curves=[] if past is None else past.curves,
                trials=[] if past is None else past.trials,
            )
            fingerprint = results.environment.fingerprint
            if past is None:
                journal.begin(
                    options,
                    request.model,
                    sha256=archive.digest,
                    fingerprint=fingerprint,
                    started=results.started,
                )
            else:
                past.check(request.model, archive.digest, fingerprint)
            seconds = options.duration or FULL_ROUND_S
            generator = () if pinning is None else tuple(pinning.generator)
            size_limits = size_limits_of(settings, payloads)
            target = TrialTarget(
                archive,
                payloads,
                seconds,
                options.seed,
                sizes=size_limits,
                generator_cores=generator,
                slo=options.bounds,
            )
            watch = partial(Watch, extra_cores=generator)
            forms, outdated = kept_forms(archive, options.forms)
            bench = Bench(
                options, target, results, journal, progress, end_time, watch=watch, forms=forms
            )
            if outdated is not None:
                bench.note(outdated)
            with interruptible(bench.servers.abandon):
                try:
                    bench.run()
                    if request.profile:
                        progress.show_activity("profiling a worker")
                        profile_best(archive, results, payloads, request.directory)
                except KeyboardInterrupt:
                    results.complete = False
                    bench.note(
                        "The run was interrupted: the best configuration may not have been"
                        " measured. --resume continues the run."
                    )
                except BaseException:
                    results.complete = False
                    with suppress(CliError):  # The original error must be reported.
                        write_results(results, request.directory)
                    raise
                write_results(results, request.directory)
    return results


def size_limits_of(settings: Settings, payloads: Sequence[Payload]) -> dict[str, int]:
    """Return the size limits of a server: its settings, raised to the largest request."""
    largest_request = max(len(payload.body) for payload in payloads)
    return {
        "max_request_size": max(settings.max_request_size, largest_request),
        "max_response_size": settings.max_response_size,
    }
