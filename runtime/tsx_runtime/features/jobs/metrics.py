"""The metrics of asynchronous requests in `/metrics`.

They cover the queue, jobs by outcome and their times, callbacks, and idempotency keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tsx_runtime.errors import TsxError
from tsx_runtime.feature import Families
from tsx_runtime.features.jobs.job_stats import OUTCOMES, JobStats
from tsx_runtime.features.jobs.service import Jobs
from tsx_runtime.features.jobs.storage.store import JobState

STATES: tuple[JobState, ...] = ("queued", "running", "done")
CALLBACK_OUTCOMES = ("delivered", "retried", "given_up")
KEY_OUTCOMES = ("run", "replayed", "waited", "reused")


class JobReading(NamedTuple):
    """The data of the metrics of jobs.

    `queue` and `oldest` describe the store, so they are equal on all servers that share it. The
    other fields describe this server.
    """

    stats: JobStats
    keyed: Mapping[str, int]
    queue: Mapping[tuple[str, JobState], int] = {}
    oldest: Mapping[str, float] = {}


async def read_jobs(jobs: Jobs) -> JobReading:
    """Read the data, without the queue if the store does not respond."""
    try:
        return JobReading(jobs.stats, jobs.keyed_runs.counts, *await jobs.queue())
    except TsxError:
        return JobReading(jobs.stats, jobs.keyed_runs.counts)


def add_jobs(families: Families, reading: JobReading, host: str) -> None:
    stats, host_labels = reading.stats, {"hostname": host}
    models = sorted({model for model, _ in (*reading.queue, *stats.finished)})
    state_samples = [
        ({"model_name": model, "state": state, **host_labels}, reading.queue.get((model, state), 0))
        for model in models
        for state in STATES
    ]
    families.add("tsx_jobs", "gauge", "asynchronous requests in the store, by state", state_samples)
    outcome_samples = [
        ({"model_name": model, "outcome": outcome, **host_labels}, stats.finished[model, outcome])
        for model in models
        for outcome in OUTCOMES
    ]
    families.add(
        "tsx_jobs_finished_total", "counter", "asynchronous requests by outcome", outcome_samples
    )
    wait_samples = [
        ({"model_name": model, **host_labels}, reading.oldest.get(model, 0.0)) for model in models
    ]
    families.add(
        "tsx_jobs_oldest_seconds",
        "gauge",
        "seconds for which the oldest queued asynchronous request has waited",
        wait_samples,
    )
    for name, text, durations in (
        ("wait", "from the acceptance of an asynchronous request to its start", stats.waited),
        ("run", "from the start of an asynchronous request to its answer", stats.ran),
    ):
        for model, model_durations in sorted(durations.items()):
            families.add_durations(
                f"tsx_job_{name}_seconds",
                f"seconds {text}",
                {"model_name": model, **host_labels},
                model_durations,
            )
    for name, text, values, counts in (
        (
            "tsx_job_callbacks_total",
            "calls of callback URLs by outcome",
            CALLBACK_OUTCOMES,
            stats.callbacks,
        ),
        (
            "tsx_idempotency_keys_total",
            "requests with an Idempotency-Key by what became of them",
            KEY_OUTCOMES,
            reading.keyed,
        ),
    ):
        families.add_by(
            "outcome", name, text, host_labels, {value: counts.get(value, 0) for value in values}
        )
