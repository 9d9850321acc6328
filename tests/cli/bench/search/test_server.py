"""Where the servers of a run have their files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tsx_cli.bench.search.server import LOCK, new_place, sweep


def test_what_killed_runs_left_is_taken_away_and_what_others_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, begun, other = (
        tmp_path / "tsx-bench-a-1",
        tmp_path / "tsx-bench-b-1",
        tmp_path / "tsx-other",
    )
    for place in (killed, begun, other):
        (place / "cache").mkdir(parents=True)
    for place in (killed, other):
        (place / LOCK).touch()
    with new_place("a") as place:
        sweep()
        assert place.is_dir()
        assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
            [place.name, begun.name, other.name]
        )
    assert not place.exists()
