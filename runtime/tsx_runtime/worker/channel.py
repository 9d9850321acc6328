"""The worker's end of its socket.

Reads block and return one frame. Writes do not copy large bodies.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from tsx_runtime import wire
from tsx_runtime.shared.cores import cpu_count
from tsx_runtime.shared.native import mypyc_attr
from tsx_runtime.wire import Buffer, Frame, Kind

BUFFER_BYTES = 256 << 10  # Frames up to this size need no memory of their own.
MAX_REUSED_BYTES = 32 << 20  # The memory of a larger frame is not used again.
MAX_JOINED_BYTES = 32 << 10  # One copy is cheaper than a list of pieces.
POLL_S = 200e-6  # To fall asleep and wake up takes about half of it.
# On a single core, the sender could not run meanwhile.
CAN_POLL = hasattr(socket, "MSG_DONTWAIT") and hasattr(os, "sched_yield") and cpu_count() > 1

# The kind, the batch, the items and `extra`.
OutFrame: TypeAlias = "tuple[Kind, int, Sequence[tuple[int, Buffer, Buffer]], Buffer]"


@mypyc_attr(allow_interpreted_subclasses=True)
class FrameSocket:
    """The frames of a socket.

    One thread reads. A second one may read ahead while a batch runs. Any thread may send.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self._large = memoryview(b"")
        self._lock = threading.Lock()
        self._answering: int | None = None
        self._reading = threading.Lock()
        # Frames that were read while a batch ran. None is the end of the stream.
        self._queued: deque[Frame | None] = deque()
        self._is_cancelled = False  # All clients of the current batch have disconnected.
        self._selector: selectors.BaseSelector | None = None
        # Whether `read` polls for a frame that may come soon, if nothing else needs the core.
        self.polls = False
        self._was_quick = False  # The last wait was shorter than POLL_S.

    def read(self) -> Frame | None:
        """Return the next frame, or None after the front end has closed the socket.

        The buffers of the frame are valid until the next `read`.
        """
        with self._reading:
            return self._queued.popleft() if self._queued else self._read()

    def is_cancelled(self) -> bool:
        """Tell whether all clients of the current batch, or the front end, have disconnected."""
        # If the lock is taken, another thread is reading.
        if self._reading.acquire(blocking=False):
            try:
                while not (self._queued and self._queued[-1] is None) and self.has_frame():
                    self._queue_next()
            finally:
                self._reading.release()
        return self._is_cancelled

    def _queue_next(self) -> None:
        # The frame in the old buffer keeps it.
        self._view, self._start, self._end = self._new_buffer()
        self._large = memoryview(b"")
        frame = self._read()
        if frame is None or frame.kind is not Kind.CANCEL:
            self._queued.append(frame)
        if frame is None or (frame.kind is Kind.CANCEL and frame.batch == self._answering):
            self._is_cancelled = True

    def _new_buffer(self) -> tuple[memoryview, int, int]:
        view, unread = memoryview(bytearray(BUFFER_BYTES)), self._end - self._start
        view[:unread] = self._view[self._start : self._end]
        return view, 0, unread

    def _read(self) -> Frame | None:
        if not self._receive_contiguous(wire.HEADER.size):
            return None
        header = wire.decode_header(self._view[self._start : self._end])
        self._start += wire.HEADER.size
        if header.size > BUFFER_BYTES:
            return self._read_large(header)
        if not self._receive_contiguous(header.size):
            return None
        start = self._start
        self._start += header.size
        return wire.decode(header, self._view[start : self._start])

    def send(
        self,
        kind: Kind,
        batch: int,
        items: Sequence[tuple[int, Buffer, Buffer]] = (),
        extra: Buffer = b"",
    ) -> None:
        """Send one frame."""
        buffers = wire.encode(kind, batch, items, extra)
        with self._lock:
            self._write(buffers)

    def begin(self, batch: int) -> None:
        """Allow pieces of this batch's responses until its reply."""
        self._answering = batch
        self._is_cancelled = False

    def send_piece(self, batch: int, position: int, headers: Buffer, body: Buffer) -> bool:
        """Send a piece of a response, and return True.

        The result is False, and nothing is sent, if the batch is not the current one. The front
        end would refuse the piece.
        """
        buffers = wire.encode(Kind.PIECE, batch, [(position, headers, body)])
        with self._lock:
            if batch != self._answering:
                return False
            self._write(buffers)
        return True

    def reply(
        self, batch: int, answers: Sequence[tuple[int, Buffer, Buffer]], extra: Buffer
    ) -> None:
        """Send the reply to a batch; further pieces are dropped."""
        buffers = wire.encode(Kind.REPLY, batch, answers, extra)
        with self._lock:
            self._answering = None
            self._write(buffers)

    def _write(self, buffers: Sequence[Buffer]) -> None:
        if sum(map(len, buffers)) <= MAX_JOINED_BYTES or not hasattr(self._sock, "sendmsg"):
            self._sock.sendall(b"".join(buffers))
        else:
            send_buffers(self._sock, buffers)

    def send_all(self, frames: Sequence[OutFrame]) -> None:
        """Send several frames with the system calls of one."""
        buffers = [buffer for frame in frames for buffer in wire.encode(*frame)]
        with self._lock:
            self._write(buffers)

    def has_frame(self) -> bool:
        """Tell whether a frame, or the beginning of one, has arrived."""
        if self._end > self._start:
            return True
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._sock, selectors.EVENT_READ)
        return bool(self._selector.select(0))

    def _receive_contiguous(self, size: int) -> bool:
        """Receive until `size` bytes lie at `_start`; return False at the end of the stream."""
        if self._end - self._start >= size:
            return True
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size > BUFFER_BYTES:
            unread = self._end - self._start
            self._view[:unread] = self._view[self._start : self._end]
            self._start, self._end = 0, unread
        while self._end - self._start < size:
            got = self._receive(self._view[self._end :])
            if not got:
                return False
            self._end += got
        return True

    def _receive(self, into: memoryview) -> int:
        if not self.polls:
            return self._sock.recv_into(into)
        until = time.monotonic() + POLL_S
        while self._was_quick:
            try:
                return self._sock.recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._was_quick = time.monotonic() < until
                os.sched_yield()
        got = self._sock.recv_into(into)
        self._was_quick = time.monotonic() < until
        return got

    def _read_large(self, header: wire.Header) -> Frame | None:
        """Read a frame that is larger than the buffer.

        The body of a single request gets memory of its own, which the handler keeps. Several
        bodies share memory that is used again.
        """
        if header.items == 1:
            return self._read_single(header)
        if header.size > MAX_REUSED_BYTES:
            payload = self._fill(memoryview(bytearray(header.size)))
        else:
            if len(self._large) < header.size:
                self._large = memoryview(bytearray(header.size))
            payload = self._fill(self._large[: header.size])
        return None if payload is None else wire.decode(header, payload)

    def _read_single(self, header: wire.Header) -> Frame | None:
        if not self._receive_contiguous(wire.ROW):
            return None
        code, meta_length, body_length = wire.decode_row(
            header, self._view[self._start : self._start + wire.ROW]
        )
        self._start += wire.ROW
        meta, body, extra = (
            bytearray(length)
            for length in (
                meta_length,
                body_length,
                header.size - wire.ROW - meta_length - body_length,
            )
        )
        if any(self._fill(memoryview(field)) is None for field in (meta, body, extra)):
            return None
        return Frame(header.kind, header.batch, [code], [(code, meta, body)], extra)

    def _fill(self, payload: memoryview) -> memoryview | None:
        """Fill a buffer from the stream; return None at the end of the stream."""
        filled = min(self._end - self._start, len(payload))
        payload[:filled] = self._view[self._start : self._start + filled]
        self._start += filled
        while filled < len(payload):
            got = self._sock.recv_into(payload[filled:])
            if not got:
                return None
            filled += got
        return payload


def send_buffers(sock: socket.socket, buffers: Sequence[Buffer]) -> None:
    """Send all buffers, even if the kernel takes only a part at a time."""
    waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
    first = 0
    while first < len(waiting):
        sent = sock.sendmsg(waiting[first : first + IOV_MAX])
        while sent:
            size = len(waiting[first])
            if sent < size:
                waiting[first] = waiting[first][sent:]
                break
            sent -= size
            first += 1


def _iov_max() -> int:
    try:
        known = os.sysconf("SC_IOV_MAX")
    except (AttributeError, ValueError, OSError):
        return 16  # the minimum of POSIX
    return known if known > 0 else 1024


IOV_MAX = _iov_max()
