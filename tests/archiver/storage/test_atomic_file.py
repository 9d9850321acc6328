"""Files that get their final name only once they are complete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tsx_archiver.storage.atomic_file import write_atomically


@pytest.mark.parametrize("durable", [True, False])
def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with write_atomically(path, durable=durable) as file:
        file.write(b"n" * 100_000)
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"n" * 100_000
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("file_exists", [True, False])
def test_a_failed_write_changes_nothing(tmp_path: Path, file_exists: bool) -> None:
    path = tmp_path / "file"
    if file_exists:
        path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        _break_off(path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == (
        [("file", b"old")] if file_exists else []
    )


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX modes")
def test_a_private_file_is_private_at_any_time(tmp_path: Path) -> None:
    with write_atomically(tmp_path / "file", mode=0o600):
        assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def _break_off(path: Path) -> None:
    with write_atomically(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
