"""Formatting of numbers and tables."""

from __future__ import annotations

import pytest

from tsx_cli.common.output import csv_cell, milliseconds, print_table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.0123, "0.0123 ms"),
        (9.994, "9.99 ms"),
        (87.66, "87.7 ms"),
        (999.4, "999 ms"),
        (999.6, "1.00 s"),
        (1730, "1.73 s"),
    ],
)
def test_a_duration_has_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert milliseconds(value) == text
    assert milliseconds(1e6 * value + 1730).endswith(" s")


@pytest.mark.parametrize("terminal", ["", "1"])
def test_headers_and_titles_of_tables_are_not_markup(
    terminal: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", terminal)
    print_table(["echo at http://[fe80::1]:8080\x07", ""], [("load", "[b]1")], title="digits[/x]")
    printed = capsys.readouterr().out
    assert "http://[fe80::1]:8080\\x07" in printed
    assert "[b]1" in printed
    assert not terminal or "digits[/x]" in printed


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "-"]
)
def test_formulas_are_escaped_in_cells(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["", "a=1", "-1.5", "+2", "-3e-05", '{"a": 1}', -1.5, None, True])
def test_numbers_and_plain_texts_are_unchanged_in_cells(value: object) -> None:
    assert csv_cell(value) == value
