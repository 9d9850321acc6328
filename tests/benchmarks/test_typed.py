"""The benchmark of typed files compares servers that give the same answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks import machine, typed, wrk
from benchmarks.peers import environments
from tests.support import forked

ROOT = Path(__file__).parents[2]


def test_validation_is_timed_for_each_batch_size() -> None:
    command = [sys.executable, "-m", "benchmarks.typed", "--validation", "--seconds", "0"]
    result = forked.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    sizes = [line.split()[0] for line in result.stdout.splitlines()[2:-1]]
    assert sizes == [str(batch) for batch in typed.BATCHES]


@pytest.mark.nightly  # It starts three servers.
@pytest.mark.skipif(sys.platform != "linux", reason="the comparison is for Linux")
def test_servers_of_one_typed_file_are_compared_without_those_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.setattr(environments, "program", lambda name, package: None)
    monkeypatch.setattr(environments, "environment_of", only_fastapi)
    monkeypatch.setattr(wrk, "load", lambda *_: wrk.Round(1000, 1, 2, 1000))
    options = argparse.Namespace(connections="16", rounds=1, seconds=1, environments=tmp_path)
    lines = list(typed.compare(options, machine.Noise()))
    assert "pip could not install litserve" in lines[0]
    names = [line[13:37].strip() for line in lines[2:]]
    assert names == ["tsx", "FastAPI", "FastAPI, all processes"]
    assert "1.0 times (1.0 to 1.0), promised 3" in lines[3]


def only_fastapi(name: str, directory: Path) -> Path:
    if name != "FastAPI":
        raise environments.Missing("pip could not install litserve")
    return Path(sys.prefix)
