"""The actions of `tsx archive` and its commands, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from tsx_archiver import (
    CacheError,
    Inspection,
    Manifest,
    default_model_name,
    inspect_archive,
    open_archive,
    read_member,
    verify_archive,
)
from tsx_archiver.limits import human
from tsx_archiver.metadata.huggingface import MANIFEST_KEY as HUGGINGFACE_KEY
from tsx_archiver.metadata.mlmodel import MANIFEST_KEY
from tsx_archiver.storage.cache import Cache
from tsx_cli.archive import huggingface, mlflow
from tsx_cli.archive.model_file import kind_of_directory, kind_text
from tsx_cli.archive.packing import NOTHING_SENT, Packed, PackingOptions, check, pack
from tsx_cli.archive.python_files.models import default_name, one_model_each
from tsx_cli.archive.source import SourceKind, classify
from tsx_cli.common.failure import FAILED, CliError, UsageError
from tsx_cli.common.options import archive_limits
from tsx_cli.common.output import print_json, print_table
from tsx_runtime.core.models.benchmark_record import FILE as BENCHMARK_FILE
from tsx_runtime.core.models.benchmark_record import MAX_RECORD_BYTES, parse_benchmark_record
from tsx_runtime.shared.log_format import escaped

_DEFAULT_NAMES = {
    "Hugging Face": huggingface.default_name,
    "MLflow": mlflow.default_name,
    "Python": default_name,
}


def pack_files(
    files: Sequence[Path],
    options: PackingOptions,
    should_check: bool,
    tolerance: float,
    as_json: bool,
) -> None:
    """Pack or check each file, or the model of the options if there are no files."""
    if any(options.trust) and not should_check:
        raise UsageError(
            "--trust-remote-code and --trust-pickle are for --check, which loads the model; who"
            " serves the archive decides again"
        )
    classified = [(path, classify(path)) for path in files]
    kinds: list[tuple[Path, SourceKind]] = [
        (model, kind)
        for path, kind in classified
        for model in (one_model_each(path) if kind == "Python" else [path])
    ]
    _check_names(kinds, options.name)
    results = [
        _pack_or_check(path, kind, options, should_check, tolerance, quiet=as_json)
        for path, kind in kinds
    ]
    results = results or [
        _pack_or_check(None, "file", options, should_check, tolerance, quiet=as_json)
    ]
    if as_json:
        print_json([asdict(result) for result in results])
    if codes := {result.exit_code for result in results} - {0}:
        raise typer.Exit(FAILED if FAILED in codes else NOTHING_SENT)


def _check_names(kinds: Sequence[tuple[Path, SourceKind]], name: str | None) -> None:
    """Refuse two files that would become one archive."""
    if name is not None and len(kinds) > 1:
        raise UsageError(
            f"--name {name} can name only one archive, but {len(kinds)} models are given"
        )
    paths_by_name: dict[str, Path] = {}
    for path, kind in kinds:
        if kind not in ("archive", "directory"):
            archive_name = _DEFAULT_NAMES.get(kind, default_model_name)(path)
            first_path = paths_by_name.setdefault(archive_name, path)
            if first_path is not path:
                raise UsageError(
                    f"'{first_path}' and '{path}' would both be named {archive_name}; pack them"
                    " one by one with --name"
                )


def _pack_or_check(
    path: Path | None,
    kind: SourceKind,
    options: PackingOptions,
    should_check: bool,
    tolerance: float,
    *,
    quiet: bool,
) -> Packed:
    """Pack a file of the command line, check it, or both."""
    if path is not None and kind in ("archive", "directory"):
        if not should_check and kind == "directory":
            text = (
                f"'{path}' has neither the config.json of Hugging Face's save_pretrained nor the"
                " MLmodel of MLflow, so it cannot be packed"
            )
            raise UsageError(
                f"{text}; save the model there again, or name its file: tsx archive FILE"
            )
        if not should_check and path.exists():
            raise UsageError(
                f"'{path}' is already an archive; `tsx archive inspect {path}` shows it, --check"
                " tests it"
            )
        if options.given_packing_options():
            raise UsageError(
                f"'{path}' is already an archive and is only checked; remove"
                f" {options.given_packing_options()}"
            )
        return check(
            Packed(str(path)),
            options.samples,
            tolerance,
            trust=options.trust,
            quiet=quiet,
        )
    packed = pack(path, kind, options, quiet=quiet)
    return (
        check(
            packed,
            [],
            tolerance,
            trust=options.trust,
            quiet=quiet,
        )
        if should_check
        else packed
    )


def inspect(file: Path, as_json: bool) -> None:
    """Print the content of an archive."""
    limits = archive_limits(quiet=False)
    inspection = inspect_archive(file, limits=limits)
    content = read_member(file, BENCHMARK_FILE, most=MAX_RECORD_BYTES, limits=limits)
    measured = None if content is None else parse_benchmark_record(content)
    if as_json:
        print_json(
            _json_object(inspection)
            | {"measured": None if measured is None else measured._asdict()}
        )
        return
    manifest = inspection.manifest
    facts = [
        ("name", manifest.model_name),
        ("version", manifest.version),
        ("kind", kind_text(inspection.model) if inspection.model else kind_of_directory(manifest)),
        ("handler", manifest.handler or "none named"),
        ("mlflow", manifest.data.get(MANIFEST_KEY)),
        *(
            (key, _value_text(value))
            for key, value in (manifest.data.get(HUGGINGFACE_KEY) or {}).items()
        ),
        ("model file", manifest.model_file),
        ("requirements", manifest.requirements_file),
        ("form", f"{inspection.form}, {human(inspection.size)}"),
        ("forms of the model", ", ".join(form.name for form in inspection.forms.forms) or None),
    ]
    facts += [(key, value) for key, value in inspection.config.raw.items()]
    print_table(["archive", str(file)], [(key, value) for key, value in facts if value is not None])
    print_table(
        ["member", "size", "sha-256"],
        [
            (member.name, human(member.size), (member.sha256 or "")[:16])
            for member in inspection.members
        ],
    )
    if measured is not None:
        print(escaped(str(measured)))
    for problem in inspection.problems:
        print(f"note: {escaped(str(problem))}")


def _value_text(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def verify(file: Path, as_json: bool) -> None:
    """Print the problems that a verification finds.

    Raises:
        CliError: The archive has faults.
    """
    findings = verify_archive(file, archive_limits(quiet=False))
    faults = [finding for finding in findings if finding.is_fault]
    if as_json:
        print_json(
            {
                "archive": str(file),
                "intact": not faults,
                "findings": [finding._asdict() for finding in findings],
            }
        )
    else:
        for finding in findings:
            print(f"{'FAULT' if finding.is_fault else 'note'}: {escaped(finding.text)}")
        if not faults:
            print(f"{file} is intact")
    if faults:
        raise CliError(
            f"{file} is damaged or incomplete:"
            f" {'one fault' if len(faults) == 1 else f'{len(faults)} faults'}"
        )


def unpack(file: Path, directory: Path | None, as_json: bool) -> None:
    """Unpack an archive into a new directory."""
    if file.is_dir():
        raise UsageError(f"'{file}' is a directory, so it is already unpacked")
    if directory is not None and directory.exists():
        raise CliError(f"'{directory}' already exists; name a new directory")
    parent = Path() if directory is None else directory.absolute().parent
    # The temporary directory is renamed, so it must be on the file system of the new directory.
    while not parent.exists():
        parent = parent.parent
    try:
        target, manifest = _unpack(file, directory, parent)
    except (CacheError, OSError) as error:
        reason = error.reason if isinstance(error, CacheError) else error.strerror
        raise CliError(
            f"{file} cannot be unpacked into '{parent}': {reason}; free some disk space there, or"
            " name another directory"
        ) from error
    if as_json:
        print_json(
            {
                "archive": str(file),
                "directory": str(target),
                "name": manifest.model_name,
                "version": manifest.version,
            }
        )
    else:
        print(f"unpacked {file} into {target}")


def _unpack(file: Path, directory: Path | None, parent: Path) -> tuple[Path, Manifest]:
    """Unpack into a temporary directory and rename it, so that no partial directory remains."""
    with (
        TemporaryDirectory(prefix=".tsx-unpack-", dir=parent) as directory_name,
        open_archive(
            file,
            cache=Cache(Path(directory_name), require_private=False),
            limits=archive_limits(quiet=False),
        ) as archive,
    ):
        target = directory or Path(archive.manifest.model_name)
        if target.exists():
            raise CliError(
                f"'{target}' already exists; give another directory with `tsx archive unpack {file}"
                " -o DIRECTORY`"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        archive.directory.rename(target)
        return target, archive.manifest


def _json_object(inspection: Inspection) -> dict[str, object]:
    return {
        "archive": str(inspection.source),
        "form": inspection.form,
        "size": inspection.size,
        "name": inspection.manifest.model_name,
        "version": inspection.manifest.version,
        "kind": inspection.model.kind if inspection.model else None,
        "manifest": inspection.manifest.data,
        "config": inspection.config.raw,
        "members": [member._asdict() for member in inspection.members],
        "forms": [asdict(form) for form in inspection.forms.forms],
        "problems": inspection.problems,
    }
