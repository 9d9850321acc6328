"""A server's end of a monitor process, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsx_runtime.features.monitor.messages import FRAME, RawSample, encode_frame, encode_sample


class MonitorClient:
    """A real monitor process, and the frames to and from it."""

    def __init__(
        self, store: str | Path | None, retention_s: float = 86400.0, instance: str = "one"
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if "MONITOR" not in name}
        if store is not None:
            environment["TSX_MONITOR_STORE"] = str(store)
        command = [sys.executable, "-m", "tsx_runtime.features.monitor.process.main"]
        self.process = subprocess.Popen(
            [*command, "--retention", str(retention_s), "--instance", instance],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # as the server does
        )
        self.states: list[dict[str, Any]] = []  # the last reported ones
        self.stderr = ""
        self.ready = self.read()[0]
        self._number = 1000

    def read(self) -> tuple[dict[str, Any], Any]:
        """Return the next frame."""
        source = self.process.stdout
        assert source is not None
        head_size, size = FRAME.unpack(source.read(FRAME.size))
        head, body = json.loads(source.read(head_size)), source.read(size)
        if head["kind"] == "state":
            self.states = head["states"]
        return head, json.loads(body) if body else None

    def send(self, head: Mapping[str, Any], *body: bytes) -> None:
        self.send_bytes(encode_frame(head, *body))

    def send_bytes(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def monitor(
        self,
        config: Mapping[str, Any] = {},
        *,
        version: str = "1.0",
        registered: float = 1.0,
        baseline: bytes = b"",
        **fields: Any,
    ) -> None:
        """Announce a version of the model `m`."""
        head = {"kind": "version", "model": "m", "version": version, "config": config}
        defaults: dict[str, Any] = {
            "fields": {},
            "signature": None,
            "recording": False,
            "recordings": None,
        }
        self.send(head | {"registered": registered} | defaults | fields, baseline)

    def sample(
        self,
        request_id: str,
        request: Any,
        answer: Any,
        *,
        version: str = "1.0",
        at: float | None = None,
        seconds: float = 0.01,
        status: int = 200,
    ) -> None:
        json_type = b"Content-Type: application/json\r\n"
        sample = RawSample(
            time.time() if at is None else at,
            seconds,
            status,
            b"%b\r\n\r\n%b" % (request_id.encode("latin-1", "replace"), json_type),
            json.dumps(request).encode(),
            json_type,
            json.dumps(answer).encode(),
        )
        self.send({"kind": "samples", "model": "m", "version": version}, encode_sample(sample))

    def call(self, operation: str, body: Any = None, **arguments: Any) -> tuple[int, Any]:
        """Return the status and the JSON of an operation's result."""
        self._number += 1
        head = {"kind": "call", "id": self._number, "operation": operation}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send(head | {"arguments": {"model": "m"} | arguments}, content)
        while True:
            answer, result = self.read()
            if answer["kind"] == "result" and answer["id"] == self._number:
                return answer["status"], result

    def give_feedback(self, *items: Any) -> Any:
        """Return the result of accepted feedback."""
        status, result = self.call("feedback", list(items))
        assert status == 200, result
        return result

    def report(self) -> Any:
        status, result = self.call("report")
        assert status == 200, result
        return result

    def read_state(self) -> dict[str, Any]:
        """Return the next reported state of the first version."""
        while self.read()[0]["kind"] != "state":
            pass
        return self.states[0]

    def close(self) -> int:
        """End the process by the end of its input; return its exit status."""
        return self.wait()

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Close the input and read all output; return the exit status."""
        if self.process.returncode is None:
            self.stderr = self.process.communicate(timeout=30)[1].decode()
        return self.process.returncode
