"""Output that stops nobody."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.output import Lossy

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
        out = Lossy(writer)
        for part in parts:
            assert out.write(part) == len(part)
        assert read_all(reader) == b"".join(parts)
        assert out.lost == 0
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a pipe that cannot be opened again"])
def test_a_reader_that_takes_nothing_costs_output_and_is_told_so_when_it_reads_again(kind, monkeypatch):
    if kind == "a socket":
        ends = socket.socketpair()
        reader, writer = (end.detach() for end in ends)
    else:
        reader, writer = os.pipe()
    if kind == "a pipe that cannot be opened again":
        monkeypatch.setattr(os, "open", refuse)
    out = Lossy(writer, patience=0.01)
    line = b"x" * 999 + b"\n"
    for _ in range(2000):
        assert out.write(line) == len(line)
    lost = out.lost
    assert lost > 0
    assert len(read_all(reader)) + lost == 2000 * len(line)
    out.write(b"again\n")
    assert read_all(reader) == b"\n[%d bytes of output were dropped: nobody took them, or the disk was full]\nagain\n" % lost
    assert out.lost == 0
    os.close(reader)
    os.close(writer)


def refuse(*_):
    raise PermissionError


def test_a_reader_that_has_gone_and_a_full_disk_are_no_errors():
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for fd in (writer, full):
        out = Lossy(fd)
        assert out.write(b"12345") == 5
        assert out.write(b"12345") == 5
        assert out.lost == 10
        os.close(fd)


def test_what_others_write_to_the_same_place_still_waits_for_its_reader():
    reader, writer = os.pipe()
    Lossy(writer)
    assert os.get_blocking(writer)
    os.close(reader)
    os.close(writer)


PRINTS = """
import os, sys
from tsx_runtime.output import keep_going, log_in_background
import logging
keep_going()
handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
log_in_background([handler])
os.open(os.devnull, os.O_RDONLY)  # would be 1 or 2 where those were closed
print("to be read \\ud800")
logging.info("logged")
print("an error", file=sys.stderr)
"""


def test_programs_print_and_log_as_ever(tmp_path):
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "to be read \\ud800\n"
    assert sorted(done.stderr.splitlines()) == ["INFO logged", "an error"]


@pytest.mark.parametrize("where", ["1>/dev/full 2>/dev/full", "1>&- 2>&-", "2>&-", "1>&-"])
def test_a_program_whose_output_cannot_be_written_goes_on(tmp_path, where):
    (tmp_path / "prints.py").write_text(PRINTS + "open('end', 'w').close()\n")
    command = f"exec {sys.executable} prints.py {where}"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert (tmp_path / "end").exists()


def test_a_file_is_appended_to_as_it_was(tmp_path: Path):
    file = tmp_path / "log"
    file.write_text("before\n")
    with file.open("a") as log:
        subprocess.run([sys.executable, "-c", PRINTS], stdout=log, stderr=subprocess.DEVNULL, timeout=60, check=True)
    assert file.read_text() == "before\nto be read \\ud800\n"
