"""From the words of the command line to a run that can go: the archive, what is sent to it, the directory, and what went before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tsx_archiver import OpenArchive, open_archive
from tsx_archiver.storage.atomic_file import whole_file
from tsx_cli.bench.commands.interrupts import interruptible
from tsx_cli.bench.commands.progress import Progress
from tsx_cli.bench.commands.run import Bench
from tsx_cli.bench.measure.environment import environment
from tsx_cli.bench.measure.profile import profile_best
from tsx_cli.bench.measure.server import sweep
from tsx_cli.bench.measure.trial import Target
from tsx_cli.bench.model.results import ModelInfo, Results
from tsx_cli.bench.search.budget import FULL
from tsx_cli.bench.search.run_options import Asked, command_line, plain
from tsx_cli.bench.storage.journal import Journal, Past, has_run, read_journal
from tsx_cli.bench.workload.inputs import choose_payloads, parse_shape
from tsx_cli.bench.workload.payloads import Payload, mix
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.inputs import is_workflow
from tsx_runtime.settings.schema import Settings

RESULTS = "results.json"


@dataclass(frozen=True)
class Order:
    """One run, whether it is new or goes on."""

    model: Path
    asked: Asked
    directory: Path
    time_limit: float | None  # seconds
    past: Past | None = None
    quiet: bool = False
    profile: bool = False  # whether the best is looked into at the end


def new_order(model: Path, asked: Asked, output: Path | None, time_limit: float | None, *, quiet: bool) -> Order:
    """Raises UsageError."""
    if is_workflow(model):
        raise UsageError(f"'{model}' is a workflow; measure its models one by one")
    if not model.exists():
        raise CliError(f"there is no file '{model}'; name an archive or a model's directory")
    named = f"bench-{model.name.removesuffix('.mar')}-{datetime.now():%Y%m%d-%H%M%S}"
    directory = output or Path(named)
    if has_run(directory):
        raise UsageError(f"--output: '{directory}' holds a run already; --resume {directory} goes on with it, or name another directory")
    return Order(model, asked, directory, time_limit, quiet=quiet)


def resumed_order(directory: Path, model: Path | None, time_limit: float | None, *, quiet: bool) -> Order:
    """Raises CliError."""
    past = read_journal(directory)
    given = dict(past.asked)
    try:
        measured, asked = Path(given.pop("model")), Asked.of_json(given)
    except (KeyError, TypeError, AttributeError, UsageError) as error:  # of another version of tsx
        raise CliError(f"--resume: what the run in '{directory}' was asked for cannot be read ({error}); measure anew") from error
    return Order(model or measured, asked, directory, time_limit, past, quiet)


def carry_out(order: Order, settings: Settings) -> Results:
    """Measure until it is done, out of time or interrupted: `complete` says which. The directory has the journal and results.json."""
    sweep()
    with open_archive(order.model, cache=settings.cache_dir, limits=settings.archive_limits()) as archive:
        payloads, source = what_is_sent(order.asked, archive)
        _check_past(order, archive)
        begun = time.monotonic()
        ends = begun + (float("inf") if order.time_limit is None else order.time_limit)
        with Progress(ends, quiet=order.quiet) as progress, _journal(order) as journal:
            progress.doing("looking at this machine")
            results = _results(order, archive, payloads, source)
            if order.past is None:
                journal.begin(
                    order.asked.as_json() | {"model": str(order.model.absolute())},
                    sha256=archive.digest,
                    fingerprint=results.environment.fingerprint,
                    started=results.started,
                )
            seconds = order.asked.duration or FULL
            target = Target(archive, payloads, seconds, order.asked.seed, sizes=sizes(settings, payloads))
            bench = Bench(order.asked, target, results, journal, progress, ends)
            with interruptible(bench.servers.abandon):
                try:
                    bench.go()
                    if order.profile:
                        progress.doing("profiling a worker")
                        profile_best(archive, results, payloads, order.directory)
                except KeyboardInterrupt:
                    results.complete = False
                    bench.note("The run was interrupted: the best may be among what was not measured. --resume goes on with it.")
                except BaseException:
                    results.complete = False
                    with suppress(CliError):  # what ended the run is told
                        write_results(results, order.directory)
                    raise
                write_results(results, order.directory)
    return results


def what_is_sent(asked: Asked, archive: OpenArchive) -> tuple[list[Payload], str]:
    """The requests, and where they are from. Raises UsageError where there are none."""
    return choose_payloads(
        archive.source,
        [Path(each) for each in asked.inputs],
        kind=asked.input_kind,
        shape=None if asked.input_shape is None else parse_shape(asked.input_shape),
        seed=asked.seed,
        content_type=asked.content_type,
    )


def sizes(settings: Settings, payloads: Sequence[Payload]) -> dict[str, int]:
    """How much a server has to let in and out: as it is set here, and what is sent in any case."""
    largest = max(len(payload.body) for payload in payloads)
    return {"max_request_size": max(settings.max_request_size, largest), "max_response_size": settings.max_response_size}


def write_results(results: Results, directory: Path) -> None:
    """Raises CliError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)  # somebody may have taken it away meanwhile
        with whole_file(directory / RESULTS) as file:
            file.write(results.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise CliError(f"'{directory / RESULTS}' cannot be written: {error.strerror or error}") from error


def _results(order: Order, archive: OpenArchive, payloads: Sequence[Payload], source: str) -> Results:
    past = order.past
    size = order.model.stat().st_size if order.model.is_file() else None
    manifest = archive.manifest
    results = Results(
        started=past.started if past is not None else datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command_line(),
        model=ModelInfo(
            name=manifest.model_name,
            version=manifest.version,
            archive=plain(order.model.name),
            sha256=archive.digest,
            size_mib=None if size is None else round(size / (1 << 20), 3),
        ),
        slo=order.asked.slo,
        environment=environment(),
        inputs=mix(payloads, plain(source)),
        curves=past.curves if past is not None else [],
        trials=past.trials if past is not None else [],
    )
    if past is not None and past.fingerprint != results.environment.fingerprint:
        raise CliError("--resume: the run was begun on another machine, whose figures do not go with those of this one; measure anew")
    return results


def _check_past(order: Order, archive: OpenArchive) -> None:
    if order.past is not None and order.past.sha256 != archive.digest:
        raise CliError(f"--resume: {order.model} has changed since that run was begun; measure anew, without --resume")


@contextmanager
def _journal(order: Order) -> Iterator[Journal]:
    try:
        order.directory.mkdir(parents=True, exist_ok=True)
        journal = Journal(order.directory, new=order.past is None)
    except OSError as error:
        raise CliError(f"'{order.directory}' cannot be written ({error.strerror}); name another directory with --output") from error
    try:
        yield journal
    finally:
        journal.close()
