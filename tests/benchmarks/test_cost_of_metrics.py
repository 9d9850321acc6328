"""The cost of metrics: servers with and without them, and the effect of their turns."""

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
def test_a_server_counts_or_not_as_it_is_reported(tmp_path: Path) -> None:
    with serving(tmp_path / "server", MODELS / "ok.py") as server:
        assert str(tmp_path) not in os.environ.get("PYTHONPATH", ""), (
            "a server that starts beside it would listen as well"
        )
        assert servers.first_answer(server, PATH, b"x") == b"OK"
        before = stored_requests(server)
        assert before > 0
        switch = turns.Switch(server.process.pid)
        switch.to(signal.SIGUSR2)
        assert [server.call(PATH, b"x") for _ in range(3)] == [b"OK"] * 3
        assert stored_requests(server) == before
        switch.to(signal.SIGUSR1)
        assert server.call(PATH, b"x") == b"OK"
        assert stored_requests(server) == before + 1


def test_the_cost_of_counting_is_the_median_of_the_blocks() -> None:
    blind = [turns.Cost(1 / rate, 10e-6, 5e-6) for rate in (1000, 2000, 4000)]
    seeing = [turns.Cost(1.02 / rate, 10.3e-6, 5e-6) for rate in (1000, 2000, 4000)]
    line, of_time, of_processor = row("ok, 16", [CostPair(seeing, blind)] * 2)
    assert (
        line
        == "| ok, 16 | 1,961 | 2,000 | 10.30 + 5.00 | 10.00 + 5.00 | +2.0 % (+2.0 to +2.0) | +2.0 % (+2.0 to +2.0) |"
    )
    assert (of_time.verdict(3), of_processor.verdict(1)) == ("under 3 %", "over 1 %")


def test_an_interval_that_holds_the_bound_decides_nothing() -> None:
    effect = turns.effect([[1.0, 1.01, 1.02], [1.04, 1.05, 1.06]])
    assert effect.low < 3 < effect.high
    assert effect.verdict(3) == "not decided: 3 % is within the interval"
    assert turns.effect([[1.01] * 5] * 3) == turns.effect([[1.01]])


def test_loads_are_named_by_handler_and_connections() -> None:
    assert parse_loads("ok:1,ok:16,mlp:16") == {"ok": [1, 16], "mlp": [16]}
