"""The collection of workers' output, which becomes lines of model_log.log.

Each worker sends its stdout and stderr to a socket of the server process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tsx_runtime.shared.line_log import Logbook
from tsx_runtime.shared.log_format import (
    LEVEL_MARK,
    LEVEL_MARK_END,
    escaped,
    escaped_json,
    has_colour,
    json_line,
)
from tsx_runtime.shared.socket_paths import socket_directory

MODEL_LOG = "MODEL_LOG"
CLOSE_TIMEOUT_S = 2.0
ACCEPT_RETRY_S = 0.1
# Lines are collected for this time, because waking up for each line takes more time than the line.
COLLECT_S = 0.05
READ_BYTES = 64 << 10
# After a read of this size, the next one follows at once, so that the worker's writes do not block.
BUSY_BYTES = READ_BYTES // 4
_LEVEL_MARK = re.compile(f"{LEVEL_MARK}([0-9]{{1,2}}){LEVEL_MARK_END}")
_NAME = re.compile(r"W-([^-]+)-(.+)_([^_]+)-(stdout|stderr)")
MAX_LINE_BYTES = 64 << 10  # longer lines are split
MAX_JSON_LINE_BYTES = 1 << 20  # In JSON, a character may take six bytes.


@contextlib.contextmanager
def worker_output(*, is_json: bool = False, at_terminal: bool = False) -> Iterator[str]:
    """Yield the path of the socket; a thread reads it until the context ends.

    With `at_terminal`, lines are written to the terminal, not to the log.
    """
    with tempfile.TemporaryDirectory(prefix="tsx-log-", dir=socket_directory()) as directory:
        path = str(Path(directory) / "output")
        reader = _Reader(
            path,
            TerminalOutput() if at_terminal else Logbook(MODEL_LOG, threads=True, is_json=is_json),
        )
        reader.start()
        try:
            yield path
        finally:
            reader.close()


class _OutputStream:
    """The stdout or stderr of one worker; the first line is the stream's name."""

    def __init__(self, max_bytes: int) -> None:
        self.name = ""
        self.partial = b""  # the beginning of an incomplete line
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete with `data`."""
        *lines, self.partial = (self.partial + data).split(b"\n")
        if len(self.partial) > self._max_bytes:
            lines.append(self.partial)
            self.partial = b""
        texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
        if texts and not self.name:
            self.name = texts.pop(0)
        return texts


class TerminalOutput:
    """The terminal, which is used like a `Logbook`; lines are printed with their model."""

    is_json = False

    def add(self, text: str, now: float, name: str = "", level: int = logging.INFO) -> None:
        match = _NAME.fullmatch(name)
        _, model, version, stream = match.groups() if match else ("", name, "", "stderr")
        target = getattr(sys, stream)
        label = f"{model} {version} |"
        target.write(
            f"\x1b[2m{label}\x1b[0m {text}\n" if has_colour(target) else f"{label} {text}\n"
        )

    def flush(self) -> None:
        """Do nothing, because each line is written at once."""


class _Reader(threading.Thread):
    def __init__(self, path: str, book: Logbook | TerminalOutput) -> None:
        super().__init__(name="tsx-model-log", daemon=True)
        self._book = book
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(1024)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._close_selector = selectors.DefaultSelector()
        self._close_selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._is_busy = False

    def run(self) -> None:
        while self._read_ready():
            self._book.flush()
            if not self._is_busy:
                self._close_selector.select(COLLECT_S)
        self._book.flush()
        self._close_selector.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def close(self) -> None:
        """Read all output that was sent, and then end the thread.

        If a handler's program continues to print, this waits at most `CLOSE_TIMEOUT_S`.
        """
        self._wake_sender.close()  # This makes the receiver readable.
        self.join(CLOSE_TIMEOUT_S)

    def _read_ready(self) -> bool:
        """Read output; return False if the thread should end and all output has been read."""
        ready = self._selector.select()
        self._is_busy = False
        is_running = True
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_receiver:
                is_running = len(ready) > 1
            else:
                self._read(key)
        return is_running

    def _accept(self) -> None:
        try:
            source, _ = self._listener.accept()
        except OSError:
            # The process has no file descriptor left. Other workers' output is still read.
            time.sleep(ACCEPT_RETRY_S)
            return
        self._selector.register(
            source,
            selectors.EVENT_READ,
            _OutputStream(MAX_JSON_LINE_BYTES if self._book.is_json else MAX_LINE_BYTES),
        )

    def _read(self, key: selectors.SelectorKey) -> None:
        sock, source = key.fileobj, key.data
        assert isinstance(sock, socket.socket)
        try:
            data = sock.recv(READ_BYTES)
        except OSError:
            data = b""
        self._is_busy = self._is_busy or len(data) >= BUSY_BYTES
        for text in source.feed(data or (b"\n" if source.partial else b"")):
            self._add(text, source.name)
        if not data:
            self._selector.unregister(sock)
            sock.close()

    def _add(self, text: str, name: str) -> None:
        """Add a line with its level.

        Lines of a worker's log begin with their level. Other lines have the level of their stream,
        as in TorchServe.
        """
        now = time.time()
        if self._book.is_json:
            self._book.add(
                escaped_json(text) if _is_worker_json(text) else as_json(now, text, name), now
            )
            return
        level = logging.WARNING if name.endswith("-stderr") else logging.INFO
        if mark := _LEVEL_MARK.match(text):
            level, text = int(mark[1]), text[mark.end() :]
        self._book.add(escaped(text), now, escaped(name), level)


def _is_worker_json(text: str) -> bool:
    """Tell whether a text is a JSON line of a worker's log.

    The text is parsed, because native code may print into the middle of such a line.
    """
    if not text.startswith('{"time": '):
        return False
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def as_json(now: float, text: str, name: str) -> str:
    """Format a line as JSON that native code, or a program of a handler, has printed."""
    match = _NAME.fullmatch(name)
    worker, model, version, stream = match.groups() if match else ("", "", "", "")
    return json_line(
        now,
        "info",
        "handler",
        text,
        {"stream": stream, "model": model, "version": version, "worker": worker},
    )
