"""`tsx cache`: what it lists, and what it removes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tsx_archiver import open_archive
from tsx_archiver.storage.cache import Cache


def test_what_no_process_uses_is_listed_and_removed(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cache"
    monkeypatch.setenv("TSX_CACHE_DIR", str(place))
    assert run("cache").out == f"nothing is cached in {place}\n"
    assert not place.exists()
    for name in ("used", "unused", "recent"):
        make_model(
            tmp_path / f"{name}.mar",
            f"# {name}\ndef handle(data, context):\n    return data\n",
            name=name,
        )
    with open_archive(tmp_path / "used.mar", cache=place):
        for name in ("unused", "recent"):
            open_archive(tmp_path / f"{name}.mar", cache=place).close()
        (old,) = [
            each
            for each in json.loads(run("cache", "--json").out)["entries"]
            if each["model"] == "unused 1.0"
        ]
        os.utime(Path(old["directory"]) / "complete.json", (time.time() - 3 * 86400,) * 2)
        shown = run("cache").out
        rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("archive ")}
        assert rows["used"].split()[-1] == "yes"
        assert rows["unused"].rstrip().endswith("3 days ago  no")
        assert "`tsx cache prune` frees " in shown
        os.utime(
            Path(old["directory"]) / "complete.json", (time.time() - 40 * 86400,) * 2
        )  # a server would not keep it so long
        assert run("cache", "prune", "--older-than", "60d").out == "removed 0 entries, 0 bytes\n"
        assert Path(old["directory"]).exists()
        assert run("cache", "prune", "--older-than", "2d").out.startswith("removed 1 entry, ")
        assert not Path(old["directory"]).exists()
        assert [
            each["model"] for each in json.loads(run("cache", "prune", "--json").out)["removed"]
        ] == ["recent 1.0"]
        assert [each["model"] for each in json.loads(run("cache", "--json").out)["entries"]] == [
            "used 1.0"
        ]
    assert run("cache", "prune", "--older-than", "soon").code == 2


def test_directories_of_others_and_incomplete_entries_are_no_obstacle(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSX_CACHE_DIR", str(tmp_path))
    note = tmp_path / "diary" / "entries" / "monday" / "note.txt"
    note.parent.mkdir(parents=True)
    note.write_text("dear diary")
    incomplete = Cache(tmp_path).root / "entries" / f"{'a' * 64}.0"
    incomplete.mkdir()
    assert "archive" in run("cache").out
    assert run("cache", "prune").out.startswith("removed 1 entry, ")
    assert not incomplete.exists()
    assert list((tmp_path / "diary").rglob("*")) == [note.parent.parent, note.parent, note]
