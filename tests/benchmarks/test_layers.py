"""The layers that are timed are those of the server: what they rely on in it is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "layers.py"


@pytest.mark.parametrize("options", [[], ["--new-heads", "--batch", "1"], ["--body", "200000"], ["--routed", "header"]], ids=" ".join)
def test_every_layer_is_timed(options: list[str]) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--seconds", "0.05", *options], capture_output=True, text=True, check=True)
    names = [line[:20].strip() for line in done.stdout.splitlines()[1:]]
    assert names == ["read and submit", "assign and send", "worker", "receive and answer", "all"]
