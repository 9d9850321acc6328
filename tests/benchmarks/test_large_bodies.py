"""The benchmark of large bodies counts all bytes, on a real server with small bodies."""

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
def test_every_size_has_its_row(options: list[str]) -> None:
    done = forked.run(
        [sys.executable, SCRIPT, "--sizes", "64K", "1M", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("| ")
    ]
    assert [row[0] for row in rows] == ["body", "64 KiB", "1 MiB"]
    assert all(float(cell.replace(",", "")) > 0 for row in rows[1:] for cell in row[1:3])
