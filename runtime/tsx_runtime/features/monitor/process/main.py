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
from types import FrameType
from typing import Any

from tsx_runtime.errors import StoreUnavailable, TsxError, error_body
from tsx_runtime.features.monitor.messages import (
    FRAME,
    MAX_HEAD_BYTES,
    MonitorSample,
    encode_frame,
)
from tsx_runtime.features.monitor.process.monitor import Monitor
from tsx_runtime.features.monitor.process.operations import answer_call
from tsx_runtime.features.monitor.process.store import MonitorStore

NICENESS = 10
CHUNK_BYTES = 1 << 20
STORE_VARIABLE = "TSX_MONITOR_STORE"  # unlike an argument, other users cannot see its password


class MonitorProcess:
    """The loop of the process, in one thread."""

    def __init__(self, monitor: Monitor, source: int, target: int) -> None:
        """Read from the descriptor `source`, and write to the descriptor `target`."""
        self._monitor = monitor
        self._source = source
        self._target = target
        self._buffer = bytearray()
        self._logged: set[str] = set()

    def run(self, wakeup: int) -> None:
        """Work until the end of the input, or until `wakeup` is readable."""
        try:
            self._monitor.flush()
            problem = None
        except StoreUnavailable as error:
            problem = error.message
        self._send({"kind": "ready", "problem": problem})
        while True:
            timeout = self._tick()
            readable, _, _ = select.select([self._source, wakeup], [], [], timeout)
            if wakeup in readable:
                break
            if self._source in readable:
                chunk = os.read(self._source, CHUNK_BYTES)
                if not chunk:
                    break
                self._buffer += chunk
                for head, body in take_frames(self._buffer):
                    self._handle(head, body)
        self._monitor.close()

    def _tick(self) -> float | None:
        try:
            timeout = self._monitor.work(time.time())
            states = self._monitor.take_states(time.time())
            if states is not None:
                self._send({"kind": "state", "states": [state._asdict() for state in states]})
        except Exception as error:  # No fault of one model ends the monitoring of all.
            self._log(error)
            return 1.0
        return timeout

    def _handle(self, text: bytes, body: bytes) -> None:
        head: dict[str, Any] = {}
        try:
            head = dict(json.loads(text))
            match head["kind"]:
                case "sample":
                    self._monitor.add_sample(_sample(head, body))
                case "version":
                    self._monitor.set_version(head, body)
                case "end":
                    self._monitor.end(head["model"], head.get("version"))
                case "call":
                    content = answer_call(
                        self._monitor, head["operation"], head.get("arguments") or {}, body
                    )
                    self._send({"kind": "result", "id": head["id"], "status": 200}, content)
        except Exception as error:  # The next frame may be a good one.
            if not isinstance(error, TsxError):
                self._log(error)
            if head.get("kind") != "call":
                self._monitor.dropped[str(head.get("model")), "invalid"] += 1
                return
            if not isinstance(error, TsxError):
                error = TsxError("The monitor process failed; the server's log has the reason.")
            content = error_body(error.status, error.type, error.message)
            self._send({"kind": "result", "id": head.get("id"), "status": error.status}, content)

    def _send(self, head: Mapping[str, Any], body: bytes = b"") -> None:
        data = memoryview(encode_frame(head, body))
        while data:
            data = data[os.write(self._target, data) :]

    def _log(self, error: Exception) -> None:
        """Write the traceback of an error to stderr, once for each place."""
        place = repr(traceback.extract_tb(error.__traceback__)[-1:])
        if place not in self._logged:
            self._logged.add(place)
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
    signal.signal(signal.SIGTERM, _ignore)  # It wakes the loop.
    monitor = Monitor(MonitorStore(options.store, options.retention), options.instance)
    MonitorProcess(monitor, 0, target).run(wakeup.fileno())


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


if __name__ == "__main__":
    main()
