"""A log file that other programs move, delete or truncate, and a full disk."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tsx_runtime.server.log_file import MESSAGE_INTERVAL_S, LogFile

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows can neither move nor delete an open file"
)


@pytest.fixture
def clock() -> list[float]:
    """Return a list whose only element is the current time."""
    return [100.0]


@pytest.fixture
def open_log(tmp_path: Path, clock: list[float]) -> Iterator[Callable[..., LogFile]]:
    opened_logs = []

    def open_one(max_bytes: int = 1 << 20, backups: int = 2) -> LogFile:
        opened_logs.append(
            LogFile(tmp_path / "logs" / "a.log", max_bytes, backups, lambda: clock[0])
        )
        return opened_logs[-1]

    yield open_one
    for log in opened_logs:
        log.close()


def write_lines(log: LogFile, *texts: str) -> None:
    for text in texts:
        log.handle(logging.LogRecord("x", logging.INFO, "", 0, text, None, None))


@contextmanager
def disk_with_room_for(size: int) -> Iterator[None]:
    """Let files accept `size` bytes of the next write and then nothing, like a full disk."""
    import resource  # absent on Windows

    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old_limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)


def test_a_moved_file_gets_no_more_lines(open_log, tmp_path):
    log = open_log()
    write_lines(log, "one")
    log.path.rename(tmp_path / "moved")
    write_lines(log, "two", "three")
    assert (tmp_path / "moved").read_text() == "one\n"
    assert log.path.read_text() == "two\nthree\n"


@pytest.mark.parametrize("deleted_path", ["the file", "its directory"])
def test_a_deleted_file_is_recreated(open_log, deleted_path):
    log = open_log()
    write_lines(log, "one")
    if deleted_path == "the file":
        log.path.unlink()
    else:
        shutil.rmtree(log.path.parent)
    write_lines(log, "two")
    assert log.path.read_text() == "two\n"


def test_a_truncated_file_is_written_from_its_beginning(open_log):
    log = open_log()
    write_lines(log, "one")
    log.path.write_text("")
    write_lines(log, "two")
    assert log.path.read_text() == "two\n"


def test_a_moved_file_gets_the_lines_while_no_new_one_can_be_created(open_log, tmp_path):
    log = open_log()
    log.path.rename(tmp_path / "moved")
    log.path.parent.rmdir()
    log.path.parent.symlink_to(tmp_path / "nothing" / "there")
    write_lines(log, "meanwhile")
    log.path.parent.unlink()
    write_lines(log, "again")
    assert (tmp_path / "moved").read_text() == "meanwhile\n"
    assert log.path.read_text() == "again\n"


@pytest.mark.parametrize("backups", [0, 1, 3])
def test_a_large_file_is_rotated(open_log, backups):
    log = open_log(20, backups)
    write_lines(log, *(f"line {number}" for number in range(10)))
    contents = {path.name: path.read_text() for path in log.path.parent.iterdir()}
    expected = ["line 8\nline 9\n", "line 6\nline 7\n", "line 4\nline 5\n", "line 2\nline 3\n"][
        : backups + 1
    ]
    assert contents == dict(zip(["a.log", "a.log.1", "a.log.2", "a.log.3"], expected, strict=False))


def test_a_file_that_cannot_be_rotated_keeps_growing(open_log):
    log = open_log(20, 1)
    (log.path.parent / "a.log.1" / "in the way").mkdir(parents=True)
    write_lines(log, *(f"line {number}" for number in range(10)))
    assert log.path.read_text() == "".join(f"line {number}\n" for number in range(10))


def test_a_full_disk_drops_whole_lines_and_is_logged_once(open_log, clock, caplog):
    log = open_log()
    write_lines(log, "first")
    with disk_with_room_for(20):
        write_lines(log, "a line that is longer than that", "short", "another one that is")
    clock[0] += MESSAGE_INTERVAL_S
    write_lines(log, "after")
    assert log.path.read_text() == "first\nshort\nafter\n"
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith(
        f"{log.path} cannot be written, so its lines are lost until it can: "
    )
    assert messages[1:] == [f"{log.path} can be written again; 2 lines were lost"]


def test_a_line_that_cannot_be_formatted_does_not_affect_others(open_log, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log = open_log()
    log.handle(logging.LogRecord("x", logging.INFO, "", 0, "%d", ("no number",), None))
    write_lines(log, "after \ud800")
    assert log.path.read_text() == "after \\ud800\n"


def test_logs_and_new_directories_are_not_writable_by_others(
    open_log: Callable[..., LogFile], tmp_path: Path
) -> None:
    old_umask = os.umask(0)
    try:
        open_log()
    finally:
        os.umask(old_umask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("logs", "logs/a.log")] == [
        0o755,
        0o644,
    ]


def test_the_users_own_symlink_is_followed(
    open_log: Callable[..., LogFile], tmp_path: Path
) -> None:
    """Follow it, since images link log files to /dev/stdout."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").symlink_to(tmp_path / "elsewhere")
    write_lines(open_log(), "here")
    assert (tmp_path / "elsewhere").read_text() == "here\n"


@pytest.mark.parametrize("owner", ["link", "directory"])
@pytest.mark.skipif(
    sys.platform != "win32" and os.geteuid() != 0, reason="only root can give files to another user"
)
def test_another_users_symlink_is_not_followed(
    open_log: Callable[..., LogFile], tmp_path: Path, owner: str
) -> None:
    (tmp_path / "logs").mkdir()
    link = tmp_path / "logs" / "a.log"
    link.symlink_to(tmp_path / "victim")
    os.chown(link if owner == "link" else link.parent, 54321, 54321, follow_symlinks=False)
    with pytest.raises(PermissionError):
        open_log()
    assert not (tmp_path / "victim").exists()
