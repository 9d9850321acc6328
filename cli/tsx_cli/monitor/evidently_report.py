"""A report on two recordings by Evidently, which the user has installed."""

from __future__ import annotations

import os
from pathlib import Path

from tsx_archiver.monitor.baseline import parse_baseline
from tsx_cli.common.failure import CliError
from tsx_cli.monitor.analysis import read_baseline
from tsx_cli.monitor.samples import recorded_samples
from tsx_runtime.features.monitor.statistics.columns import Extractor
from tsx_runtime.settings.schema import Settings


def write_report(
    model: Path, reference: str, source: str, target: Path, settings: Settings
) -> None:
    """Compare the columns of `source` with those of `reference`, both recordings, in HTML.

    Raises:
        CliError: Evidently is not installed, or the recordings cannot be read.
        ArchiveError: The archive or its baseline cannot be read.
    """
    os.environ.setdefault("DO_NOT_TRACK", "1")  # Evidently would send usage statistics.
    try:
        import pandas as pd
        from evidently import Report
        from evidently.presets import DataDriftPreset
    except ImportError as error:
        advice = "pip install evidently 'pandas<3'"
        raise CliError(f"--evidently cannot import Evidently ({error}): {advice}") from error
    _, config, file = read_baseline(model, settings)
    baseline = parse_baseline(file, f"the baseline in {model}")
    frames = []
    for address in (source, reference):
        extractor = Extractor(config, baseline.fields, centres=baseline.centres)
        samples = recorded_samples(address, settings.s3_endpoint_url)
        rows = [facts.columns for sample in samples for facts in extractor.rows(sample)]
        if not rows:
            raise CliError(f"{address} has no answered requests")
        frames.append(pd.DataFrame(rows))
    Report([DataDriftPreset()]).run(*frames).save_html(str(target))
