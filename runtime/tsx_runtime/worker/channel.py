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

# The size of the read buffer. A larger frame gets memory of its own.
BUFFER_BYTES = 256 << 10
MAX_REUSED_BYTES = 32 << 20  # the largest frame whose memory is reused for the next one
# Buffers up to this size are joined: one copy is cheaper than a system call for a list of buffers.
MAX_JOINED_BYTES = 32 << 10
# The longest time to poll. A blocking read costs about half of it for sleep and wake-up.
POLL_S = 200e-6
# On a single core, polling would keep the sender from running.
CAN_POLL = hasattr(socket, "MSG_DONTWAIT") and hasattr(os, "sched_yield") and cpu_count() > 1

# The arguments of `wire.encode`: the kind, the batch number, the items and `extra`.
OutFrame: TypeAlias = "tuple[Kind, int, Sequence[tuple[int, Buffer, Buffer]], Buffer]"


@mypyc_attr(allow_interpreted_subclasses=True)
class FrameSocket:
    """A socket that receives and sends frames.

    One thread reads; while a batch runs, a second thread may read ahead. Any thread may send.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self._large = memoryview(b"")
        self._lock = threading.Lock()
        self._current_batch: int | None = None
        self._reading = threading.Lock()
        # Frames that were read while a batch ran. None is the end of the stream.
        self._queued: deque[Frame | None] = deque()
        self._is_cancelled = False  # All clients of the current batch have disconnected.
        self._selector: selectors.BaseSelector | None = None
        # Whether `read` polls for a frame that may come soon, if nothing else needs the core.
        self.is_polling = False
        self._was_wait_short = False  # The last wait was shorter than POLL_S.

    def read(self) -> Frame | None:
        """Return the next frame, or None after the front end has closed the socket.

        The buffers of the frame are valid until the next `read`.
        """
        with self._reading:
            return self._queued.popleft() if self._queued else self._read()

    def is_cancelled(self) -> bool:
        """Tell whether all clients of the current batch, or the front end, have disconnected."""
        # If the lock is taken, another thread already reads the frames that arrive.
        if self._reading.acquire(blocking=False):
            try:
                while not (self._queued and self._queued[-1] is None) and self.has_frame():
                    self._queue_next()
            finally:
                self._reading.release()
        return self._is_cancelled

    def _queue_next(self) -> None:
        # The current frame still uses the old buffer.
        self._view, self._start, self._end = self._new_buffer()
        self._large = memoryview(b"")
        frame = self._read()
        if frame is None or frame.kind is not Kind.CANCEL:
            self._queued.append(frame)
        if frame is None or (frame.kind is Kind.CANCEL and frame.batch == self._current_batch):
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
        """Begin a batch: pieces of its responses may be sent until its reply."""
        self._current_batch = batch
        self._is_cancelled = False

    def send_piece(self, batch: int, position: int, headers: Buffer, body: Buffer) -> bool:
        """Send a piece of a response of the current batch.

        Returns:
            Whether the piece was sent. A piece of another batch is dropped, since the front end
            would refuse it.
        """
        buffers = wire.encode(Kind.PIECE, batch, [(position, headers, body)])
        with self._lock:
            if batch != self._current_batch:
                return False
            self._write(buffers)
        return True

    def reply(
        self, batch: int, answers: Sequence[tuple[int, Buffer, Buffer]], extra: Buffer
    ) -> None:
        """Send the reply to a batch; further pieces are dropped."""
        buffers = wire.encode(Kind.REPLY, batch, answers, extra)
        with self._lock:
            self._current_batch = None
            self._write(buffers)

    def _write(self, buffers: Sequence[Buffer]) -> None:
        if sum(map(len, buffers)) <= MAX_JOINED_BYTES or not hasattr(self._sock, "sendmsg"):
            self._sock.sendall(b"".join(buffers))
        else:
            send_buffers(self._sock, buffers)

    def send_all(self, frames: Sequence[OutFrame]) -> None:
        """Send several frames together, with as few system calls as one frame needs."""
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
            byte_count = self._receive(self._view[self._end :])
            if not byte_count:
                return False
            self._end += byte_count
        return True

    def _receive(self, target: memoryview) -> int:
        if not self.is_polling:
            return self._sock.recv_into(target)
        deadline = time.monotonic() + POLL_S
        while self._was_wait_short:
            try:
                return self._sock.recv_into(target, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._was_wait_short = time.monotonic() < deadline
                os.sched_yield()
        byte_count = self._sock.recv_into(target)
        self._was_wait_short = time.monotonic() < deadline
        return byte_count

    def _read_large(self, header: wire.Header) -> Frame | None:
        """Read a frame that is larger than the buffer.

        The body of a single request gets memory of its own, which the handler may keep. The bodies
        of several requests share memory that is reused for later frames.
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
            byte_count = self._sock.recv_into(payload[filled:])
            if not byte_count:
                return None
            filled += byte_count
        return payload


def send_buffers(sock: socket.socket, buffers: Sequence[Buffer]) -> None:
    """Send all buffers, even if the kernel accepts only a part of them per call."""
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    index = 0
    while index < len(views):
        sent_bytes = sock.sendmsg(views[index : index + IOV_MAX])
        while sent_bytes:
            size = len(views[index])
            if sent_bytes < size:
                views[index] = views[index][sent_bytes:]
                break
            sent_bytes -= size
            index += 1


def _iov_max() -> int:
    try:
        limit = os.sysconf("SC_IOV_MAX")
    except (AttributeError, ValueError, OSError):
        return 16  # the minimum of POSIX
    return limit if limit > 0 else 1024


IOV_MAX = _iov_max()
