"""How figures are written for people."""

from __future__ import annotations

import pytest

from tsx_cli.common.output import milliseconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ms"), (0.0123, "0.0123 ms"), (9.994, "9.99 ms"), (87.66, "87.7 ms"), (999.4, "999 ms"), (999.6, "1.00 s"), (1730, "1.73 s")],
)
def test_a_duration_has_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert milliseconds(value) == text
    assert milliseconds(1e6 * value + 1730).endswith(" s")
