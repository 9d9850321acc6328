"""Output that stops nobody."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.shared import nonblocking_output
from tsx_runtime.shared.log_format import JsonLines
from tsx_runtime.shared.nonblocking_output import LossyOutput

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="opens a pipe anew by /proc")


def read_all(fd: int) -> bytes:
    os.set_blocking(fd, False)
    parts = []
    while True:
        try:
            parts.append(os.read(fd, 1 << 20))
        except BlockingIOError:
            return b"".join(parts)


@given(st.lists(st.binary(max_size=5000), max_size=10))
def test_what_there_is_room_for_arrives_whole(parts):
    reader, writer = os.pipe()
    try:
        out = LossyOutput(writer)
        for part in parts:
            assert out.write(part) == len(part)
        assert read_all(reader) == b"".join(parts)
        assert out.lost_bytes == 0
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a pipe that cannot be opened again"])
def test_a_reader_that_takes_nothing_costs_output_and_is_reported_so_when_it_reads_again(
    kind, monkeypatch
):
    if kind == "a socket":
        ends = socket.socketpair()
        reader, writer = (end.detach() for end in ends)
    else:
        reader, writer = os.pipe()
    if kind == "a pipe that cannot be opened again":
        monkeypatch.setattr(os, "open", refuse)
    out = LossyOutput(writer, max_stall_s=0.01)
    line = b"x" * 999 + b"\n"
    for _ in range(2000):
        assert out.write(line) == len(line)
    lost = out.lost_bytes
    assert lost > 0
    assert len(read_all(reader)) + lost == 2000 * len(line)
    out.write(b"again\n")
    assert (
        read_all(reader)
        == b"[%d bytes of output were dropped: no reader, or the disk was full]\nagain\n" % lost
    )
    assert out.lost_bytes == 0
    os.close(reader)
    os.close(writer)


LINES = st.integers(1, 4000).map(lambda size: b"x" * (size - 1) + b"\n")


@given(st.lists(st.tuples(LINES, st.booleans()), max_size=30))
def test_a_line_that_a_pipe_takes_whole_is_written_whole_or_dropped(written):
    """Each is written, and after some of them all is read that is there."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    out, got = LossyOutput(writer, max_stall_s=0), b""
    out.report_loss = lambda lost: b"[%d]\n" % lost
    for line, is_read in [*written, (b"the end\n", True), (b"\n", True), (b"\n", True)]:
        out.write(line)
        got += read_all(reader) if is_read else b""
    reported = [line for line in got.splitlines(keepends=True) if line.startswith(b"[")]
    taken = [line for line in got.splitlines(keepends=True) if not line.startswith(b"[")]
    lines = iter([line for line, _ in written] + [b"the end\n", b"\n", b"\n"])
    assert all(line in lines for line in taken)  # in their order
    assert (
        sum(map(len, taken)) + sum(int(line[1:-2]) for line in reported) + out.lost_bytes
        == sum(len(line) for line, _ in written) + 10
    )
    os.close(reader)
    os.close(writer)


def test_a_long_write_that_was_cut_is_ended_before_the_report():
    reader, writer = os.pipe()
    out = LossyOutput(writer, max_stall_s=0)
    out.write(b"x" * (1 << 20) + b"\n")
    cut = read_all(reader)
    out.write(b"next\n")
    lost = (1 << 20) + 1 - len(cut)
    assert (
        read_all(reader)
        == b"\n[%d bytes of output were dropped: no reader, or the disk was full]\nnext\n" % lost
    )
    os.close(reader)
    os.close(writer)


def refuse(*_):
    raise PermissionError


def test_a_reader_that_has_gone_and_a_full_disk_are_no_errors():
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for fd in (writer, full):
        out = LossyOutput(fd)
        assert out.write(b"12345") == 5
        assert out.write(b"12345") == 5
        assert out.lost_bytes == 10
        os.close(fd)


def test_what_others_write_to_the_same_place_still_waits_for_its_reader():
    reader, writer = os.pipe()
    LossyOutput(writer)
    assert os.get_blocking(writer)
    os.close(reader)
    os.close(writer)


PRINTS = """
import os, sys
from tsx_runtime.shared.nonblocking_output import install_lossy_output, log_in_background
import logging
install_lossy_output()
handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
log_in_background([handler])
os.open(os.devnull, os.O_RDONLY)  # would be 1 or 2 where those were closed
print("to be read \\ud800")
logging.info("logged")
print("an error", file=sys.stderr)
"""


def test_a_log_that_is_not_written_fills_no_memory_and_keeps_tracebacks_beside_the_words(
    monkeypatch,
):
    monkeypatch.setattr(nonblocking_output, "MAX_QUEUED_CHARS", 100)
    queued = nonblocking_output._QueueHandler(queue.Queue())
    listener = nonblocking_output._Listener(queued, [kept := Kept()])
    logged = {"first": 1}
    for text in ("x" * 60, "y" * 60 + "\n2", "z" * 40):
        queued.handle(logging.LogRecord("a", logging.INFO, "", 0, f"{text} %s", (logged,), None))
        logged["first"] = 2
    listener.start()
    listener.stop()
    try:
        raise ValueError("why")
    except ValueError:
        queued.handle(logging.LogRecord("a", logging.ERROR, "", 0, "w" * 20, None, sys.exc_info()))
    listener.start()
    listener.stop()
    first, notice, last = kept.records
    assert first.getMessage() == "x" * 60 + " {'first': 1}"
    assert (
        notice.getMessage()
        == "3 lines of the log were dropped: they came faster than they could be written"
    )
    assert last.getMessage() == "w" * 20
    assert json.loads(JsonLines().format(last))["exception"].endswith("ValueError: why\n")


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.mark.usefixtures("processes")
def test_programs_print_and_log_as_ever(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "to be read \\ud800\n"
    assert sorted(done.stderr.splitlines()) == ["INFO logged", "an error"]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("where", ["1>/dev/full 2>/dev/full", "1>&- 2>&-", "2>&-", "1>&-"])
def test_a_program_whose_output_cannot_be_written_goes_on(tmp_path, where):
    (tmp_path / "prints.py").write_text(PRINTS + "open('end', 'w').close()\n")
    command = f"exec {sys.executable} prints.py {where}"
    assert (
        subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60, check=False).returncode == 0
    )
    assert (tmp_path / "end").exists()


@pytest.mark.usefixtures("processes")
def test_a_file_is_appended_to_as_it_was(tmp_path: Path):
    file = tmp_path / "log"
    file.write_text("before\n")
    with file.open("a") as log:
        subprocess.run(
            [sys.executable, "-c", PRINTS],
            stdout=log,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=True,
        )
    assert file.read_text() == "before\nto be read \\ud800\n"
