"""Copies by the kernel, whose result is read back and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsx_archiver.storage import copying


def test_a_copy_that_another_process_cuts_short_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "copy").write_bytes(b"1234")
    with (tmp_path / "copy").open("rb") as file, pytest.raises(OSError, match="cut short"):
        copying._read_back(copying.FileRange(file.fileno(), 0), memoryview(bytearray(8)))
