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
from collections.abc import Iterator, Mapping
from typing import Any

from tsx_runtime.errors import TsxError, error_body
from tsx_runtime.features.monitor.messages import (
    FRAME,
    MAX_HEAD_BYTES,
    MonitorSample,
    encode_frame,
)
from tsx_runtime.features.monitor.process.events import EventSender
from tsx_runtime.features.monitor.process.monitor import Monitor
from tsx_runtime.features.monitor.process.operations import Operations
from tsx_runtime.features.monitor.process.store import MonitorStore

NICENESS = 10
CHUNK_BYTES = 1 << 20
EVENTS_TIMEOUT_S = 3.0  # limit of the time for waiting events at the end
STORE_VARIABLE = "TSX_MONITOR_STORE"  # unlike an argument, other users cannot see its password


class MonitorProcess:
    """The loop of the process, in one thread."""

    def __init__(self, monitor: Monitor, target: int, events: EventSender | None) -> None:
        """Write frames to the descriptor `target`, and send samples to `events` too."""
        self._monitor = monitor
        self._operations = Operations(monitor)
        self._target = target
        self._events = events
        self._logged: set[str] = set()

    def run(self, source: int, wakeup: int) -> None:
        """Read frames from `source` until its end, or until `wakeup` is readable."""
        problem = None
        try:
            self._monitor.flush()
        except TsxError as error:
            problem = error.message
        self._send({"kind": "ready", "problem": problem})
        buffer = bytearray()
        while True:
            timeout = self._work(time.time())
            readable, _, _ = select.select([source, wakeup], [], [], timeout)
            if wakeup in readable:
                break
            if source in readable:
                chunk = os.read(source, CHUNK_BYTES)
                if not chunk:
                    break
                buffer += chunk
                for head, body in take_frames(buffer):
                    self._handle(head, body)
        try:
            self._monitor.close()
        except TsxError as error:
            self._log(error)
        if self._events is not None:
            self._events.close(EVENTS_TIMEOUT_S)

    def _work(self, now: float) -> float:
        try:
            timeout = self._monitor.work(now)
            if states := self._monitor.take_states(now):
                self._send({"kind": "state", "states": [state._asdict() for state in states]})
        except Exception as error:  # No fault of one model ends the monitoring of all.
            self._log(error)
            return 1.0
        return timeout

    def _handle(self, text: bytes, body: bytes) -> None:
        head: dict[str, Any] = {}
        status, result = 200, b""
        try:
            head = dict(json.loads(text))
            match head["kind"]:
                case "sample":
                    sample = _sample(head, body)
                    if self._events is not None:
                        self._events.send(sample)
                    self._monitor.add_sample(sample)
                case "version":
                    self._monitor.set_version(head, body)
                case "end":
                    self._monitor.end(head["model"], head["version"])
                case "call":
                    result = self._operations.call(head["operation"], body, head["arguments"])
        except TsxError as error:
            status, result = error.status, error_body(error.status, error.type, error.message)
        except Exception as error:  # The next frame may be a good one.
            self._log(error)
            message = "The monitor process has failed; the server's log has the reason."
            status, result = 500, error_body(500, TsxError.type, message)
            self._monitor.dropped[str(head.get("model")), "invalid"] += 1
        if len(result) > MAX_HEAD_BYTES:
            message = f"The result has {len(result):,} bytes, more than {MAX_HEAD_BYTES:,}."
            status, result = 500, error_body(500, TsxError.type, message)
        if head.get("kind") == "call":
            self._send({"kind": "result", "id": head.get("id"), "status": status}, result)

    def _send(self, head: Mapping[str, Any], body: bytes = b"") -> None:
        data = memoryview(encode_frame(head, body))
        while data:
            data = data[os.write(self._target, data) :]

    def _log(self, error: Exception) -> None:
        """Write the traceback of an error to stderr, once for each line."""
        line = repr(traceback.extract_tb(error.__traceback__)[-1])
        if line not in self._logged:
            self._logged.add(line)
            traceback.print_exception(error)


def take_frames(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Remove the complete frames from a buffer; yield the head and the body of each.

    Raises:
        ValueError: The buffer begins with no frame.
    """
    while len(buffer) >= FRAME.size:
        head_size, body_size = FRAME.unpack_from(buffer)
        if head_size > MAX_HEAD_BYTES:
            raise ValueError("the input has no frame")
        start, end = FRAME.size + head_size, FRAME.size + head_size + body_size
        if len(buffer) < end:
            return
        with memoryview(buffer) as view:
            head, body = bytes(view[FRAME.size : start]), bytes(view[start:end])
        del buffer[:end]
        yield head, body


def _sample(head: dict[str, Any], body: bytes) -> MonitorSample:
    size = head["sizes"][0]
    values = {name: head[name] for name in MonitorSample._fields[:-2]}
    return MonitorSample(**values, body=body[:size], answer=body[size:])


def main() -> None:
    parser = argparse.ArgumentParser(description="The monitor process of a server.")
    parser.add_argument("--store", default=os.environ.get(STORE_VARIABLE), help="file or URL")
    parser.add_argument("--retention", type=float, required=True, help="in seconds")
    parser.add_argument("--instance", default=socket.gethostname(), help="name of the server")
    parser.add_argument("--events", help="URL that gets the samples as CloudEvents")
    options = parser.parse_args()
    os.nice(NICENESS)
    # A module that prints must not break the frames.
    target = os.dup(1)
    os.dup2(2, 1)
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # It wakes the loop.
    monitor = Monitor(MonitorStore(options.store, options.retention), options.instance)
    events = EventSender(options.events) if options.events else None
    MonitorProcess(monitor, target, events).run(0, wakeup.fileno())


if __name__ == "__main__":
    main()
