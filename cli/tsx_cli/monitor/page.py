"""The report on a monitored model as an HTML page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from tsx_cli.bench.report.render import report_templates
from tsx_cli.common.output import number
from tsx_cli.monitor.tables import clock, moved_first, percent
from tsx_runtime.features.monitor.report import ColumnHistogram, MonitorReport
from tsx_runtime.version import __version__

NUMBER_BINS = 20


def render_page(content: dict[str, Any], **parts: Any) -> str:
    """Return the page of a `MonitorReport`; `parts` are the other values that it shows."""
    report = MonitorReport.model_validate(content)
    templates = report_templates(Path(__file__).parent)
    for function in (clock, even_bins, moved_first, number, percent):
        templates.filters[function.__name__] = function
    page = templates.get_template("report.html")
    return page.render(report=report, made=time.time(), tsx_version=__version__, **parts)


def even_bins(histogram: ColumnHistogram) -> ColumnHistogram:
    """Return the histogram of a number in bins of equal width; shares are spread evenly in a bin.

    The first and the last bin are those below and above all values of the baseline.
    """
    edges = histogram.edges or [0.0]
    steps = np.linspace(edges[0], edges[-1], NUMBER_BINS + 1)
    baseline, live = (
        [shares[0], *np.diff(np.interp(steps, edges, np.cumsum(shares[:-1]))), shares[-1]]
        for shares in (histogram.baseline, histogram.live)
    )
    return ColumnHistogram(edges=steps.tolist(), baseline=baseline, live=live)
