"""The benchmark of layers times each layer of the server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "layers.py"


@pytest.mark.parametrize(
    "options",
    [[], ["--new-heads", "--batch", "1"], ["--body", "200000"], ["--routed", "header"]],
    ids=" ".join,
)
def test_every_layer_is_timed(options: list[str]) -> None:
    result = forked.run(
        [sys.executable, SCRIPT, "--seconds", "0.05", *options], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    names = [line[:20].strip() for line in result.stdout.splitlines()[1:]]
    assert names == ["read and submit", "assign and send", "worker", "receive and answer", "all"]
