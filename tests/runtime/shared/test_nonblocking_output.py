"""Output that never blocks a program."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.shared import nonblocking_output
from tsx_runtime.shared.log_format import JsonLines
from tsx_runtime.shared.nonblocking_output import LossyOutput

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reopens a pipe through /proc")


def read_all(fd: int) -> bytes:
    os.set_blocking(fd, False)
    parts = []
    while True:
        try:
            parts.append(os.read(fd, 1 << 20))
        except BlockingIOError:
            return b"".join(parts)


def notice(lost_bytes: int) -> bytes:
    return b"[%d bytes of output were dropped: no reader, or the disk was full]\n" % lost_bytes


@contextmanager
def pipe(kind: str = "a pipe") -> Iterator[tuple[int, int]]:
    """Open a pipe or socket pair; yield its reader first, then its writer."""
    if kind == "a socket":
        reader, writer = (end.detach() for end in socket.socketpair())
    else:
        reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


@given(st.lists(st.binary(max_size=5000), max_size=10))
def test_output_that_fits_arrives_completely(parts):
    with pipe() as (reader, writer):
        lossy_output = LossyOutput(writer)
        for part in parts:
            assert lossy_output.write(part) == len(part)
        assert read_all(reader) == b"".join(parts)
        assert lossy_output.lost_bytes == 0


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a pipe that cannot be opened again"])
def test_unread_output_is_dropped_and_reported_to_the_next_reader(kind, monkeypatch):
    if kind == "a pipe that cannot be opened again":
        monkeypatch.setattr(os, "open", refuse)
    with pipe(kind) as (reader, writer):
        lossy_output = LossyOutput(writer, max_stall_s=0.01)
        line = b"x" * 999 + b"\n"
        for _ in range(2000):
            assert lossy_output.write(line) == len(line)
        lost_bytes = lossy_output.lost_bytes
        assert lost_bytes > 0
        assert len(read_all(reader)) + lost_bytes == 2000 * len(line)
        lossy_output.write(b"again\n")
        assert read_all(reader) == notice(lost_bytes) + b"again\n"
        assert lossy_output.lost_bytes == 0


LINES = st.integers(1, 4000).map(lambda size: b"x" * (size - 1) + b"\n")


@given(st.lists(st.tuples(LINES, st.booleans()), max_size=30))
def test_lines_within_the_pipe_size_are_written_completely_or_dropped(writes):
    """Write lines, and read all output after some of them."""
    with pipe() as (reader, writer):
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
        lossy_output, output = LossyOutput(writer, max_stall_s=0), b""
        lossy_output.report_loss = lambda lost_bytes: b"[%d]\n" % lost_bytes
        for line, reads_after in [*writes, (b"the end\n", True), (b"\n", True), (b"\n", True)]:
            lossy_output.write(line)
            output += read_all(reader) if reads_after else b""
    lines = output.splitlines(keepends=True)
    notices = [line for line in lines if line.startswith(b"[")]
    written_lines = [line for line in lines if not line.startswith(b"[")]
    # The lines keep their order.
    sent_lines = iter([line for line, _ in writes] + [b"the end\n", b"\n", b"\n"])
    assert all(line in sent_lines for line in written_lines)
    lost_bytes = sum(int(line[1:-2]) for line in notices) + lossy_output.lost_bytes
    assert sum(map(len, written_lines)) + lost_bytes == sum(len(line) for line, _ in writes) + 10


def test_a_truncated_line_is_terminated_before_the_loss_report():
    with pipe() as (reader, writer):
        lossy_output = LossyOutput(writer, max_stall_s=0)
        lossy_output.write(b"x" * (1 << 20) + b"\n")
        truncated_output = read_all(reader)
        lossy_output.write(b"next\n")
        lost_bytes = (1 << 20) + 1 - len(truncated_output)
        assert read_all(reader) == b"\n" + notice(lost_bytes) + b"next\n"


def refuse(*_):
    raise PermissionError


def test_a_closed_reader_and_a_full_disk_are_not_errors():
    reader, writer = os.pipe()
    os.close(reader)
    full_device = os.open("/dev/full", os.O_WRONLY)
    for fd in (writer, full_device):
        lossy_output = LossyOutput(fd)
        assert lossy_output.write(b"12345") == 5
        assert lossy_output.write(b"12345") == 5
        assert lossy_output.lost_bytes == 10
        os.close(fd)


def test_other_writers_of_the_same_pipe_still_block():
    with pipe() as (_, writer):
        LossyOutput(writer)
        assert os.get_blocking(writer)


PRINTS = """
import os, sys
from tsx_runtime.shared.nonblocking_output import install_lossy_output, log_in_background
import logging
install_lossy_output()
handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
log_in_background([handler])
# It would get the number 1 or 2 where those were closed.
os.open(os.devnull, os.O_RDONLY)
print("to be read \\ud800")
logging.info("logged")
print("an error", file=sys.stderr)
"""


def test_a_blocked_log_is_limited_and_keeps_tracebacks(monkeypatch):
    monkeypatch.setattr(nonblocking_output, "MAX_QUEUED_CHARS", 100)
    handler, written_records = nonblocking_output._QueueHandler(queue.Queue()), RecordList()
    listener = nonblocking_output._Listener(handler, [written_records])
    argument = {"first": 1}
    for text in ("x" * 60, "y" * 60 + "\n2", "z" * 40):
        record = logging.LogRecord("a", logging.INFO, "", 0, f"{text} %s", (argument,), None)
        handler.handle(record)
        argument["first"] = 2
    listener.start()
    listener.stop()
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "w" * 20, None, sys.exc_info())
        handler.handle(record)
    listener.start()
    listener.stop()
    first, loss_record, last = written_records.records
    assert first.getMessage() == "x" * 60 + " {'first': 1}"
    assert loss_record.getMessage().startswith("3 lines of the log were dropped")
    assert last.getMessage() == "w" * 20
    assert json.loads(JsonLines().format(last))["exception"].endswith("ValueError: why\n")


class RecordList(logging.Handler):
    """A logging handler that stores its records."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.mark.usefixtures("processes")
def test_programs_print_and_log_as_usual(tmp_path: Path):
    file = tmp_path / "log"
    file.write_text("before\n")
    with file.open("a") as log:
        program = subprocess.run(
            [sys.executable, "-c", PRINTS],
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
    # Output is appended to a file.
    assert file.read_text() == "before\nto be read \\ud800\n"
    assert sorted(program.stderr.splitlines()) == ["INFO logged", "an error"]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("redirection", ["1>/dev/full 2>/dev/full", "1>&- 2>&-", "2>&-", "1>&-"])
def test_a_program_continues_if_its_output_cannot_be_written(tmp_path, redirection):
    (tmp_path / "prints.py").write_text(PRINTS + "open('end', 'w').close()\n")
    command = f"exec {sys.executable} prints.py {redirection}"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "end").exists()
