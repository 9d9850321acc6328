"""The metrics of asynchronous requests in `/metrics`: the queue, jobs by outcome and their times,
callbacks, idempotency keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tsx_runtime.errors import TsxError
from tsx_runtime.jobs.job_stats import OUTCOMES, JobStats
from tsx_runtime.jobs.service import Jobs
from tsx_runtime.jobs.store import JobState
from tsx_runtime.metrics.exposition import Families

STATES: tuple[JobState, ...] = ("queued", "running", "done")
CALLBACKS = ("delivered", "retried", "given_up")
KEYED = ("run", "replayed", "waited", "reused")


class JobReading(NamedTuple):
    """`queue` and `oldest` are those of the store, the same on all servers that share it; the rest
    is this server's own.
    """

    stats: JobStats
    keyed: Mapping[str, int]
    queue: Mapping[tuple[str, JobState], int] = {}
    oldest: Mapping[str, float] = {}


async def read_jobs(jobs: Jobs) -> JobReading:
    """Without the queue where the store does not answer: the other metrics are needed then more
    than ever.
    """
    try:
        return JobReading(jobs.stats, jobs.keyed_runs.counts, *await jobs.queue())
    except TsxError:
        return JobReading(jobs.stats, jobs.keyed_runs.counts)


def add_jobs(families: Families, reading: JobReading, host: str) -> None:
    stats, own = reading.stats, {"hostname": host}
    models = sorted({model for model, _ in (*reading.queue, *stats.finished)})
    in_state = [
        ({"model_name": model, "state": each, **own}, reading.queue.get((model, each), 0))
        for model in models
        for each in STATES
    ]
    families.add("tsx_jobs", "gauge", "asynchronous requests in the store, by state", in_state)
    ended = [
        ({"model_name": model, "outcome": each, **own}, stats.finished[model, each])
        for model in models
        for each in OUTCOMES
    ]
    families.add("tsx_jobs_finished_total", "counter", "asynchronous requests by outcome", ended)
    waits = [({"model_name": model, **own}, reading.oldest.get(model, 0.0)) for model in models]
    families.add(
        "tsx_jobs_oldest_seconds",
        "gauge",
        "seconds for which the oldest queued asynchronous request has waited",
        waits,
    )
    for name, text, durations in (
        ("wait", "from the acceptance of an asynchronous request to its start", stats.waited),
        ("run", "from the start of an asynchronous request to its answer", stats.ran),
    ):
        for model, of_model in sorted(durations.items()):
            families.add_durations(
                f"tsx_job_{name}_seconds", f"seconds {text}", {"model_name": model, **own}, of_model
            )
    for name, text, values, counts in (
        (
            "tsx_job_callbacks_total",
            "calls of callback URLs by outcome",
            CALLBACKS,
            stats.callbacks,
        ),
        (
            "tsx_idempotency_keys_total",
            "requests with an Idempotency-Key by what became of them",
            KEYED,
            reading.keyed,
        ),
    ):
        families.add_by("outcome", name, text, own, {each: counts.get(each, 0) for each in values})
