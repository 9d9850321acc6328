"""The directory of a run: its owner, its files, and whether the run is resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tsx_cli.common.failure import CliError
from tsx_cli.common.run_directory import NAME, JournalFile, write_files
from tsx_cli.optimize.journal import OptimizeJournal, read_optimize_journal


def test_a_link_in_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.md").symlink_to(tmp_path / "victim")
    assert write_files({"report.md": "text", "case/report.csv": "a,b"}, tmp_path) == [
        tmp_path / "report.md",
        tmp_path / "case" / "report.csv",
    ]
    assert not (tmp_path / "victim").exists()
    assert (tmp_path / "report.md").read_text() == "text"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="only root can give a directory to another user",
)
@pytest.mark.parametrize("linked", [False, True])
def test_a_run_does_not_write_into_a_directory_of_another_user(
    tmp_path: Path, linked: bool
) -> None:
    directory = tmp_path / "run"
    directory.symlink_to(tmp_path) if linked else directory.mkdir()
    os.chown(directory, 54321, 54321, follow_symlinks=False)
    with pytest.raises(CliError, match=r"belongs to another user\)"):
        JournalFile(directory, new=True)
    assert not (tmp_path / NAME).exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits of directories")
def test_a_run_writable_by_another_user_is_not_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    options = {"model": "/srv/m.mar", "metric": "/tmp/evil.py:run"}
    begin = {"kind": "begin", "format": OptimizeJournal.format, "asked": options}
    begin |= dict.fromkeys(("sha256", "fingerprint", "started"), "")
    (directory / NAME).write_text(json.dumps(begin) + "\n")
    assert read_optimize_journal(directory).asked == options
    directory.chmod(0o777)
    with pytest.raises(CliError, match="can be written by other users"):
        read_optimize_journal(directory)
    directory.chmod(0o700)
    if not os.geteuid():
        os.chown(directory, 65534, 65534)
        with pytest.raises(CliError, match="belongs to another user"):
            read_optimize_journal(directory)
