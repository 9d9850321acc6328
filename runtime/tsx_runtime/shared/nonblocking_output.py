"""Standard output and error that never block: lines that cannot be written soon are dropped.

A full disk makes `write` fail, and a pipe without a reader blocks it for ever. Neither may disturb
a request, a worker or the front end. Dropped bytes are counted and reported later. The module does
not cover native code and child processes of a handler, which write to the descriptors directly.
"""

from __future__ import annotations

import atexit
import copy
import errno
import io
import logging
import logging.handlers
import os
import queue
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import BinaryIO, cast

MAX_STALL_S = 0.5  # the longest wait for a reader before output is dropped
MAX_QUEUED_RECORDS = 10_000  # records; one of a worker's output may contain many lines
MAX_QUEUED_CHARS = 64 << 20  # limits the memory in use while the disk hangs
PIPE_BUF = 4096  # A pipe accepts a write of up to this size completely or not at all.

Write = Callable[[memoryview], int]


def loss_text(lost_bytes: int) -> bytes:
    """Return the text line that reports lost bytes of output."""
    return b"[%d bytes of output were dropped: no reader, or the disk was full]\n" % lost_bytes


class LossyOutput(io.RawIOBase):
    """A raw output stream that accepts every write.

    It waits once for a stalled reader, then drops writes until the reader continues. A write of
    more than PIPE_BUF bytes may be cut off; the report of the lost bytes then begins on a new line.
    """

    def __init__(self, fd: int, max_stall_s: float = MAX_STALL_S) -> None:
        """Write to the descriptor `fd`."""
        self._fd = fd
        self._max_stall_s = max_stall_s
        self._write = _writer(fd)
        self._is_stalled = False
        self._is_cut = False  # Only a part of the last write was written.
        self.lost_bytes = 0  # dropped but not reported yet
        self.report_loss: Callable[[int], bytes] = loss_text
        self.copy: Callable[[bytes], None] | None = None  # a second receiver of all output
        self.transform: Callable[[bytes], bytes] | None = (
            None  # applied to the bytes before they are written
        )
        # The lock keeps lines of different threads apart. It is reentrant, because a signal handler
        # may print while the same thread is printing.
        self._lock = threading.RLock()

    def reset_lock_after_fork(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.RLock()

    def reopen(self) -> None:
        """Adapt to the descriptor after it was replaced."""
        self._write = _writer(self._fd)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Tell whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def write(self, data: object) -> int:
        """Write or drop bytes, and return their number in both cases."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # the base class promises less than a buffer
        with self._lock:
            if self.copy is not None:
                self.copy(bytes(view))
            if self.transform is not None:
                self._write_out(memoryview(self.transform(bytes(view))))
            else:
                self._write_out(view)
        return len(view)

    def write_line(self, line: bytes, copied_line: bytes) -> None:
        """Write a formatted line, and pass `copied_line` to the function `copy`."""
        with self._lock:
            if self.copy is not None:
                self.copy(copied_line)
            self._write_out(memoryview(line))

    def _write_out(self, view: memoryview) -> None:
        report = b""
        if self.lost_bytes:
            report = (b"\n" if self._is_cut else b"") + self.report_loss(self.lost_bytes)
        written = self._put(memoryview(report + view) if report else view)
        if written < len(report):
            self.lost_bytes += len(view)
        else:
            self.lost_bytes = len(report) + len(view) - written
        if written:
            self._is_cut = self.lost_bytes > 0 and written != len(report)

    def _put(self, view: memoryview) -> int:
        """Write as many bytes as the reader accepts, and return their number."""
        written = 0
        while written < len(view):
            try:
                written += self._write(view[written:])
                self._is_stalled = False
            except BlockingIOError:
                if self._is_stalled:
                    return written
                self._is_stalled = True
                _wait_writable(self._fd, self._max_stall_s)
            except OSError:
                return written
        return written


def install_lossy_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that drop what they cannot write."""
    _keep_stdin_open()
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if old is None:
            fd = _open_null(fd)
        else:
            with suppress(OSError):
                old.flush()
        encoding = getattr(old, "encoding", None) or "utf-8"
        # There is no buffer, so a printed line survives the death of the process.
        output = LossyOutput(fd)
        if hasattr(os, "register_at_fork"):  # Windows has no fork.
            os.register_at_fork(after_in_child=output.reset_lock_after_fork)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                cast("BinaryIO", output), encoding, "backslashreplace", line_buffering=True
            ),
        )


def log_in_background(handlers: Iterable[logging.Handler], level: int = logging.INFO) -> None:
    """Make a thread write all log records of this process, so that no caller waits for a disk."""
    handler = _QueueHandler(queue.Queue(MAX_QUEUED_RECORDS))
    listener = _Listener(handler, handlers)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    listener.start()
    atexit.register(listener.stop)


def send_output_to(path: str, label: str, *, include_python: bool = True) -> None:
    """Send the stdout and stderr of this process to a socket, including output of native code.

    Args:
        path: The path of the socket.
        label: The name of this process in the log.
        include_python: Whether to send the output of Python too. Otherwise only output of native
            code and child processes is sent, and only if it would go to a terminal.

    Raises:
        OSError: The socket does not answer.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not include_python and not os.isatty(fd):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(path)
            sock.sendall(f"{label}-{name}\n".encode())
            stream.flush()
            os.dup2(sock.fileno(), fd)
        if include_python and isinstance(stream.buffer, LossyOutput):
            stream.buffer.reopen()


class _QueueHandler(logging.handlers.QueueHandler):
    """A handler that drops records when the queue is full, and later reports the loss."""

    def __init__(self, records: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(records)
        self._records = records
        self._queued_chars = 0
        self._lost_lines = 0  # dropped but not reported yet

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message at once, because its arguments may change.

        The traceback is not added to it, because a JSON line has a field for it.
        """
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, after a report of lost lines."""
        lines = record.msg.count("\n") + 1
        if self._lost_lines:
            text = (
                f"{self._lost_lines} lines of the log were dropped: they came faster than they"
                " could be written"
            )
            if not self._put(
                logging.LogRecord("tsx.server", logging.WARNING, "", 0, text, None, None)
            ):
                self._lost_lines += lines
                return
            self._lost_lines = 0
        if not self._put(record):
            self._lost_lines += lines

    def _put(self, record: logging.LogRecord) -> bool:
        size = len(record.msg)
        if self._queued_chars + size > MAX_QUEUED_CHARS or self._records.full():
            return False
        self._records.put_nowait(record)
        self._queued_chars += size
        return True

    def subtract(self, record: logging.LogRecord) -> None:
        """Subtract a written record from the size of the queue."""
        with self.lock or nullcontext():
            self._queued_chars -= len(record.msg)


class _Listener(logging.handlers.QueueListener):
    """The thread that writes the records of a `_QueueHandler`."""

    def __init__(self, source: _QueueHandler, handlers: Iterable[logging.Handler]) -> None:
        super().__init__(source.queue, *handlers, respect_handler_level=True)
        self._source = source

    def handle(self, record: logging.LogRecord) -> None:
        """Write a record, then subtract it from the size of the queue."""
        super().handle(record)
        self._source.subtract(record)


def _writer(fd: int) -> Write:
    """Return a write function that raises BlockingIOError instead of waiting.

    The descriptor itself must stay blocking, since the shell and other processes share it.
    Therefore a pipe or a terminal is opened a second time. If that fails, each write polls first.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        sock = socket.socket(fileno=os.dup(fd))
        return lambda view: sock.send(view, socket.MSG_DONTWAIT)
    if stat.S_ISFIFO(mode) or os.isatty(fd):
        try:
            nonblocking_fd = os.open(
                f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
        except (AttributeError, OSError):  # The pipe belongs to another user.
            return lambda view: _write_if_room(fd, view)
        return lambda view: os.write(nonblocking_fd, view)
    return lambda view: os.write(fd, view)


def _write_if_room(fd: int, view: memoryview) -> int:
    if not _wait_writable(fd, 0):
        raise BlockingIOError(errno.EAGAIN, "no room")
    return os.write(fd, view[:PIPE_BUF])


def _wait_writable(fd: int, timeout_s: float) -> bool:
    if not hasattr(select, "poll"):  # Windows has no poll.
        return True
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(1000 * timeout_s))


def _keep_stdin_open() -> None:
    """Open /dev/null as stdin if it is closed.

    Otherwise the event loop would get descriptor 0, and would abort when it closes it.
    """
    try:
        os.fstat(0)
    except OSError:
        null = os.open(os.devnull, os.O_RDONLY)
        if null:
            os.dup2(null, 0)
            os.close(null)


def _open_null(fd: int) -> int:
    """Open /dev/null at a descriptor that was closed when Python started.

    Otherwise a socket could get that number and receive printed text.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(fd)
    except OSError:
        os.dup2(null, fd)
        os.close(null)
        return fd
    return null
