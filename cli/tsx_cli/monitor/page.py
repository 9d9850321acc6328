"""The report on a monitored model as an HTML page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tsx_cli.bench.report.render import report_templates
from tsx_cli.common.output import number
from tsx_cli.monitor.tables import clock, moved_first, percent
from tsx_runtime.version import __version__

NUMBER_BINS = 20


def render_page(report: Mapping[str, Any], **parts: Any) -> str:
    """Return the page of a report in the form of `MonitorReport`.

    Args:
        report: The report.
        **parts: `source`, `facts`, `contests` and `worst` of `report.html`.
    """
    templates = report_templates(Path(__file__).parent)
    for function in (clock, even_bins, moved_first, number, percent):
        templates.filters[function.__name__] = function
    page = templates.get_template("report.html")
    return page.render(report=report, made=time.time(), tsx_version=__version__, **parts)


def even_bins(histogram: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return bins of equal width with the shares of the baseline and of the last window.

    The first and the last bin are those below and above all values of the baseline.
    """
    edges = histogram["edges"]
    width = (edges[-1] - edges[0]) / NUMBER_BINS
    steps = [edges[0] + step * width for step in range(NUMBER_BINS + 1)]
    shares = (_even_shares(edges, histogram[name], steps) for name in ("baseline", "live"))
    bounds = pairwise([None, *steps, None])
    return [
        {"low": low, "high": high, "baseline": baseline, "live": live}
        for (low, high), baseline, live in zip(bounds, *shares, strict=True)
    ]


def _even_shares(
    edges: Sequence[float], shares: Sequence[float], steps: Sequence[float]
) -> list[float]:
    """Return the shares below, between and above the steps; values of a bin are spread evenly."""
    bins = [*zip(pairwise(edges), shares[1:], strict=False)]
    inner = (
        sum(
            share * max(0.0, min(high, end) - max(low, start)) / (end - start)
            for (start, end), share in bins
        )
        for low, high in pairwise(steps)
    )
    return [shares[0], *inner, shares[-1]]
