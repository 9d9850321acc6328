"""A log file under which somebody moves, deletes and fills things."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tsx_runtime.targets.observability.log_file import CALM, LogFile

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="an open file is neither moved nor deleted there"
)


@pytest.fixture
def clock() -> list[float]:
    """The time, as its one element."""
    return [100.0]


@pytest.fixture
def open_log(tmp_path: Path, clock: list[float]) -> Iterator[Callable[..., LogFile]]:
    opened = []

    def open_one(max_bytes: int = 1 << 20, kept: int = 2) -> LogFile:
        opened.append(LogFile(tmp_path / "logs" / "a.log", max_bytes, kept, lambda: clock[0]))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def say(log: LogFile, *texts: str) -> None:
    for text in texts:
        log.handle(logging.LogRecord("x", logging.INFO, "", 0, text, None, None))


@contextmanager
def disk_with_room_for(size: int) -> Iterator[None]:
    """As a full disk does, it takes a part of what is written to a file, and then nothing."""
    import resource  # here, because Windows has none

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_was_moved_is_left_to_who_has_moved_it(open_log, tmp_path):
    log = open_log()
    say(log, "one")
    log.path.rename(tmp_path / "moved")
    say(log, "two", "three")
    assert (tmp_path / "moved").read_text() == "one\n"
    assert log.path.read_text() == "two\nthree\n"


@pytest.mark.parametrize("gone", ["the file", "its directory"])
def test_a_file_that_was_deleted_is_made_again(open_log, gone):
    log = open_log()
    say(log, "one")
    if gone == "the file":
        log.path.unlink()
    else:
        shutil.rmtree(log.path.parent)
    say(log, "two")
    assert log.path.read_text() == "two\n"


def test_a_file_that_was_emptied_is_written_from_its_beginning(open_log):
    log = open_log()
    say(log, "one")
    log.path.write_text("")
    say(log, "two")
    assert log.path.read_text() == "two\n"


def test_a_moved_file_takes_the_lines_while_none_can_be_made_in_its_place(open_log, tmp_path):
    log = open_log()
    log.path.rename(tmp_path / "moved")
    log.path.parent.rmdir()
    log.path.parent.symlink_to(tmp_path / "nothing" / "there")
    say(log, "meanwhile")
    log.path.parent.unlink()
    say(log, "again")
    assert (tmp_path / "moved").read_text() == "meanwhile\n"
    assert log.path.read_text() == "again\n"


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_large_file_is_renamed(open_log, kept):
    log = open_log(20, kept)
    say(log, *(f"line {number}" for number in range(10)))
    reported = {path.name: path.read_text() for path in log.path.parent.iterdir()}
    expected = ["line 8\nline 9\n", "line 6\nline 7\n", "line 4\nline 5\n", "line 2\nline 3\n"][
        : kept + 1
    ]
    assert reported == dict(zip(["a.log", "a.log.1", "a.log.2", "a.log.3"], expected, strict=False))


def test_a_file_that_cannot_be_renamed_grows_and_loses_nothing(open_log):
    log = open_log(20, 1)
    (log.path.parent / "a.log.1" / "in the way").mkdir(parents=True)
    say(log, *(f"line {number}" for number in range(10)))
    assert log.path.read_text() == "".join(f"line {number}\n" for number in range(10))


def test_a_full_disk_costs_whole_lines_and_the_servers_log_says_so_once(open_log, clock, caplog):
    log = open_log()
    say(log, "first")
    with disk_with_room_for(20):
        say(log, "a line that is longer than that", "short", "another one that is")
    clock[0] += CALM
    say(log, "after")
    assert log.path.read_text() == "first\nshort\nafter\n"
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith(f"{log.path} cannot be written, so its lines are lost until it can: ")
    assert said[1:] == [f"{log.path} can be written again; 2 lines were lost"]


def test_what_cannot_be_formatted_costs_nothing_else(open_log, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log = open_log()
    log.handle(logging.LogRecord("x", logging.INFO, "", 0, "%d", ("no number",), None))
    say(log, "after \ud800")
    assert log.path.read_text() == "after \\ud800\n"


def test_under_any_umask_nobody_else_can_write_the_log_or_its_new_directories(
    open_log: Callable[..., LogFile], tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        open_log()
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("logs", "logs/a.log")] == [
        0o755,
        0o644,
    ]


def test_a_link_of_our_own_is_followed(open_log: Callable[..., LogFile], tmp_path: Path) -> None:
    """Images lead log files to /dev/stdout."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").symlink_to(tmp_path / "elsewhere")
    say(open_log(), "here")
    assert (tmp_path / "elsewhere").read_text() == "here\n"


@pytest.mark.parametrize("whose", ["link", "directory"])
@pytest.mark.skipif(
    sys.platform != "win32" and os.geteuid() != 0, reason="only root can give files to another user"
)
def test_a_link_that_another_user_has_put_there_is_not_followed(
    open_log: Callable[..., LogFile], tmp_path: Path, whose: str
) -> None:
    (tmp_path / "logs").mkdir()
    link = tmp_path / "logs" / "a.log"
    link.symlink_to(tmp_path / "victim")
    os.chown(link if whose == "link" else link.parent, 54321, 54321, follow_symlinks=False)
    with pytest.raises(PermissionError):
        open_log()
    assert not (tmp_path / "victim").exists()
