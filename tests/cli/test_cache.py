"""`tsx cache`: its list of entries, and the entries that it removes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.models import make_model
from tsx_archiver import open_archive
from tsx_archiver.storage.cache import Cache


def test_unused_entries_are_listed_and_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def models(command: str, key: str = "entries") -> list[str]:
        return [entry["model"] for entry in json.loads(run(f"{command} --json").out)[key]]

    def set_age(entry: Path, days: int) -> None:
        os.utime(entry / "complete.json", (time.time() - days * 86400,) * 2)

    cache = tmp_path / "cache"
    monkeypatch.setenv("TSX_CACHE_DIR", str(cache))
    assert run("cache").out == f"nothing is cached in {cache}\n"
    assert not cache.exists()
    for name in ("used", "unused", "recent"):
        handler = f"# {name}\ndef handle(data, context):\n    return data\n"
        make_model(tmp_path / f"{name}.mar", handler, name=name)
    with open_archive(tmp_path / "used.mar", cache=cache):
        for name in ("unused", "recent"):
            open_archive(tmp_path / f"{name}.mar", cache=cache).close()
        (old,) = (
            Path(entry["directory"])
            for entry in json.loads(run("cache --json").out)["entries"]
            if entry["model"] == "unused 1.0"
        )
        set_age(old, 3)
        output = run("cache").out
        rows = {
            line.split()[1]: line for line in output.splitlines() if line.startswith("archive ")
        }
        assert rows["used"].split()[-1] == "yes"
        assert rows["unused"].rstrip().endswith("3 days ago  no")
        assert "`tsx cache prune` frees " in output
        # A server would already have removed this entry.
        set_age(old, 40)
        assert run("cache prune --older-than 60d").out == "removed 0 entries, 0 bytes\n"
        assert old.exists()
        assert run("cache prune --older-than 2d").out.startswith("removed 1 entry, ")
        assert not old.exists()
        assert models("cache prune", "removed") == ["recent 1.0"]
        assert models("cache") == ["used 1.0"]
    assert run("cache prune --older-than soon").code == 2


def test_foreign_directories_and_incomplete_entries_are_ignored(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSX_CACHE_DIR", str(tmp_path))
    note = tmp_path / "diary" / "entries" / "monday" / "note.txt"
    note.parent.mkdir(parents=True)
    note.write_text("dear diary")
    incomplete = Cache(tmp_path).root / "entries" / f"{'a' * 64}.0"
    incomplete.mkdir()
    assert "archive" in run("cache").out
    assert run("cache prune").out.startswith("removed 1 entry, ")
    assert not incomplete.exists()
    assert list((tmp_path / "diary").rglob("*")) == [note.parent.parent, note.parent, note]
