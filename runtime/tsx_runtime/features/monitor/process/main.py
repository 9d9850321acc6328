"""The monitor process: it reads frames from stdin and writes frames to stdout (`messages.py`)."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tsx_runtime.errors import TsxError, error_body
from tsx_runtime.features.monitor.messages import (
    FRAME,
    MAX_HEAD_BYTES,
    STORE_VARIABLE,
    MonitorSample,
    encode_frame,
)
from tsx_runtime.features.monitor.process.events import EventSender
from tsx_runtime.features.monitor.process.monitor import COMMIT_S, Monitor
from tsx_runtime.features.monitor.process.operations import Operations
from tsx_runtime.features.monitor.process.store import MonitorStore

NICENESS = 19  # the lowest priority
AUTOGROUP = Path("/proc/self/autogroup")


class MonitorProcess:
    """The loop of the process, in one thread."""

    def __init__(self, monitor: Monitor, target: BinaryIO) -> None:
        self._monitor = monitor
        self._operations = Operations(monitor)
        self._target = target
        self._logged: set[str] = set()

    def run(self, source: int) -> None:
        """Read frames from a descriptor until its end, then store everything."""
        self._work()
        self._send({"kind": "ready", "problem": self._monitor.store_problem})
        while True:
            self._work()
            if select.select([source], [], [], COMMIT_S)[0]:
                try:
                    head_size, body_size = FRAME.unpack(_read(source, FRAME.size))
                    head, body = _read(source, head_size), _read(source, body_size)
                except EOFError:
                    break
                self._handle(head, body)
        try:
            self._monitor.close()
        except Exception as error:
            self._log(error)

    def _work(self) -> None:
        try:
            if states := self._monitor.work(time.time()):
                self._send({"kind": "state", "states": [state._asdict() for state in states]})
        except Exception as error:  # No fault of one model ends the monitoring of all.
            self._log(error)

    def _handle(self, text: bytes, body: bytes) -> None:
        head: dict[str, Any] = {}
        status, result = 200, b""
        try:
            head = dict(json.loads(text))
            match head["kind"]:
                case "samples":
                    for sample in self._monitor.decode(head["model"], head["version"], body):
                        self._add(sample)
                case "version":
                    self._monitor.set_version(head, body)
                case "end":
                    self._monitor.end(head["model"], head["version"])
                case "call":
                    result = self._operations.call(head["operation"], body, head["arguments"])
        except Exception as error:  # The next frame may be a good one.
            if not isinstance(error, TsxError):
                self._log(error)
                self._monitor.dropped[str(head.get("model"))]["invalid"] += 1
                error = TsxError("The monitor process has failed; the server's log has the reason.")
            status, result = error.status, error_body(error.status, error.type, error.message)
        if len(result) > MAX_HEAD_BYTES:
            message = f"The result has {len(result):,} bytes, more than {MAX_HEAD_BYTES:,}."
            status, result = 500, error_body(500, TsxError.type, message)
        if head.get("kind") == "call":
            self._send({"kind": "result", "id": head.get("id"), "status": status}, result)

    def _add(self, sample: MonitorSample) -> None:
        try:
            self._monitor.add_sample(sample)
        except Exception as error:  # The other samples of the message are examined.
            self._log(error)
            self._monitor.dropped[sample.model]["invalid"] += 1

    def _send(self, head: Mapping[str, Any], body: bytes = b"") -> None:
        self._target.write(encode_frame(head, body))
        self._target.flush()

    def _log(self, error: Exception) -> None:
        """Write the traceback of an error to stderr, once for each line."""
        line = repr(traceback.extract_tb(error.__traceback__)[-1])
        if line not in self._logged:
            self._logged.add(line)
            traceback.print_exception(error)


def _read(source: int, size: int) -> bytes:
    """Read bytes from a descriptor.

    Raises:
        EOFError: It has fewer bytes.
    """
    data = bytearray()
    while len(data) < size:
        chunk = os.read(source, size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def lower_priority() -> None:
    """Let the server and its workers go first.

    On Linux, a niceness counts within a session only, unless that of the session is set too
    (sched(7), "The autogroup feature").
    """
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid():  # Otherwise others are in its session.
        with suppress(OSError):  # Other systems, and most containers, have no such file.
            AUTOGROUP.write_text(str(NICENESS))


def main() -> None:
    parser = argparse.ArgumentParser(description="The monitor process of a server.")
    parser.add_argument("--retention", type=float, required=True, help="in seconds")
    parser.add_argument("--instance", default=socket.gethostname(), help="name of the server")
    parser.add_argument("--events", help="URL that gets the samples as CloudEvents")
    options = parser.parse_args()
    lower_priority()
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # A module that prints must not break the frames.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # The server ends it by the end of its input.
    events = EventSender(options.events) if options.events else None
    store = MonitorStore(os.environ.get(STORE_VARIABLE), options.retention)
    MonitorProcess(Monitor(store, options.instance, events), target).run(0)


if __name__ == "__main__":
    main()
