"""The operations of a monitor in the process of a test."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.process.events import EventSender
from tsx_runtime.features.monitor.process.monitor import Monitor
from tsx_runtime.features.monitor.process.operations import Operations
from tsx_runtime.features.monitor.process.store import MonitorStore

CAT, DOG = {"cat": 0.9, "dog": 0.1}, {"cat": 0.2, "dog": 0.8}


class LocalMonitor:
    """The operations of a monitor in this process, with answers of the model `m`."""

    def __init__(
        self,
        location: str | None,
        config: Mapping[str, Any] = {},
        retention_s: float = 86400.0,
        events: EventSender | None = None,
    ) -> None:
        store = MonitorStore(location, retention_s)
        self.monitor = Monitor(store, "one", events)
        self.operations = Operations(self.monitor)
        self.config = config
        self.announce("1.0")

    def announce(self, version: str, **head: Any) -> None:
        fields = {"model": "m", "version": version, "config": self.config, "registered": 1.0}
        self.monitor.set_version(fields | head, b"")

    def sample(
        self, id: str, request: Any, answer: Any, version: str = "1.0", at: float = 0.0
    ) -> None:
        json_type = "application/json"
        sample = MonitorSample(
            "m",
            version,
            id,
            at or time.time(),
            0.1,
            200,
            {"content-type": json_type},
            json_type,
            json.dumps(request).encode(),
            json.dumps(answer).encode(),
        )
        self.monitor.add_sample(sample)

    def call(self, operation: str, body: Any = None, **arguments: Any) -> Any:
        """Return the result of an operation."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return json.loads(self.operations.call(operation, content, {"model": "m"} | arguments))

    def feed(self, *items: Any) -> Any:
        return self.call("feedback", list(items))

    def code(self, item: Any) -> str:
        """Return the code of the only error of an item."""
        result = self.feed(item)
        assert (result["accepted"], result["duplicates"], len(result["errors"])) == (0, 0, 1)
        code: str = result["errors"][0]["code"]
        return code

    def version(self, number: str = "1.0") -> Any:
        versions = self.call("report")["versions"]
        return next(version for version in versions if version["version"] == number)
