"""The end of a run."""

from __future__ import annotations

from tsx_cli.bench.confirm import _compare


def test_rounds_are_compared_where_there_are_two_of_each() -> None:
    assert _compare([0, 1], {0: [190.0], 1: [75.0]}) == []
    assert _compare([0, 1], {0: [190.0, 191.0]}) == []
    (pair,) = _compare([0, 1], {0: [190.0, 191.0, 189.0], 1: [75.0, 76.0, 75.0]})
    assert pair.real
    assert pair.low > 2
