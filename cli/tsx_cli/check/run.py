"""Checks an archive against a platform's contract, in a directory with the platform's layout."""

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
from tsx_cli.archive.packing import sample_files, silent
from tsx_cli.check import aws_lambda, container, sagemaker
from tsx_cli.check.report import Report
from tsx_cli.common.failure import FAILED, CliError
from tsx_cli.common.inputs import samples_in
from tsx_cli.common.options import archive_limits, read_pair, read_settings
from tsx_cli.deploy.spec_values import span
from tsx_runtime.core.registry.registry import open_model
from tsx_runtime.errors import TsxError
from tsx_runtime.shared.log_format import escaped

ContractCheck = Callable[
    [Report, Path, Sequence[ModelSample], Mapping[str, str], Path, float], None
]
CONTRACTS: Mapping[
    str, tuple[ContractCheck, float]
] = {  # and the seconds to start, or of an invocation, where nothing else is said
    "sagemaker": (sagemaker.check, 600.0),
    "container": (container.check, 600.0),
    "lambda": (aws_lambda.check, 60.0),
}


def check(
    archive: Path,
    contract: str,
    given: Sequence[Path],
    timeout: str | None,
    env: Sequence[str],
    *,
    as_json: bool,
) -> None:
    """Raises UsageError, CliError, ArchiveError; Exit with code 1 where something does not hold."""
    if archive.is_dir():
        raise CliError(
            f"{archive} is a directory; only a file can be deployed: pack it with tsx archive"
        )
    play, usual = CONTRACTS[contract]
    patience = usual if timeout is None else span(timeout, "--timeout")
    report = Report(contract, archive.name)
    with tempfile.TemporaryDirectory(
        prefix="tsx-check-", dir=temporary_directory(), ignore_cleanup_errors=True
    ) as directory:
        place = Path(directory)
        with open_archive(archive, cache=place / "unpacking", limits=archive_limits()) as opened:
            samples = [
                read_sample(path)
                for path in (
                    sample_files(given).values() if given else samples_in(opened.directory)
                )
            ]
        samples = samples or _made_up(archive)
        play(
            report,
            archive,
            samples,
            dict(read_pair(each, "--env takes NAME=VALUE") for each in env),
            place,
            patience,
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


def _made_up(archive: Path) -> list[ModelSample]:
    """Load the model and return the request that is known for it; empty where it does not load,
    which the check then shows.
    """

    async def ask() -> list[ModelSample]:
        async with open_model(archive, settings) as version:
            return await known_sample(version)

    settings, _ = read_settings(None, quiet=True)
    with silent(), suppress(TsxError):
        return asyncio.run(ask())
    return []
