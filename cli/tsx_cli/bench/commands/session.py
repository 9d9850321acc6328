"""The setup of a run: its archive, inputs and directory, and an earlier run to resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from tsx_archiver import OpenArchive, open_archive
from tsx_archiver.metadata.forms import REFERENCE, FormRecord
from tsx_archiver.names import similar_file
from tsx_cli.archive.source import require_packed
from tsx_cli.bench.commands.profile import profile_best
from tsx_cli.bench.commands.progress import Progress
from tsx_cli.bench.commands.run import Bench
from tsx_cli.bench.load.inputs import choose_payloads, parse_shape
from tsx_cli.bench.load.payloads import Payload, mix
from tsx_cli.bench.load.results import ModelInfo, Results, now
from tsx_cli.bench.report.journal import Journal, PastRun, read_journal
from tsx_cli.bench.search.confirm import FULL_ROUND_S
from tsx_cli.bench.search.machine import Watch, environment
from tsx_cli.bench.search.options import BenchOptions, command_line, plain
from tsx_cli.bench.search.server import choose_cores, pinned, sweep
from tsx_cli.bench.search.trial import TrialTarget
from tsx_cli.bench.search.variants import kept_forms
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.run_directory import has_run, write_results
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


def new_run(
    model: Path,
    options: BenchOptions,
    output: Path | None,
    time_limit: float | None,
    *,
    quiet: bool,
) -> RunRequest:
    """Prepare a new run.

    Raises:
        UsageError: The directory already contains a run, or the model is not packed.
        CliError: There is no such model.
    """
    return RunRequest(
        model, options, new_directory("bench", model, output), time_limit, quiet=quiet
    )


def new_directory(command: str, model: Path, output: Path | None) -> Path:
    """Return the directory of a new run of `tsx bench` or `tsx optimize`.

    It is `output`, or a directory named after the model and the time.

    Raises:
        CliError: There is no such model.
        UsageError: The directory already contains a run.
    """
    require_packed(model)
    if not model.exists():
        raise CliError(
            f"there is no file '{model}'{similar_file(model) or ';'} name an archive or a model's"
            " directory"
        )
    directory = output or Path(
        f"{command}-{model.name.removesuffix('.mar')}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    if has_run(directory):
        raise UsageError(
            f"--output: '{directory}' holds a run already; --resume {directory} goes on with it, or"
            " name another directory"
        )
    return directory


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
    sweep()
    pinning = choose_cores(request.options.server_cores, request.options.generator_cores)
    # This process runs on the cores of the server, since it only waits while the generator runs.
    cores = () if pinning is None else tuple(pinning.server)
    with (
        pinned(cores),
        open_archive(
            request.model, cache=settings.archive_cache(), limits=settings.archive_limits()
        ) as archive,
    ):
        payloads, source = payloads_of_options(request.options, archive)
        started_at = time.monotonic()
        end_time = started_at + (float("inf") if request.time_limit is None else request.time_limit)
        with (
            Progress(end_time, quiet=request.quiet) as progress,
            Journal(request.directory, new=request.past is None) as journal,
        ):
            progress.show_activity("examining this machine")
            results = _results(request, archive, payloads, source)
            results.pinning = pinning
            if request.past is None:
                journal.begin(
                    request.options.as_json() | {"model": str(request.model.absolute())},
                    sha256=archive.digest,
                    fingerprint=results.environment.fingerprint,
                    started=results.started,
                )
            seconds = request.options.duration or FULL_ROUND_S
            generator = () if pinning is None else tuple(pinning.generator)
            size_limits = size_limits_of(settings, payloads)
            target = TrialTarget(
                archive,
                payloads,
                seconds,
                request.options.seed,
                sizes=size_limits,
                generator_cores=generator,
                slo=request.options.bounds,
            )
            watch = partial(Watch, extra_cores=generator)
            forms, outdated = _forms(archive, request.options)
            bench = Bench(
                request.options,
                target,
                results,
                journal,
                progress,
                end_time,
                watch=watch,
                forms=forms,
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


def _forms(archive: OpenArchive, options: BenchOptions) -> tuple[Sequence[FormRecord], str | None]:
    """Return the archive's forms to measure, and the reason if they are out of date.

    Raises:
        CliError: The options request forms that are out of date.
    """
    stored = kept_forms(archive)
    changed_file = stored.stale_since(archive.manifest.checksums)
    if changed_file is None:
        return stored.forms, None
    outdated_text = (
        f"its forms are not measured, as {changed_file} has changed since they were built: run tsx"
        " optimize again"
    )
    if options.forms not in (None, REFERENCE):
        raise CliError(f"--forms {options.forms}: {outdated_text}")
    return (), outdated_text


def payloads_of_options(options: BenchOptions, archive: OpenArchive) -> tuple[list[Payload], str]:
    """Return the requests and a description of their source.

    Raises:
        UsageError: There are no inputs.
    """
    return choose_payloads(
        archive.source,
        [Path(path) for path in options.inputs],
        kind=options.input_kind,
        shape=None if options.input_shape is None else parse_shape(options.input_shape),
        seed=options.seed,
        content_type=options.content_type,
        prompt_tokens=options.prompt_tokens,
        max_tokens=options.max_tokens,
    )


def size_limits_of(settings: Settings, payloads: Sequence[Payload]) -> dict[str, int]:
    """Return the size limits of a server: its settings, raised to the largest request."""
    largest_request = max(len(payload.body) for payload in payloads)
    return {
        "max_request_size": max(settings.max_request_size, largest_request),
        "max_response_size": settings.max_response_size,
    }


def model_info(path: Path, archive: OpenArchive) -> ModelInfo:
    size = path.stat().st_size if path.is_file() else None
    return ModelInfo(
        name=archive.manifest.model_name,
        version=archive.manifest.version,
        archive=plain(path.name),
        sha256=archive.digest,
        size_mib=None if size is None else round(size / (1 << 20), 3),
    )


def _results(
    request: RunRequest, archive: OpenArchive, payloads: Sequence[Payload], source: str
) -> Results:
    past = request.past
    results = Results(
        started=past.started if past is not None else now(),
        command=command_line(),
        model=model_info(request.model, archive),
        slo=request.options.slo,
        environment=environment(),
        inputs=mix(payloads, plain(source)),
        curves=past.curves if past is not None else [],
        trials=past.trials if past is not None else [],
    )
    if past is not None:
        past.check(request.model, archive.digest, results.environment.fingerprint)
    return results
