"""Standard output and error that never block a writer: lines that cannot be written soon are
dropped, counted, and reported later.

A full disk is an error of `write`, and a pipe without a reader makes it wait for ever. Neither may
fail a request that a handler prints from, hold up a worker, or hold up the front end. Only what
Python writes comes through here: native code and programs that a handler starts write to the
descriptors themselves.
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

PATIENCE = 0.5  # seconds for which a stalled reader is waited for before output is dropped
# records that wait for the thread which writes them; what workers print comes in records of many
# lines
LOG_LINES = 10_000
LOG_SIZE = 64 << 20  # characters that wait for it: a disk that hangs must not fill the memory
CHUNK = 4096  # bytes that go into a pipe whole, or not at all

Write = Callable[[memoryview], int]


def in_words(lost: int) -> bytes:
    return b"[%d bytes of output were dropped: no reader, or the disk was full]\n" % lost


class LossyOutput(io.RawIOBase):
    """Accepts every write.

    Blocks once for a stalled reader, then drops whole writes until it reads.

    A write of more than 4 KiB may be cut. The report of the lost bytes then begins on a line of its
    own.
    """

    def __init__(self, fd: int, patience: float = PATIENCE) -> None:
        self._fd = fd
        self._patience = patience
        self._write = _writer(fd)
        self._late = False
        self._is_cut = False  # whether only a part of the last write was written
        self.lost = 0  # bytes that were dropped and not reported yet
        self.notice: Callable[[int], bytes] = in_words  # makes of their number a line
        self.copy: Callable[[bytes], None] | None = None  # gets everything as well
        self.dress: Callable[[bytes], bytes] | None = None  # makes of it what is written
        # what two threads print at once are two lines; a signal's handler may print while one
        # prints
        self._lock = threading.RLock()

    def begin_anew(self) -> None:
        """In a process that was forked, another thread may have held the lock."""
        self._lock = threading.RLock()

    def reopen(self) -> None:
        """The descriptor means something else from now on."""
        self._write = _writer(self._fd)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # the base class promises less than a buffer
        with self._lock:
            if self.copy is not None:
                self.copy(bytes(view))
            self._write_out(view if self.dress is None else memoryview(self.dress(bytes(view))))
        return len(view)

    def put_line(self, line: bytes, copied: bytes) -> None:
        """A whole line that is formatted already; a copy gets another text of it."""
        with self._lock:
            if self.copy is not None:
                self.copy(copied)
            self._write_out(memoryview(line))

    def _write_out(self, view: memoryview) -> None:
        report = (b"\n" if self._is_cut else b"") + self.notice(self.lost) if self.lost else b""
        done = self._put(memoryview(report + view) if report else view)
        if done < len(report):
            self.lost += len(view)
        else:
            self.lost = len(report) + len(view) - done
        if done:
            self._is_cut = self.lost > 0 and done != len(report)

    def _put(self, view: memoryview) -> int:
        """How much of it was written."""
        done = 0
        while done < len(view):
            try:
                done += self._write(view[done:])
                self._late = False
            except BlockingIOError:
                if self._late:
                    return done
                self._late = True
                _wait_writable(self._fd, self._patience)
            except OSError:
                return done
        return done


def keep_going() -> None:
    """Have `sys.stdout` and `sys.stderr` drop what cannot be written.

    For a whole process: it stays so.
    """
    _keep_stdin_taken()
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if old is None:
            fd = _stand_in(fd)
        else:
            with suppress(OSError):
                old.flush()
        encoding = getattr(old, "encoding", None) or "utf-8"
        # not the usual buffer: a line is there when it was printed, also when the process is killed
        # next
        raw = LossyOutput(fd)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=raw.begin_anew)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                cast("BinaryIO", raw), encoding, "backslashreplace", line_buffering=True
            ),
        )


def log_in_background(handlers: Iterable[logging.Handler], level: int = logging.INFO) -> None:
    """A thread writes what is logged, so that no caller waits for a disk.

    For the whole process, and for good.
    """
    queued = _QueueHandler(queue.Queue(LOG_LINES))
    listener = _Listener(queued, handlers)
    root = logging.getLogger()
    root.handlers[:] = [queued]
    root.setLevel(level)
    listener.start()
    atexit.register(listener.stop)


def send_output_to(path: str, label: str, *, all_of_it: bool = True) -> None:
    """Send what this process writes to stdout and stderr, native code's output too, to the socket
    at `path`. Raises OSError.

    Not `all_of_it`: only native code's, and that of programs that a handler starts, and only what
    would go to a terminal.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not all_of_it and not os.isatty(fd):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(path)
            sock.sendall(f"{label}-{name}\n".encode())
            stream.flush()
            os.dup2(sock.fileno(), fd)
        if all_of_it and isinstance(stream.buffer, LossyOutput):
            stream.buffer.reopen()


class _QueueHandler(logging.handlers.QueueHandler):
    def __init__(self, records: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(records)
        self._records = records
        self._waiting = 0  # characters
        self._lost = 0  # lines that found no room, and are not reported yet

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Its arguments may change once it is logged; a traceback stays beside the words, where
        JSON has it.
        """
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        lines = record.msg.count("\n") + 1
        if self._lost:
            text = (
                f"{self._lost} lines of the log were dropped: they came faster than they could be"
                " written"
            )
            if not self._put(
                logging.LogRecord("tsx.server", logging.WARNING, "", 0, text, None, None)
            ):
                self._lost += lines
                return
            self._lost = 0
        if not self._put(record):
            self._lost += lines

    def _put(self, record: logging.LogRecord) -> bool:
        size = len(record.msg)
        if self._waiting + size > LOG_SIZE or self._records.full():
            return False
        self._records.put_nowait(record)
        self._waiting += size
        return True

    def taken(self, record: logging.LogRecord) -> None:
        with self.lock or nullcontext():
            self._waiting -= len(record.msg)


class _Listener(logging.handlers.QueueListener):
    def __init__(self, queued: _QueueHandler, handlers: Iterable[logging.Handler]) -> None:
        super().__init__(queued.queue, *handlers, respect_handler_level=True)
        self._queued = queued

    def handle(self, record: logging.LogRecord) -> None:
        super().handle(record)
        self._queued.taken(record)


def _writer(fd: int) -> Write:
    """A write that raises BlockingIOError where the plain one would wait.

    The descriptor itself stays as it is: it is shared with the shell and with other processes,
    which need it to block. So a pipe or a terminal is opened once more; what cannot be is polled
    for room before each piece.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        sock = socket.socket(fileno=os.dup(fd))
        return lambda view: sock.send(view, socket.MSG_DONTWAIT)
    if stat.S_ISFIFO(mode) or os.isatty(fd):
        try:
            own = os.open(
                f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
        except (AttributeError, OSError):  # no Linux, or another user's pipe
            return lambda view: _write_if_room(fd, view)
        return lambda view: os.write(own, view)
    return lambda view: os.write(fd, view)


def _write_if_room(fd: int, view: memoryview) -> int:
    if not _wait_writable(fd, 0):
        raise BlockingIOError(errno.EAGAIN, "no room")
    return os.write(fd, view[:CHUNK])


def _wait_writable(fd: int, timeout: float) -> bool:
    if not hasattr(select, "poll"):  # Windows
        return True
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(1000 * timeout))


def _keep_stdin_taken() -> None:
    """Where it was closed when the process started, the event loop would get its number, and abort
    when it gives that back.
    """
    try:
        os.fstat(0)
    except OSError:
        null = os.open(os.devnull, os.O_RDONLY)
        if null:
            os.dup2(null, 0)
            os.close(null)


def _stand_in(fd: int) -> int:
    """For a descriptor that was closed when Python started: taken, so that no socket gets its
    number and then what is printed.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(fd)
    except OSError:
        os.dup2(null, fd)
        os.close(null)
        return fd
    return null
