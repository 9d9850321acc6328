"""The worker's end of its socket: blocking, exact reads of frames, and writes without copies of
bodies.
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

SMALL = 256 << 10  # frames up to this size are read without an allocation of their own
KEPT = 32 << 20  # a larger frame gets memory of its own, which does not stay
JOINED = 32 << 10  # up to this size one copy is cheaper than a list of pieces for the kernel
POLL = 200e-6  # seconds; to fall asleep and to be woken costs about half of that
CAN_POLL = (
    hasattr(socket, "MSG_DONTWAIT") and hasattr(os, "sched_yield") and cpu_count() > 1
)  # on one core nobody else could send

OutFrame: TypeAlias = (
    "tuple[Kind, int, Sequence[tuple[int, Buffer, Buffer]], Buffer]"  # kind, batch, items, extra
)


@mypyc_attr(allow_interpreted_subclasses=True)
class FrameSocket:
    """One thread reads; one other may read ahead while a batch is answered; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._view = memoryview(bytearray(SMALL))
        self._start = 0
        self._end = 0
        self._large = memoryview(b"")
        self._lock = threading.Lock()
        self._answering: int | None = None
        self._reading = threading.Lock()
        self._aside: deque[Frame | None] = (
            deque()
        )  # read while a batch was answered; None is the end of the stream
        self._called_off = False  # whether all clients of the current batch have disconnected
        self._selector: selectors.BaseSelector | None = None
        # whether `read` looks for what is likely to come at once: for a process in which nothing
        # else runs meanwhile
        self.polls = False
        self._is_quick = False  # whether the last wait was shorter than `POLL`

    def read(self) -> Frame | None:
        """The next frame, or None when the front end has closed.

        Its buffers are valid until the next `read`.
        """
        with self._reading:
            return self._aside.popleft() if self._aside else self._read()

    def is_called_off(self) -> bool:
        """Whether the front end has cancelled the current batch, since all of its clients have
        disconnected, or is gone itself.
        """
        if self._reading.acquire(blocking=False):  # else another thread is looking already
            try:
                while not (self._aside and self._aside[-1] is None) and self.has_frame():
                    self._put_aside()
            finally:
                self._reading.release()
        return self._called_off

    def _put_aside(self) -> None:
        self._view, self._start, self._end = (
            self._fresh()
        )  # the old memory stays with the frame that is in it
        self._large = memoryview(b"")
        frame = self._read()
        if frame is None or frame.kind is not Kind.CANCEL:
            self._aside.append(frame)
        if frame is None or (frame.kind is Kind.CANCEL and frame.batch == self._answering):
            self._called_off = True

    def _fresh(self) -> tuple[memoryview, int, int]:
        view, rest = memoryview(bytearray(SMALL)), self._end - self._start
        view[:rest] = self._view[self._start : self._end]
        return view, 0, rest

    def _read(self) -> Frame | None:
        if not self._have(wire.HEADER.size):
            return None
        header = wire.decode_header(self._view[self._start : self._end])
        self._start += wire.HEADER.size
        if header.size > SMALL:
            return self._read_large(header)
        if not self._have(header.size):
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
        buffers = wire.encode(kind, batch, items, extra)
        with self._lock:
            self._write(buffers)

    def begin(self, batch: int) -> None:
        """From now on, and until its reply, pieces of this batch's answers may be sent."""
        self._answering = batch
        self._called_off = False

    def send_piece(self, batch: int, position: int, headers: Buffer, body: Buffer) -> bool:
        """False, and nothing is sent, where the batch is not the current one: the front end would
        not accept it.
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
        buffers = wire.encode(Kind.REPLY, batch, answers, extra)
        with self._lock:
            self._answering = None
            self._write(buffers)

    def _write(self, buffers: Sequence[Buffer]) -> None:
        if sum(map(len, buffers)) <= JOINED or not hasattr(self._sock, "sendmsg"):
            self._sock.sendall(b"".join(buffers))
        else:
            send_buffers(self._sock, buffers)

    def send_all(self, frames: Sequence[OutFrame]) -> None:
        """Send several frames with as few system calls as one."""
        buffers = [buffer for frame in frames for buffer in wire.encode(*frame)]
        with self._lock:
            self._write(buffers)

    def has_frame(self) -> bool:
        """Whether `read` would return at once, or once the rest of a frame has arrived whose
        beginning has.
        """
        if self._end > self._start:
            return True
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._sock, selectors.EVENT_READ)
        return bool(self._selector.select(0))

    def _have(self, size: int) -> bool:
        """Have `size` bytes in one piece at `_start`; False at the end of the stream."""
        if self._end - self._start >= size:
            return True
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size > SMALL:
            rest = self._end - self._start
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        while self._end - self._start < size:
            got = self._receive(self._view[self._end :])
            if not got:
                return False
            self._end += got
        return True

    def _receive(self, into: memoryview) -> int:
        if not self.polls:
            return self._sock.recv_into(into)
        until = time.monotonic() + POLL
        while self._is_quick:
            try:
                return self._sock.recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._is_quick = time.monotonic() < until
                os.sched_yield()
        got = self._sock.recv_into(into)
        self._is_quick = time.monotonic() < until
        return got

    def _read_large(self, header: wire.Header) -> Frame | None:
        """One request's body is read into memory of its own, which the handler gets; those of
        several into memory that is used again.
        """
        if header.items == 1:
            return self._read_single(header)
        if header.size > KEPT:
            payload = self._fill(memoryview(bytearray(header.size)))
        else:
            if len(self._large) < header.size:
                self._large = memoryview(bytearray(header.size))
            payload = self._fill(self._large[: header.size])
        return None if payload is None else wire.decode(header, payload)

    def _read_single(self, header: wire.Header) -> Frame | None:
        if not self._have(wire.ROW):
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
        """Exactly as many bytes as fit; None at the end of the stream."""
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
    """Send all of `buffers`, however little the kernel takes at a time."""
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
        return 16  # the least that POSIX allows
    return known if known > 0 else 1024


IOV_MAX = _iov_max()
