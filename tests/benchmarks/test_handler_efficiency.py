"""The bare loop of the benchmark gives a handler everything that a worker gives it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support import forked
from tests.support.models import make_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "handler_efficiency.py"


def test_the_bare_loop_loads_a_handler(tmp_path: Path) -> None:
    model = make_model(
        tmp_path / "m",
        "def handle(data, context):\n    return data and ['OK'] * len(data)\n",
        config="threads: 1\n",
    )
    body = tmp_path / "body"
    body.write_bytes(b"x")
    command = [sys.executable, SCRIPT, "--bare", model, body, "--batch", "2", "--seconds", "1"]
    result = forked.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["rate"] > 0
