"""The steps of `tsx archive FILE`: detect, pack, check; each prints its result."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from mimetypes import guess_extension
from pathlib import Path
from typing import TYPE_CHECKING

from tsx_archiver import ArchiveSpec, Format, write_archive
from tsx_archiver.inspecting import manifest_of
from tsx_archiver.limits import human
from tsx_archiver.packing import check_config
from tsx_archiver.progress import progress_bar
from tsx_archiver.python_file import MANIFEST_KEY as PYTHON_KEY
from tsx_archiver.writing import SUFFIXES, output_path
from tsx_cli.archive.huggingface import HuggingFaceOptions, huggingface_spec
from tsx_cli.archive.importing import check_code
from tsx_cli.archive.mlflow import is_uri, mlflow_spec
from tsx_cli.archive.model_file import HandlerFiles, infer_spec
from tsx_cli.archive.python_files.spec import python_file_spec
from tsx_cli.archive.source import SourceKind
from tsx_cli.archive.trust import NO_TRUST, TrustOptions
from tsx_cli.common.failure import FAILED, CliError, UsageError
from tsx_cli.common.inputs import SAMPLES
from tsx_cli.common.options import read_settings

if TYPE_CHECKING:
    from tsx_cli.archive.check import CheckResult, ModelSample

NOTHING_SENT = 3  # exit code for a model that loads, but has no sample to send


@dataclass(frozen=True)
class PackingOptions:
    """The packing options of the command line."""

    parts: HandlerFiles
    name: str | None
    version: str | None
    requirements_file: Path | None
    config_file: Path | None
    export_path: Path
    format: Format
    force: bool
    samples: Sequence[Path]
    test_import: bool = True
    try_model: bool = True
    tracking_uri: str | None = None  # address of MLflow's server
    huggingface: HuggingFaceOptions = field(default_factory=HuggingFaceOptions)
    trust: TrustOptions = NO_TRUST

    def given_packing_options(self) -> str:
        """Return the names of the given options that an existing archive cannot take."""
        options = {
            "--name": self.name,
            "--version": self.version,
            "--handler": self.parts.handler,
            "--model-file": self.parts.model_file,
            "--extra-files": self.parts.extra_files,
            "--requirements-file": self.requirements_file,
            "--config-file": self.config_file,
            "--task": self.huggingface.task,
            "--adapter": self.huggingface.adapters,
        }
        return ", ".join(name for name, value in options.items() if value)


@dataclass(frozen=True)
class Packed:
    """The result of packing one file."""

    archive: str
    name: str | None = None
    version: str | None = None
    handler: str | None = None
    size: int | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    request: str | None = None  # shell command that tries the model
    check: CheckResult | None = None

    @property
    def exit_code(self) -> int:
        if self.check is None:
            return 0
        return FAILED if self.check.findings else 0 if self.check.samples else NOTHING_SENT


def pack(path: Path | None, kind: SourceKind, options: PackingOptions, *, quiet: bool) -> Packed:
    """Write an archive.

    Raises:
        CliError: An option is invalid, or the model does not load.
        ArchiveError: The model cannot be packed.
    """
    if options.tracking_uri is not None and (path is None or not is_uri(path)):
        raise UsageError(
            "--tracking-uri is the server of models:/NAME/VERSION and runs:/ID/PATH; remove it for"
            " a file or a directory"
        )
    if path is not None and kind == "Hugging Face":
        spec, notes = huggingface_spec(
            path,
            options.huggingface,
            options.name,
            options.version,
            options.parts.handler,
            quiet=quiet,
        )
        spec = replace(
            spec, extra_files=options.parts.extra_files, model_file=options.parts.model_file
        )
        return _pack(spec, notes, options, quiet=quiet)
    if options.huggingface.packing_options:
        raise UsageError(
            f"{options.huggingface.packing_options}: only a Hugging Face model takes that, and"
            f" {path} is none; remove it"
        )
    if path is not None and kind == "Python":
        if options.parts.handler or options.parts.model_file:
            raise UsageError(
                f"{path} is served by its own classes or functions; remove --handler and"
                " --model-file"
            )
        with python_file_spec(
            path, options.name, options.version, options.parts.extra_files, options.config_file
        ) as (spec, notes):
            return _pack(spec, notes, replace(options, config_file=None), quiet=quiet)
    if path is None or kind != "MLflow":
        spec, notes = infer_spec(
            path,
            options.parts,
            name=options.name,
            version=options.version,
            config_file=options.config_file,
        )
        return _pack(spec, notes, options, quiet=quiet)
    includes_requirements = options.requirements_file is None
    with mlflow_spec(
        path,
        options.name,
        options.version,
        options.parts.handler,
        options.tracking_uri,
        requirements=includes_requirements,
    ) as (spec, notes):
        spec = replace(
            spec,
            extra_files=[*(spec.extra_files or ()), *options.parts.extra_files],
            model_file=options.parts.model_file,
        )
        return _pack(spec, notes, options, quiet=quiet)


def _pack(spec: ArchiveSpec, notes: list[str], options: PackingOptions, *, quiet: bool) -> Packed:
    samples = {
        f"{SAMPLES}/{name}": file.read_bytes()
        for name, file in sample_files(options.samples).items()
    }
    spec = replace(
        spec,
        requirements_file=options.requirements_file or spec.requirements_file,
        config_file=options.config_file or spec.config_file,
        contents=samples or spec.contents,
    )
    target = output_path(spec.model_name, options.export_path, options.format)
    if os.path.exists(target) and not options.force:  # noqa: PTH110  # Path.exists raises for a long name.
        alternative = target.with_name(
            f"{spec.model_name}-{spec.version}{SUFFIXES[options.format]}"
        )
        raise CliError(
            f"{target} already exists. Overwrite it with --force, or write another archive: -o"
            f" {shlex.quote(str(alternative))}"
        )
    # Misspelt keys are refused here, while the author can still correct them.
    if spec.config_file:
        check_config(Path(spec.config_file))
    _print_lines(notes, quiet)
    import_notes = check_code(spec, test_import=options.test_import)
    _print_lines(import_notes, quiet)
    notes += import_notes
    # Models of Hugging Face and MLflow are not tried here.
    should_try = options.try_model and not spec.extra_manifest.keys() - {PYTHON_KEY}
    # A note means that the code cannot be imported here, so the model cannot be loaded either.
    if any(text.startswith("note: ") for text in import_notes):
        should_try = False
    command, trial_notes, generated = _try_model(spec) if should_try else (None, [], None)
    if generated is not None and PYTHON_KEY in spec.extra_manifest:
        # Other commands, such as `tsx bench`, read only the archive.
        suffix = guess_extension(generated.content_type.partition(";")[0]) or ""
        spec = replace(spec, contents={f"{SAMPLES}/example{suffix}": generated.body})
    _print_lines(trial_notes, quiet)
    notes += trial_notes
    warnings: list[str] = []
    with progress_bar(
        f"Packing {spec.model_name}", shown=not quiet and sys.stderr.isatty()
    ) as progress:
        archive = write_archive(
            spec,
            options.export_path,
            format=options.format,
            force=options.force,
            progress=progress,
            warn=warnings.append,
        )
    for warning in warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    bytes_written = (
        archive.stat().st_size
        if archive.is_file()
        else sum(file.stat().st_size for file in archive.rglob("*") if file.is_file())
    )
    _print_lines([f"wrote {archive} ({human(bytes_written)})"], quiet)
    _print_lines([f"try it: tsx serve {shlex.quote(str(archive))}"], quiet)
    if command is not None:
        _print_lines([f"  in another terminal: {command}"], quiet)
    return Packed(
        str(archive),
        spec.model_name,
        spec.version,
        spec.handler,
        bytes_written,
        notes,
        warnings,
        command,
    )


def _try_model(spec: ArchiveSpec) -> tuple[str | None, list[str], ModelSample | None]:
    """Load the model and send it a request.

    Returns:
        A working shell command, notes, and a generated request that the model has answered.
    """
    # These modules are slow to import.
    from tsx_cli.archive.example import request_line, try_model
    from tsx_runtime.errors import SettingError

    settings, _ = read_settings(None, quiet=True)
    with quiet_workers():
        trial = try_model(spec, settings)
    try:
        command = (
            None
            if trial.example is None
            else request_line(spec.model_name, trial.example, settings)
        )
    except (SettingError, OSError):  # `tsx serve` reports an unusable certificate.
        command = None
    return command, list(trial.notes), trial.generated


@contextmanager
def quiet_workers() -> Iterator[None]:
    """Suppress the log, and redirect a worker's output to stderr.

    The log is not needed: the exception of a worker describes the failure too.
    """
    logger = logging.getLogger("tsx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
        logger.setLevel(level)


def check(
    packed: Packed,
    samples: Sequence[Path],
    tolerance: float,
    *,
    trust: TrustOptions = NO_TRUST,
    quiet: bool,
) -> Packed:
    """Check an archive with the given samples, or with its own.

    Raises:
        ArchiveError: The archive cannot be opened.
        TsxError: The model does not load.
    """
    from tsx_cli.archive.check import check_archive  # a slow import

    settings, _ = read_settings(None)
    if any(trust):
        settings = trust.apply(settings, [manifest_of(Path(packed.archive)).model_name])
    with quiet_workers():
        result = check_archive(
            Path(packed.archive), list(sample_files(samples).values()), settings, tolerance
        )
    _print_lines(check_lines(result), quiet)
    return replace(packed, name=result.model, version=result.version, check=result)


def check_lines(result: CheckResult) -> list[str]:
    lines = [f"check: {result.model} {result.version} loaded in {result.load_seconds:.1f} s"]
    lines += [f"check: it runs as the form {result.form}"] if result.form else []
    lines += [f"check: form not used: {reason}" for reason in result.forms_passed_over]
    if not result.samples:
        return [
            *lines,
            "check: there is no sample to send; give one with tsx archive --sample FILE",
        ]
    sizes = ", ".join(map(str, result.batch_sizes))
    if result.findings:
        return [*lines, *(f"check: FAILED {finding}" for finding in result.findings)]
    count = len(result.samples)
    return [
        *lines,
        (
            f"check: {count} sample{'' if count == 1 else 's'} got the same answers in batches of"
            f" {sizes}"
        ),
    ]


def sample_files(paths: Sequence[Path]) -> dict[str, Path]:
    """Return sample files by name; a directory stands for its files.

    Raises:
        UsageError: A sample is missing, or two have the same name.
    """
    samples: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no sample '{path}'")
        files = (
            sorted(
                file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
            )
            if path.is_dir()
            else [path]
        )
        for file in files:
            if file.name in samples:
                raise UsageError(
                    f"two samples are called '{file.name}': {samples[file.name]} and {file};"
                    " rename one"
                )
            samples[file.name] = file
    return samples


def _print_lines(lines: Sequence[str], quiet: bool) -> None:
    if lines and not quiet:
        print("\n".join(lines), flush=True)
