"""The directories of a run's servers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tsx_cli.bench.search.server import LOCK, scratch_directory, sweep


def test_only_directories_of_killed_runs_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, in_use, sibling = (
        tmp_path / "tsx-bench-a-1",
        tmp_path / "tsx-bench-b-1",
        tmp_path / "tsx-other",
    )
    for directory in (killed, in_use, sibling):
        (directory / "cache").mkdir(parents=True)
    for directory in (killed, sibling):
        (directory / LOCK).touch()
    with scratch_directory("a") as directory:
        sweep()
        assert directory.is_dir()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [directory.name, in_use.name, sibling.name]
        )
    assert not directory.exists()
