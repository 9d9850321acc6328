"""The analysis of recorded requests against a baseline, without a server."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tsx_archiver.monitor.baseline import MEMBER, parse_baseline
from tsx_archiver.monitor.config import MonitorConfig
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_cli.archive.source import require_archive
from tsx_cli.common.failure import CliError
from tsx_cli.common.options import open_cached
from tsx_cli.monitor.samples import recorded_samples
from tsx_runtime.features.monitor.process.monitor import Monitor
from tsx_runtime.features.monitor.process.operations import Operations
from tsx_runtime.features.monitor.process.store import MonitorStore
from tsx_runtime.settings.schema import Settings

FLUSH_SAMPLES = 10  # 10,000 rows may wait, and a request has 1,000 at most.


def analyze_recordings(model: Path, source: str, settings: Settings) -> dict[str, Any]:
    """Return the report, in the form of `MonitorReport`, on recorded requests.

    Raises:
        CliError: There is no baseline, or the recordings cannot be read.
        ArchiveError: The archive or the baseline cannot be read.
    """
    name, config, baseline = read_baseline(model, settings)
    parse_baseline(baseline, f"the baseline in {model}")
    with TemporaryDirectory(dir=temporary_directory()) as directory:
        monitor = Monitor(MonitorStore(f"{directory}/monitor.sqlite", math.inf), "analysis")
        with closing(monitor):
            for number, sample in enumerate(recorded_samples(source, settings.s3_endpoint_url)):
                version = sample.version or "unknown"
                if version not in monitor.versions_of(name):
                    head = {"model": name, "version": version, "registered": sample.at}
                    monitor.set_version(head | {"config": config}, baseline)
                monitor.add_sample(sample._replace(model=name, version=version))
                if number % FLUSH_SAMPLES == 0:
                    monitor.flush()
            monitor.work(math.inf)
            report = Operations(monitor).report(b"", name).model_dump(mode="json")
    if not report["versions"]:
        raise CliError(f"{source} has no requests; record some: tsx models record {name}")
    return report


def read_baseline(model: Path, settings: Settings) -> tuple[str, MonitorConfig, bytes]:
    """Return a model's name, the configuration of its monitoring, and its baseline's file."""
    default = MonitorConfig.model_validate({})
    if model.suffix == ".json":
        return model.stem, default, model.read_bytes()
    require_archive(model)
    with open_cached(model, settings) as archive:
        member = archive.directory / MEMBER
        if not member.is_file():
            raise CliError(f"{model} has no baseline; `tsx monitor baseline {model}` makes it")
        config = archive.config.monitor or default
        return archive.manifest.model_name, config, member.read_bytes()
