"""`--write` writes the winner's settings and the measurements into the archive, atomically."""

from __future__ import annotations

from pathlib import Path

from tsx_archiver import rewrite_archive
from tsx_archiver.metadata.forms import REFERENCE
from tsx_archiver.storage.atomic_file import partial_path
from tsx_cli.bench.load.results import Results
from tsx_cli.bench.report.archive_record import record_of
from tsx_cli.bench.search.variants import changes, config_name, config_text, with_keys
from tsx_cli.common.failure import CliError
from tsx_cli.common.options import open_cached
from tsx_runtime.core.models.benchmark_record import FILE, MAX_RECORD_BYTES
from tsx_runtime.settings.schema import Settings


def check_writable(path: Path, option: str = "--write", way_out: str = "leave --write out") -> None:
    """Check that an archive can be written, before minutes are spent on measurements.

    Raises:
        CliError: The archive cannot be written.
    """
    file = path.resolve() / FILE if path.is_dir() else path.resolve()
    try:
        partial = partial_path(file)
        partial.touch()
        partial.unlink()
        if file.exists():
            file.open("r+b").close()
    except OSError as error:
        raise CliError(
            f"{option}: {path} cannot be written ({error.strerror}); make it writable, or {way_out}"
        ) from error


def write(path: Path, results: Results, settings: Settings) -> str:
    """Write a run into an archive, and return a message about it.

    Raises:
        CliError: The run has no winner, or the archive has changed.
        ArchiveError: The archive cannot be read or written.
    """
    if results.winner is None:
        raise CliError(f"nothing was written into {path}: {results.why}")
    configuration = results.trials[results.winner].as_configuration()
    content = record_of(results).content()
    if len(content) > MAX_RECORD_BYTES:
        content = record_of(results, only_winner=True).content()
    with open_cached(path, settings) as archive:
        if archive.digest != results.model.sha256:
            raise CliError(
                f"nothing was written into {path}: it has changed since it was measured. Measure it"
                " again"
            )
        name = config_name(archive)
        keys = changes(configuration, archive.config.raw)
        # A latency target in the archive takes precedence over the measured batch size.
        if archive.config.slo is not None:
            keys |= {"slo": archive.config.slo, "batchSize": None}
        # The winner's form comes first; the others remain as alternatives.
        if keys.get("forms"):
            keys["forms"] += [
                form
                for form in archive.config.forms or ()
                if form not in (configuration.form, REFERENCE)
            ]
        config = with_keys(config_text(archive), keys).encode()
    rewrite_archive(
        path,
        {name: config, FILE: content},
        model={"configFile": name},
        limits=settings.archive_limits(),
    )
    return f"{path} now runs with {configuration}, and has what was measured in {FILE}"
