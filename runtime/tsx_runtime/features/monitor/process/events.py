"""Samples as CloudEvents over HTTP, in the format of KServe's logger.

https://kserve.github.io/website/docs/model-serving/predictive-inference/logger/basic-logger

Each sample becomes two requests in the binary content mode of CloudEvents: one with the body of the
request, and one with the body of the answer. They have the same id. Of failed requests, there is no
event of the answer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone

import urllib3

from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.shared.redaction import redacted

MAX_WAITING_BYTES = 32 << 20
TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 16
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # pauses after failures
SOURCE = "tsx"
TYPE = "org.kubeflow.serving.inference."

logger = logging.getLogger("tsx.monitor")


class EventSender:
    """A thread that sends samples to a URL; `send` never waits for it.

    Attributes:
        sent: The number of samples that the receiver has accepted.
        dropped: The number of samples by model that were not sent, since too many were waiting.
        failed: The number of samples by model that the receiver has not accepted.
        problem: Why the last sample was not accepted.
    """

    def __init__(self, url: str) -> None:
        """Start the thread."""
        self.sent = 0
        self.dropped, self.failed = Counter[str](), Counter[str]()
        self.problem: str | None = None
        self._url = url
        self._samples: queue.SimpleQueue[MonitorSample | None] = queue.SimpleQueue()
        # One thread changes each number, and their difference is the number of waiting bytes.
        self._queued_bytes = self._done_bytes = 0
        self._closed = threading.Event()
        self._pool = urllib3.PoolManager(
            retries=False, timeout=urllib3.Timeout(total=TIMEOUT_S), maxsize=1
        )
        self._thread = threading.Thread(target=self._run, name="tsx-events", daemon=True)
        self._thread.start()

    def send(self, sample: MonitorSample) -> None:
        """Queue a sample, or count it as dropped."""
        size = _size_of(sample)
        waiting = self._queued_bytes - self._done_bytes
        if waiting and waiting + size > MAX_WAITING_BYTES:
            self.dropped[sample.model] += 1
            return
        self._queued_bytes += size
        self._samples.put(sample)

    def close(self, seconds: float) -> None:
        """Send what waits, for at most `seconds`, and end the thread."""
        self._samples.put(None)
        self._thread.join(seconds)
        self._closed.set()

    def _run(self) -> None:
        pause = MIN_PAUSE_S
        while (sample := self._samples.get()) is not None and not self._closed.is_set():
            try:
                for headers, body in events_of(sample):
                    self._post(headers, body)
            except (urllib3.exceptions.HTTPError, ValueError) as error:
                self.failed[sample.model] += 1
                problem = redacted(f"{self._url}: {error}")
                if self.problem is None:
                    logger.warning("events cannot be sent to %s", problem)
                self.problem = problem
                self._closed.wait(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
            else:
                self.sent += 1
                self.problem, pause = None, MIN_PAUSE_S
            self._done_bytes += _size_of(sample)

    def _post(self, headers: dict[str, str], body: bytes) -> None:
        response = self._pool.request(
            "POST", self._url, body=body, headers=headers, redirect=False, preload_content=False
        )
        response.read(MAX_ANSWER_BYTES)
        response.close()  # It closes the connection if the answer has more.
        if response.status >= 300:
            raise ValueError(f"the receiver has answered {response.status}")


def events_of(sample: MonitorSample) -> Iterator[tuple[dict[str, str], bytes]]:
    """Yield the headers and the bodies of the events of a sample."""
    common = {
        "ce-specversion": "1.0",
        "ce-id": sample.request_id,
        "ce-source": SOURCE,
        "ce-inferenceservicename": sample.model,
        "ce-modelversion": sample.version,
    }
    parts = [("request", sample.at, sample.headers.get("content-type", ""), sample.body)]
    if sample.status < 400:
        parts.append(("response", sample.at + sample.seconds, sample.answer_type, sample.answer))
    for kind, at, content_type, body in parts:
        time = datetime.fromtimestamp(at, timezone.utc).isoformat().replace("+00:00", "Z")
        content = {"content-type": content_type or "application/octet-stream"}
        yield common | {"ce-type": TYPE + kind, "ce-time": time} | content, body


def _size_of(sample: MonitorSample) -> int:
    return len(sample.body) + len(sample.answer)
