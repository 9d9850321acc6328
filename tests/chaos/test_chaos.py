"""Whatever is done to a server under load: each request is answered exactly once, and other models' clients see nothing of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import clients, stop, surroundings, workers
from benchmarks.chaos.trial import SHORT, Scenario, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the faults, and the looks from outside, are Linux's"),
    pytest.mark.usefixtures("uncounted"),
]

SCENARIOS = [*workers.SCENARIOS, *clients.SCENARIOS, *surroundings.SCENARIOS, *stop.SCENARIOS]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_nothing_is_lost_when(scenario: Scenario, tmp_path: Path) -> None:
    if reason := scenario.why_not():
        pytest.skip(reason)
    report = asyncio.run(run(scenario, SHORT, tmp_path))
    assert report.problems == []
    assert all(report.sent.values())
