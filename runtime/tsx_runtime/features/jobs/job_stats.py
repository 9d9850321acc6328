"""Counts and times of a server's asynchronous requests and callbacks since its start."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from tsx_runtime.core.telemetry.histogram import Durations
from tsx_runtime.features.jobs.storage.store import JobRecord

OUTCOMES = ("succeeded", "failed", "cancelled")


class JobStats:
    """The counts and times of one server; times are in seconds, by model."""

    def __init__(self) -> None:
        self.finished: Counter[tuple[str, str]] = Counter()  # keys: model and outcome
        self.waited: defaultdict[str, Durations] = defaultdict(Durations)
        self.ran: defaultdict[str, Durations] = defaultdict(Durations)
        self.callbacks: Counter[str] = Counter()  # attempts by outcome

    def count_answer(self, job: JobRecord, status: int) -> None:
        """Count a stored answer."""
        started = job.created if job.started is None else job.started
        self.finished[job.model, "succeeded" if status < 400 else "failed"] += 1
        self.waited[job.model].add([max(0.0, started - job.created)])
        self.ran[job.model].add([max(0.0, time.time() - started)])
