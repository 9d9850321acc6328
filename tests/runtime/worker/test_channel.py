"""Frames over a real socket, which arrive in chunks of any size."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime import wire
from tsx_runtime.wire import Kind
from tsx_runtime.worker.channel import (
    BUFFER_BYTES,
    CAN_POLL,
    IOV_MAX,
    POLL_S,
    FrameSocket,
    send_buffers,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    front_sock, worker_sock = socket.socketpair()
    with front_sock, worker_sock:
        front_sock.settimeout(30)
        worker_sock.settimeout(30)
        yield front_sock, worker_sock


def frame(batch: int, body: bytes, items: int = 1) -> bytes:
    return b"".join(wire.encode(Kind.BATCH, batch, [(0, b"meta", body)] * items))


def bodies(frame: wire.Frame | None) -> list[bytes]:
    assert frame is not None
    return [bytes(body) for _, _, body in frame.items]


@given(
    st.lists(
        st.sampled_from(
            [0, 1, 100, BUFFER_BYTES // 2, BUFFER_BYTES - 100, BUFFER_BYTES, BUFFER_BYTES * 2]
        ),
        max_size=6,
    ),
    st.integers(1, BUFFER_BYTES * 2),
    st.sampled_from([False, CAN_POLL]),
)
def test_frames_are_read_from_chunks_of_any_size(sizes: list[int], chunk: int, polls: bool) -> None:
    front_sock, worker_sock = socket.socketpair()
    data = b"".join(frame(number, bytes([number]) * size) for number, size in enumerate(sizes))
    # Long data comes in larger chunks, which saves time.
    chunk = max(chunk, len(data) // 1000)

    def write() -> None:
        for start in range(0, len(data), chunk):
            front_sock.sendall(data[start : start + chunk])
        front_sock.close()

    with front_sock, worker_sock, ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        channel = FrameSocket(worker_sock)
        channel.is_polling = polls
        for number, size in enumerate(sizes):
            message = channel.read()
            assert bodies(message) == [bytes([number]) * size]
            assert message is not None
            assert message.batch == number
        assert channel.read() is None
        writer.result()


class Watched(socket.socket):
    """A socket that counts polls without data, and reads that wait.

    `on_wait` is called before a read that waits.
    """

    empty_polls = waits = 0
    on_wait: Callable[[], None] | None = None

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        if not flags:
            self.waits += 1
            if self.on_wait:
                self.on_wait()
            return super().recv_into(buffer)
        try:
            return super().recv_into(buffer, nbytes, flags)
        except BlockingIOError:
            self.empty_polls += 1
            raise


BIND = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
LIMIT = "from tsx_runtime.shared import cores; from pathlib import Path; cores.CGROUP = Path()"


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores"
)
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("restriction", [BIND, LIMIT])
def test_a_process_with_a_single_core_does_not_poll(restriction: str, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000")
    code = f"{restriction}; from tsx_runtime.worker.channel import CAN_POLL; print(CAN_POLL)"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path)
    assert output == "False\n"


@pytest.mark.skipif(
    not CAN_POLL,
    reason="this system has one core, or no read that does not wait",
)
def test_a_channel_polls_only_after_a_short_wait_and_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each call of the clock in this thread advances it by a quarter of the polling time. Other
    # threads of the process, such as servers of other tests, read the real clock.
    now = [0.0]
    this_thread, real_monotonic = threading.get_ident(), time.monotonic

    def monotonic() -> float:
        if threading.get_ident() != this_thread:
            return real_monotonic()
        now[0] += POLL_S / 4
        return now[0]

    front_sock, plain_sock = socket.socketpair()
    with front_sock, Watched(fileno=plain_sock.detach()) as worker_sock:
        monkeypatch.setattr(time, "monotonic", monotonic)
        channel = FrameSocket(worker_sock)
        channel.is_polling = True
        # The read of the first frame waits, but only shortly. Therefore the second read polls, and
        # finds the frame.
        for number in (1, 2):
            front_sock.sendall(frame(number, b"a"))
            channel.read()
            assert (worker_sock.empty_polls, worker_sock.waits) == (0, 1)
        # The third read polls until the time is over and then waits, so the fourth does not poll.
        for number in (3, 4):
            worker_sock.on_wait = partial(front_sock.sendall, frame(number, b"c"))
            message = channel.read()
            assert message is not None
            assert (message.batch, worker_sock.empty_polls) == (number, 4)
        assert worker_sock.waits == 3


@pytest.mark.parametrize(
    "length", [1, wire.HEADER.size - 1, wire.HEADER.size, wire.HEADER.size + 5]
)
@pytest.mark.parametrize("size", [10, BUFFER_BYTES * 2])
def test_a_stream_that_ends_within_a_frame_gives_no_frame(
    pair: tuple[socket.socket, socket.socket], length: int, size: int
) -> None:
    front_sock, worker_sock = pair
    front_sock.sendall(frame(1, b"x" * size)[:length])
    front_sock.close()
    assert FrameSocket(worker_sock).read() is None


def test_more_buffers_than_one_call_accepts_all_arrive(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    front_sock, worker_sock = pair
    buffers = [
        b"",
        *(bytes([number % 251]) * (number % 300) for number in range(IOV_MAX * 3 + 7)),
        b"",
    ]
    expected = b"".join(buffers)
    received = bytearray()

    def read() -> None:
        while len(received) < len(expected):
            received.extend(front_sock.recv(1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    send_buffers(worker_sock, buffers)
    reader.join(30)
    assert bytes(received) == expected


def test_a_large_frame_is_sent_through_a_small_socket_buffer(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    front_sock, worker_sock = pair
    worker_sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: bodies(FrameSocket(front_sock).read()))
        FrameSocket(worker_sock).send(
            Kind.REPLY, 3, [(200, b"", b"a" * 3_000_000), (200, b"h", b"")]
        )
        assert reading.result(30) == [b"a" * 3_000_000, b""]


def test_a_piece_is_sent_only_while_its_own_batch_is_answered() -> None:
    """Drop timer pieces: a piece after the complete answer would make the front_sock end kill the worker."""
    front_sock, worker_sock = socket.socketpair()
    with front_sock, worker_sock:
        channel = FrameSocket(worker_sock)
        channel.begin(1)
        assert channel.send_piece(1, 0, b"", b"a")
        assert not channel.send_piece(2, 0, b"", b"b")
        channel.reply(1, [(200, b"", b"c")], b"")
        assert not channel.send_piece(1, 0, b"", b"d")
        channel.begin(2)
        assert not channel.send_piece(1, 0, b"", b"e")
        assert channel.send_piece(2, 0, b"", b"f")
        front_channel = FrameSocket(front_sock)
        frames = [front_channel.read() for _ in range(3)]
    assert [
        (frame.kind, frame.batch, bytes(frame.items[0][2])) for frame in frames if frame is not None
    ] == [
        (Kind.PIECE, 1, b"a"),
        (Kind.REPLY, 1, b"c"),
        (Kind.PIECE, 2, b"f"),
    ]
