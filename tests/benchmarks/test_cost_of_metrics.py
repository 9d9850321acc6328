"""The server that counts nothing is that, and what its rounds come to. The load is measured by hand."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cost_of_metrics import Measured, is_blind, serving, told


def test_a_blind_server_answers_and_counts_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "blind", blind=True) as server:
        assert server.call("/predictions/ok", b"x") == b"OK"
        assert is_blind(server)


def test_what_seeing_adds_is_the_median_of_rounds_side_by_side() -> None:
    blind = [Measured(rate, 10, 5) for rate in (1000, 2000, 4000)]
    seeing = [Measured(rate / 1.02, 10.3, 5) for rate in (1000, 2000, 4000)]
    assert told(seeing, blind) == "1,961 | 2,000 | 15.30 | 15.00 | +2.0 % (+2.0 to +2.0) | +2.0 % (+2.0 to +2.0)"
