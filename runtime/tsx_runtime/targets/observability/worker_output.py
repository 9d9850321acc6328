"""The output of workers, as lines of model_log.log: each worker sends its stdout and stderr to a
socket of the front end.
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
    MARK,
    MARK_END,
    escaped,
    escaped_json,
    has_colour,
    json_line,
)
from tsx_runtime.shared.socket_paths import socket_directory

MODEL_LOG = "MODEL_LOG"
PATIENCE = 2.0  # seconds
PAUSE = 0.1  # seconds until a connection that could not be taken is tried again
# seconds in which lines are collected: waking up for each would cost the server more than the line
GATHER = 0.05
PIECE = 64 << 10
MANY = (
    PIECE // 4
    # bytes of one worker that are written without waiting: a worker that prints so much must not
    # block
)
_MARKED = re.compile(f"{MARK}([0-9]{{1,2}}){MARK_END}")
_NAME = re.compile(r"W-([^-]+)-(.+)_([^_]+)-(stdout|stderr)")
LONGEST = 64 << 10  # bytes of one line; a longer one is cut
LONGEST_JSON = 1 << 20  # of one that has such a line in it, each of whose characters may take six


@contextlib.contextmanager
def worker_output(*, is_json: bool = False, at_terminal: bool = False) -> Iterator[str]:
    """The path of the socket; a thread reads it until this is closed.

    `at_terminal`: the lines go there, and not to the log.
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


class _Source:
    """One stream of one worker. Its first line names it."""

    def __init__(self, longest: int) -> None:
        self.name = ""
        self.begun = b""  # of a line that is not complete yet
        self._longest = longest

    def take(self, data: bytes) -> list[str]:
        *lines, self.begun = (self.begun + data).split(b"\n")
        if len(self.begun) > self._longest:
            lines.append(self.begun)
            self.begun = b""
        texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
        if texts and not self.name:
            self.name = texts.pop(0)
        return texts


class TerminalOutput:
    """The terminal in place of a log: lines look like those that Python prints."""

    is_json = False

    def add(self, text: str, now: float, name: str = "", level: int = logging.INFO) -> None:
        found = _NAME.fullmatch(name)
        _, model, version, stream = found.groups() if found else ("", name, "", "stderr")
        target = getattr(sys, stream)
        words = f"{model} {version} |"
        target.write(
            f"\x1b[2m{words}\x1b[0m {text}\n" if has_colour(target) else f"{words} {text}\n"
        )

    def flush(self) -> None:
        """Each line is written at once."""


class _Reader(threading.Thread):
    def __init__(self, path: str, book: Logbook | TerminalOutput) -> None:
        super().__init__(name="tsx-model-log", daemon=True)
        self._book = book
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen(1024)
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = selectors.DefaultSelector()
        self._closing.register(self._woken, selectors.EVENT_READ)
        self._has_many = False

    def run(self) -> None:
        while self._turn():
            self._book.flush()
            if not self._has_many:
                self._closing.select(GATHER)
        self._book.flush()
        self._closing.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def close(self) -> None:
        """Read what was sent, then end.

        A program of a handler that goes on printing is not waited for.
        """
        self._wake.close()  # which the other end reads
        self.join(PATIENCE)

    def _turn(self) -> bool:
        """Read what was sent. False once the thread should end and nothing is left."""
        ready = self._selector.select()
        self._has_many = False
        going_on = True
        for key, _ in ready:
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj is self._woken:
                going_on = len(ready) > 1
            else:
                self._read(key)
        return going_on

    def _accept(self) -> None:
        try:
            source, _ = self._listening.accept()
        # the server has no descriptor left: this worker's output waits, and that of others is read
        except OSError:
            time.sleep(PAUSE)
            return
        self._selector.register(
            source, selectors.EVENT_READ, _Source(LONGEST_JSON if self._book.is_json else LONGEST)
        )

    def _read(self, key: selectors.SelectorKey) -> None:
        sock, source = key.fileobj, key.data
        assert isinstance(sock, socket.socket)
        try:
            data = sock.recv(PIECE)
        except OSError:
            data = b""
        self._has_many = self._has_many or len(data) >= MANY
        for text in source.take(data or (b"\n" if source.begun else b"")):
            self._add(text, source.name)
        if not data:
            self._selector.unregister(sock)
            sock.close()

    def _add(self, text: str, name: str) -> None:
        """What a worker logs is marked with its level; other lines have that of their stream, as in
        TorchServe.
        """
        now = time.time()
        if self._book.is_json:
            self._book.add(
                escaped_json(text) if _is_own_json(text) else as_json(now, text, name), now
            )
            return
        level = logging.WARNING if name.endswith("-stderr") else logging.INFO
        if marked := _MARKED.match(text):
            level, text = int(marked[1]), text[marked.end() :]
        self._book.add(escaped(text), now, escaped(name), level)


def _is_own_json(text: str) -> bool:
    """Whether Python wrote it as a line of the log.

    Native code may print into the middle of one, or what looks like one.
    """
    if not text.startswith('{"time": '):
        return False
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def as_json(now: float, text: str, name: str) -> str:
    """A line of native code, or of a program that a handler started."""
    found = _NAME.fullmatch(name)
    worker, model, version, stream = found.groups() if found else ("", "", "", "")
    return json_line(
        now,
        "info",
        "handler",
        text,
        {"stream": stream, "model": model, "version": version, "worker": worker},
    )
