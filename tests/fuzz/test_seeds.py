"""Each seed of the fuzzer, including former findings, is accepted or refused cleanly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CORPORA = Path(__file__).parent / "corpora"
REPLAY = """
import sys
from pathlib import Path
from tests.fuzz.targets import TARGETS

target = TARGETS[sys.argv[1]]()
for file in sys.argv[2:]:
    target(Path(file).read_bytes())
print("done")
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", ["archive", "form", "frame", "lanes", "traffic"])
def test_seeds_cause_no_findings(name: str) -> None:
    seeds = sorted((CORPORA / name).iterdir())
    assert seeds
    command = [sys.executable, "-c", REPLAY, name, *map(str, seeds)]
    result = subprocess.run(
        command, cwd=CORPORA.parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout == "done\n", result.stderr
