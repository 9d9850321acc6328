"""A server under load and under attack answers each request exactly once.

The clients of other models notice nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import clients, stop, surroundings, workers
from benchmarks.chaos.trial import SHORT, Scenario, run_in_turn
from tests.support import forked

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="the faults, and the looks from outside, are Linux's"
    )
]

SCENARIOS = [*workers.SCENARIOS, *clients.SCENARIOS, *surroundings.SCENARIOS, *stop.SCENARIOS]


def kind(scenario: Scenario) -> str:
    """Run the scenarios of one kind in turn on one server."""
    alone = (
        scenario.needs_own_server
        or scenario.output
        or scenario.custom_trial
        or scenario.unavailable_reason()
    )
    return repr([scenario.victim, scenario.settings, scenario.name if alone else ""])


TURNS = [list(group) for _, group in itertools.groupby(sorted(SCENARIOS, key=kind), key=kind)]


@pytest.fixture(autouse=True)
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.chaos.server.subprocess", forked.SUBPROCESS)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "scenarios", TURNS, ids=[", ".join(scenario.name for scenario in group) for group in TURNS]
)
def test_nothing_is_lost_when(scenarios: list[Scenario], tmp_path: Path) -> None:
    if reason := scenarios[0].unavailable_reason():
        pytest.skip(reason)
    reports = asyncio.run(run_in_turn(scenarios, SHORT, tmp_path))
    assert {report.scenario: report.problems for report in reports if report.problems} == {}
    assert [report.scenario for report in reports] == [scenario.name for scenario in scenarios]
    assert all(sent for report in reports for sent in report.sent.values())
