"""The directories of a run's servers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tsx_cli.bench.search.server import LOCK, scratch_directory, sweep


def test_directories_of_killed_runs_are_removed_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, begun, sibling = (
        tmp_path / "tsx-bench-a-1",
        tmp_path / "tsx-bench-b-1",
        tmp_path / "tsx-other",
    )
    for directory in (killed, begun, sibling):
        (directory / "cache").mkdir(parents=True)
    for directory in (killed, sibling):
        (directory / LOCK).touch()
    with scratch_directory("a") as directory:
        sweep()
        assert directory.is_dir()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [directory.name, begun.name, sibling.name]
        )
    assert not directory.exists()
