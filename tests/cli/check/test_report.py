"""The report of `tsx check`: the advice for a failed check."""

from __future__ import annotations

import time

import pytest

from tsx_cli.bench.search.machine import MachineCounters, read_counters
from tsx_cli.check.report import Report


def busy_counters() -> MachineCounters:
    """Return counters as if all processes had used their time since now."""
    return read_counters()._replace(processes={})


def idle_counters() -> MachineCounters:
    """Return counters as if processes had used little time for long."""
    return read_counters()._replace(at=time.monotonic() - 1e9)


def test_a_missed_time_limit_on_a_busy_machine_advises_to_repeat() -> None:
    report = Report("sagemaker", "m.mar", before=busy_counters())
    assert not report.within("/ping", 2.02, 2.0, "load the model in initialize")
    assert not report.add(
        "a sample", False, "nothing after 2 s", "an answer", "be faster", timed=True
    )
    advice = ("load the model in initialize", "be faster")
    for check, text in zip(report.checks, advice, strict=True):
        assert check.way.startswith("the machine was busy, so run the check again")
        assert "other processes used" in check.way
        assert check.way.endswith(f". If it still fails: {text}")


@pytest.mark.parametrize(
    ("counters", "timed"),
    [(idle_counters(), True), (busy_counters(), False)],
    ids=["idle", "untimed"],
)
def test_a_failure_on_an_idle_machine_has_its_own_advice(
    counters: MachineCounters, timed: bool
) -> None:
    report = Report("sagemaker", "m.mar", before=counters)
    report.add("/ping", False, "404", "200", "see its log", timed=timed)
    assert [check.way for check in report.checks] == ["see its log"]
