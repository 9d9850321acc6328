"""A run of `tsx check`, in a directory with the platform's layout."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import typer

from tsx_archiver import open_archive
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_cli.archive.check import ModelSample, known_sample, read_sample
from tsx_cli.archive.packing import quiet_workers, sample_files
from tsx_cli.check import aws_lambda, container, sagemaker
from tsx_cli.check.report import Report
from tsx_cli.common.failure import FAILED, CliError
from tsx_cli.common.inputs import samples_in
from tsx_cli.common.options import archive_limits, read_pair, read_settings
from tsx_cli.deploy.spec_values import span
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.errors import TsxError
from tsx_runtime.shared.log_format import escaped

ContractCheck = Callable[
    [Report, Path, Sequence[ModelSample], Mapping[str, str], Path, float], None
]
# The checks, and their defaults of --timeout in seconds.
CONTRACTS: Mapping[str, tuple[ContractCheck, float]] = {
    "sagemaker": (sagemaker.check, 600.0),
    "container": (container.check, 600.0),
    "lambda": (aws_lambda.check, 60.0),
}


def check(
    archive: Path,
    contract: str,
    sample_paths: Sequence[Path],
    timeout: str | None,
    env: Sequence[str],
    *,
    as_json: bool,
) -> None:
    """Check an archive against a platform's contract, and print the report.

    Raises:
        UsageError: An option has a wrong value.
        CliError: A requirement is not met, or the archive is a directory.
        ArchiveError: The archive cannot be read.
        typer.Exit: A requirement is not met, with `as_json`; the code is 1.
    """
    if archive.is_dir():
        raise CliError(
            f"{archive} is a directory; only a file can be deployed: pack it with tsx archive"
        )
    check_contract, default_s = CONTRACTS[contract]
    timeout_s = default_s if timeout is None else span(timeout, "--timeout")
    report = Report(contract, archive.name)
    with tempfile.TemporaryDirectory(
        prefix="tsx-check-", dir=temporary_directory(), ignore_cleanup_errors=True
    ) as temporary_path:
        directory = Path(temporary_path)
        with open_archive(
            archive, cache=directory / "unpacking", limits=archive_limits()
        ) as opened_archive:
            samples = [
                read_sample(path)
                for path in (
                    sample_files(sample_paths).values()
                    if sample_paths
                    else samples_in(opened_archive.directory)
                )
            ]
        samples = samples or _example_samples(archive)
        check_contract(
            report,
            archive,
            samples,
            dict(read_pair(pair, "--env takes NAME=VALUE") for pair in env),
            directory,
            timeout_s,
        )
    report.show(as_json=as_json)
    if report.failed:
        if as_json:
            raise typer.Exit(FAILED)
        for line in report.log:
            print(f"| {escaped(line)}")
        count = len(report.failed)
        raise CliError(
            f"{report.model} does not meet {count} requirement{'' if count == 1 else 's'} of"
            f" {contract}'s contract"
        )


def _example_samples(archive: Path) -> list[ModelSample]:
    """Load the model, and return its example request.

    The list is empty if the model does not load; the check itself reports that.
    """

    async def load_sample() -> list[ModelSample]:
        async with open_model(archive, settings) as version:
            return await known_sample(version)

    settings, _ = read_settings(None, quiet=True)
    with quiet_workers(), suppress(TsxError):
        return asyncio.run(load_sample())
    return []
