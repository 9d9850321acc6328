"""Frames over a real socket, however the bytes come and go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime import wire
from tsx_runtime.wire import Kind
from tsx_runtime.worker.channel import IOV_MAX, SMALL, FrameSocket, send_buffers


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    front, back = socket.socketpair()
    with front, back:
        front.settimeout(30)
        back.settimeout(30)
        yield front, back


def frame(batch: int, body: bytes, items: int = 1) -> bytes:
    return b"".join(wire.encode(Kind.BATCH, batch, [(0, b"meta", body)] * items))


def bodies(found: wire.Frame | None) -> list[bytes]:
    assert found is not None
    return [bytes(body) for _, _, body in found.items]


@given(st.lists(st.sampled_from([0, 1, 100, SMALL // 2, SMALL - 100, SMALL, SMALL * 2]), max_size=6), st.integers(1, SMALL * 2))
def test_frames_are_read_whatever_pieces_they_come_in(sizes: list[int], chunk: int) -> None:
    front, back = socket.socketpair()
    data = b"".join(frame(number, bytes([number]) * size) for number, size in enumerate(sizes))
    chunk = max(chunk, len(data) // 1000)  # single bytes only of what is short

    def write() -> None:
        for start in range(0, len(data), chunk):
            front.sendall(data[start : start + chunk])
        front.close()

    with front, back, ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        channel = FrameSocket(back)
        for number, size in enumerate(sizes):
            found = channel.read()
            assert found is not None
            assert found.batch == number
            assert bodies(found) == [bytes([number]) * size]
        assert channel.read() is None
        written.result()


@pytest.mark.parametrize("kept", [1, wire.HEADER.size - 1, wire.HEADER.size, wire.HEADER.size + 5])
@pytest.mark.parametrize("size", [10, SMALL * 2])
def test_a_stream_that_ends_within_a_frame_is_at_its_end(pair: tuple[socket.socket, socket.socket], kept: int, size: int) -> None:
    front, back = pair
    front.sendall(frame(1, b"x" * size)[:kept])
    front.close()
    assert FrameSocket(back).read() is None


def test_more_buffers_than_one_call_takes_all_arrive(pair: tuple[socket.socket, socket.socket]) -> None:
    front, back = pair
    buffers = [b"", *(bytes([number % 251]) * (number % 300) for number in range(IOV_MAX * 3 + 7)), b""]
    expected = b"".join(buffers)
    received = bytearray()

    def read() -> None:
        while len(received) < len(expected):
            received.extend(front.recv(1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    send_buffers(back, buffers)
    reader.join(30)
    assert bytes(received) == expected


def test_a_large_frame_is_sent_through_a_small_socket_buffer(pair: tuple[socket.socket, socket.socket]) -> None:
    front, back = pair
    back.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: bodies(FrameSocket(front).read()))
        FrameSocket(back).send(Kind.REPLY, 3, [(200, b"", b"a" * 3_000_000), (200, b"h", b"")])
        assert reading.result(30) == [b"a" * 3_000_000, b""]


def test_a_piece_is_sent_only_while_its_own_batch_is_answered() -> None:
    """The front end takes no piece of an answer that is complete: it would end the worker."""
    front, back = socket.socketpair()
    with front, back:
        channel = FrameSocket(back)
        channel.begin(1)
        assert channel.send_piece(1, 0, b"", b"a")
        assert not channel.send_piece(2, 0, b"", b"b")
        channel.reply(1, [(200, b"", b"c")], b"")
        assert not channel.send_piece(1, 0, b"", b"d")
        channel.begin(2)
        assert not channel.send_piece(1, 0, b"", b"e")
        assert channel.send_piece(2, 0, b"", b"f")
        theirs = FrameSocket(front)
        frames = [theirs.read() for _ in range(3)]
    assert [(frame.kind, frame.batch, bytes(frame.items[0][2])) for frame in frames if frame is not None] == [
        (Kind.PIECE, 1, b"a"),
        (Kind.REPLY, 1, b"c"),
        (Kind.PIECE, 2, b"f"),
    ]
