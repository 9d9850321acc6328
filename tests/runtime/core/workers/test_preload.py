"""The search for exported programs in archives and directories."""

from __future__ import annotations

import os
import zipfile

from tsx_runtime.core.workers.preload import holds_exported_program


def test_exported_programs_are_found_in_archives_and_directories(tmp_path):
    for name, member in (("one.mar", "m.pt2"), ("two.mar", "m.pt")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, b"x")
    assert holds_exported_program(tmp_path / "one.mar")
    assert not holds_exported_program(tmp_path / "two.mar")
    assert not holds_exported_program(tmp_path)
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "m.pt2").touch()
    assert holds_exported_program(tmp_path)
    (tmp_path / "text.mar").write_text("no archive")
    assert not holds_exported_program(tmp_path / "text.mar")
    assert not holds_exported_program(tmp_path / "missing.mar")


def test_a_pipe_does_not_block_the_search(tmp_path):
    os.mkfifo(tmp_path / "pipe.mar")
    assert not holds_exported_program(tmp_path / "pipe.mar")
