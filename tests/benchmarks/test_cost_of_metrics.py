"""The cost of metrics: a server that can switch them off, and the effect of alternating runs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks import servers, turns
from benchmarks.cost_of_metrics import MODELS, CostPair, parse_loads, row, serving, stored_requests

PATH = "/predictions/ok"


@pytest.mark.skipif(sys.platform != "linux", reason="workers come of a fork server")
def test_a_signal_switches_counting_off_and_on(tmp_path: Path) -> None:
    with serving(tmp_path / "server", MODELS / "ok.py") as server:
        assert str(tmp_path) not in os.environ.get("PYTHONPATH", ""), (
            "a server that starts beside it would listen as well"
        )
        assert servers.first_answer(server, PATH, b"x") == b"OK"
        count_before = stored_requests(server)
        assert count_before > 0
        switch = turns.Switch(server.process.pid)
        switch.to(signal.SIGUSR2)
        assert [server.call(PATH, b"x") for _ in range(3)] == [b"OK"] * 3
        assert stored_requests(server) == count_before
        switch.to(signal.SIGUSR1)
        assert server.call(PATH, b"x") == b"OK"
        assert stored_requests(server) == count_before + 1


def test_the_cost_of_counting_is_the_median_of_the_blocks() -> None:
    without_metrics = [turns.Cost(1 / rate, 10e-6, 5e-6) for rate in (1000, 2000, 4000)]
    with_metrics = [turns.Cost(1.02 / rate, 10.3e-6, 5e-6) for rate in (1000, 2000, 4000)]
    line, time_effect, cpu_effect = row("ok, 16", [CostPair(with_metrics, without_metrics)] * 2)
    assert (
        line
        == "| ok, 16 | 1,961 | 2,000 | 10.30 + 5.00 | 10.00 + 5.00 | +2.0 % (+2.0 to +2.0) | +2.0 % (+2.0 to +2.0) |"
    )
    assert (time_effect.verdict(3), cpu_effect.verdict(1)) == ("under 3 %", "over 1 %")


def test_an_interval_around_the_limit_decides_nothing() -> None:
    effect = turns.effect([[1.0, 1.01, 1.02], [1.04, 1.05, 1.06]])
    assert effect.low < 3 < effect.high
    assert effect.verdict(3) == "not decided: 3 % is within the interval"
    assert turns.effect([[1.01] * 5] * 3) == turns.effect([[1.01]])


def test_loads_are_parsed_by_handler_and_connections() -> None:
    assert parse_loads("ok:1,ok:16,mlp:16") == {"ok": [1, 16], "mlp": [16]}
