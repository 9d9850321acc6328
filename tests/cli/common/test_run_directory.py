"""A run that is resumed: what its directory names is run, so nobody else may have written it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tsx_cli.common.failure import CliError
from tsx_cli.common.run_directory import NAME
from tsx_cli.optimize.journal import OptimizeJournal, read_optimize_journal


@pytest.mark.skipif(os.name == "nt", reason="modes of directories")
def test_a_run_that_another_user_could_have_written_is_not_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    asked = {"model": "/srv/m.mar", "metric": "/tmp/evil.py:run"}
    begin = {"kind": "begin", "format": OptimizeJournal.format, "asked": asked, "sha256": "", "fingerprint": "", "started": ""}
    (directory / NAME).write_text(json.dumps(begin) + "\n")
    assert read_optimize_journal(directory).asked == asked
    directory.chmod(0o777)
    with pytest.raises(CliError, match="can be written by other users, so its content cannot be trusted; name the directory of a run of"):
        read_optimize_journal(directory)
    directory.chmod(0o700)
    if not os.geteuid():
        os.chown(directory, 65534, 65534)
        with pytest.raises(CliError, match="belongs to another user"):
            read_optimize_journal(directory)
