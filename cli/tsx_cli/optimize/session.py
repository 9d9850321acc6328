"""One invocation of `tsx optimize`.

It prepares a run from the options, runs it, and writes the results into the archive.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver import OpenArchive, inspect_archive, open_archive
from tsx_archiver.metadata.forms import FORMS_DIRECTORY, REFERENCE
from tsx_archiver.metadata.huggingface import MANIFEST_KEY
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_cli.bench.commands.progress import Progress
from tsx_cli.bench.commands.session import model_info, new_directory
from tsx_cli.bench.load.configuration import parse_numbers
from tsx_cli.bench.load.inputs import choose_payloads, payloads_of_archive
from tsx_cli.bench.load.payloads import Payload, mix
from tsx_cli.bench.load.results import Inputs, now
from tsx_cli.bench.search.machine import environment
from tsx_cli.bench.search.options import DEVICES, command_line, parse_words, plain
from tsx_cli.bench.search.worker import items_of
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.inputs import INDEX_TO_NAME
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.run_directory import write_results
from tsx_cli.optimize.builder import FormBuilder
from tsx_cli.optimize.choose import rank_forms
from tsx_cli.optimize.guard.labels import read_labels
from tsx_cli.optimize.journal import OptimizeJournal, PastOptimization, read_optimize_journal
from tsx_cli.optimize.options import Keep, OptimizeOptions
from tsx_cli.optimize.prove import MAX_CALIBRATION_ROWS, Criteria
from tsx_cli.optimize.report import write_report
from tsx_cli.optimize.results import FormResult, OptimizeResults
from tsx_cli.optimize.run import Optimization
from tsx_cli.optimize.write_back import BuiltForm, digest_of, keep_forms, measured_of
from tsx_runtime.core.placement.hardware import gpu_count
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.class_names import read_class_names

MIN_ROWS = 8


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


class Rows(NamedTuple):
    """The inputs in two disjoint sets."""

    calibration: list[Payload]
    held_out: list[Payload]
    labels: list[Any] | None  # the held-out rows' labels

    def digest(self) -> str:
        """Return a digest that changes with any row, any label, or the division."""
        digest = hashlib.sha256(json.dumps([len(self.calibration), self.labels]).encode())
        for payload in (*self.calibration, *self.held_out):
            digest.update(
                json.dumps(
                    [payload.content_type, payload.headers, payload.query, len(payload.body)]
                ).encode()
            )
            digest.update(payload.body)
        return digest.hexdigest()


def new_optimization(
    model: Path,
    options: OptimizeOptions,
    output: Path | None,
    time_limit: float,
    keep: Keep,
    *,
    quiet: bool,
) -> OptimizeRequest:
    """Return the request of a new run.

    Raises:
        UsageError: The output is wrong.
        CliError: The directory cannot be used.
    """
    return OptimizeRequest(
        model, options, new_directory("optimize", model, output), time_limit, keep, quiet=quiet
    )


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
        open_archive(
            request.model, cache=settings.archive_cache(), limits=settings.archive_limits()
        ) as archive,
        tempfile.TemporaryDirectory(
            prefix="tsx-optimize-", dir=temporary_directory()
        ) as temporary_path,
    ):
        if MANIFEST_KEY in archive.manifest.data:
            advice = "Set huggingface.dtype in model-config.yaml to bf16 or fp16 for a faster one"
            raise UsageError(
                f"{request.model} is a Hugging Face model, which tsx optimize builds no forms of:"
                f" transformers runs it. {advice}"
            )
        inputs = [Path(path) for path in options.inputs]
        if (
            not inputs
            and payloads_of_archive(
                inspect_archive(archive.source, limits=settings.archive_limits())
            )
            is None
        ):
            raise UsageError(
                "name typical inputs, since made-up ones prove nothing: tsx optimize"
                f" {request.model} --input DIR"
            )
        payloads, source = choose_payloads(
            archive.source, inputs, seed=options.seed, content_type=options.content_type
        )
        labels = None if options.labels is None else read_labels(Path(options.labels), payloads)
        rows = divide_rows(payloads, labels, options.seed, options.rows)
        names = None
        with suppress(ValueError):  # The file may have a format that only the user's handler reads.
            names = read_class_names(archive.directory / INDEX_TO_NAME)
        criteria = Criteria(options, rows.labels, names)
        deadline = time.monotonic() + request.time_limit
        with (
            Progress(deadline, quiet=request.quiet) as progress,
            OptimizeJournal(request.directory, new=past is None) as journal,
        ):
            progress.show_activity("examining this machine")
            results = _empty_results(request, archive, mix(payloads, plain(source)), rows)
            fingerprint = results.environment.fingerprint
            digest, inputs_digest = digest_of(archive), rows.digest()
            if past is None:
                request_options = asdict(options) | {"model": str(request.model.absolute())}
                journal.begin(
                    request_options,
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
                items_of(rows.calibration),
                criteria.sizes[-1],
                Path(temporary_path),
                (request.directory / FORMS_DIRECTORY).absolute(),
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
                _keep_forms(request, results, builder, digest, journal, settings)
    return results


def _empty_results(
    request: OptimizeRequest, archive: OpenArchive, inputs: Inputs, rows: Rows
) -> OptimizeResults:
    return OptimizeResults(
        started=now() if request.past is None else request.past.started,
        command=command_line(),
        model=model_info(request.model, archive),
        environment=environment(),
        inputs=inputs,
        calibration_rows=len(rows.calibration),
        held_out_rows=len(rows.held_out),
        limit="",
        batch_sizes=list(parse_numbers(request.options.batch_sizes, "--batch-sizes")),
        reference=FormResult(
            name=REFERENCE, label="the model as it is", state="passed", size_mib=_size_mib(archive)
        ),
    )


def divide_rows(
    payloads: Sequence[Payload],
    labels: Sequence[Any] | None,
    seed: int,
    max_rows: int | None = None,
) -> Rows:
    """Return a random quarter of the distinct payloads, and the others with their labels.

    Raises:
        UsageError: There are too few payloads.
    """
    pairs = zip(payloads, [None] * len(payloads) if labels is None else labels, strict=True)
    unique = list(
        {
            (payload.body, payload.content_type, payload.query): (payload, label)
            for payload, label in pairs
        }.values()
    )
    random.Random(seed).shuffle(unique)
    unique = unique[:max_rows]
    if len(unique) < MIN_ROWS:
        raise UsageError(
            f"--input: {len(unique)} different inputs are too few; give at least {MIN_ROWS}, or"
            " hundreds to show a loss of half a percent"
        )
    calibration_count = min(len(unique) // 4, MAX_CALIBRATION_ROWS)
    held_out = unique[calibration_count:]
    held_out_labels = None if labels is None else [label for _, label in held_out]
    return Rows(
        [payload for payload, _ in unique[:calibration_count]],
        [payload for payload, _ in held_out],
        held_out_labels,
    )


def device_of(option: str | None, archive: OpenArchive) -> str:
    """Return the device of --device; by default a GPU if there is one.

    Raises:
        UsageError: The device is unknown, or several are given.
    """
    if option is None:
        return "cuda" if gpu_count() and archive.config.device_type != "cpu" else "cpu"
    device, *further_devices = parse_words(option, DEVICES, "--device")
    if further_devices:
        raise UsageError(f"--device: '{option}' is more than one; forms are built for one device")
    if device == "cuda" and not gpu_count():
        raise UsageError(
            "--device cuda: no GPU is visible here (`nvidia-smi` shows what the driver sees); leave"
            " it out"
        )
    return device


def _keep_forms(
    request: OptimizeRequest,
    results: OptimizeResults,
    builder: FormBuilder,
    digest: str,
    journal: OptimizeJournal,
    settings: Settings,
) -> None:
    """Write the forms of --keep into the archive; `digest` is its digest at the start.

    Raises:
        CliError: The archive has changed, or the files of a form are missing.
        ArchiveError: The archive cannot be read.
    """
    chosen_forms = rank_forms(results.forms)[: 1 if request.keep is Keep.BEST else None]
    if not chosen_forms:
        if builder.archive.config.forms:
            results.notes.append(
                f"{request.model} still has the forms of an earlier run: tsx optimize"
                f" {request.model} --remove removes them"
            )
        return
    built_forms: list[BuiltForm] = []
    for form in chosen_forms:
        form_files = builder.find_built(form.name)
        if form_files is None:
            raise CliError(
                f"nothing was written into {request.model}: {request.directory / FORMS_DIRECTORY}"
                f" has no files of {form.name}; run tsx optimize again"
            )
        built_forms.append(
            form_files._replace(record=replace(form_files.record, measured=measured_of(form)))
        )
    results.notes.append(keep_forms(request.model, digest, built_forms, settings.archive_cache()))
    for form in chosen_forms:
        form.state = "kept"
    with open_archive(
        request.model, cache=settings.archive_cache(), limits=settings.archive_limits()
    ) as archive:
        journal.written(digest_of(archive))


def _size_mib(archive: OpenArchive) -> float | None:
    """Return the size of the serialized file in MiB."""
    file = archive.directory / (archive.manifest.serialized_file or "")
    return file.stat().st_size / (1 << 20) if file.is_file() else None
