"""The benchmark of large bodies measures each size, here with small bodies on a real server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "large_bodies.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.mark.parametrize(
    "options",
    [["--seconds", "0.2"], ["--transport", "--rounds", "1"]],
    ids=lambda options: options[0],
)
def test_every_size_has_a_row(options: list[str]) -> None:
    result = forked.run(
        [sys.executable, SCRIPT, "--sizes", "64K", "1M", *options], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in result.stdout.splitlines()
        if line.startswith("| ")
    ]
    assert [row[0] for row in rows] == ["body", "64 KiB", "1 MiB"]
    assert all(float(cell.replace(",", "")) > 0 for row in rows[1:] for cell in row[1:3])
