"""What is counted of a batch: the same for each request, whether it came alone or with others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.stats import Stats
from tsx_runtime.core.times import NAN, batch_times

moments = st.floats(0, 3)
steps = st.sampled_from([NAN, 0.0, 0.25, 7.0])


@given(st.lists(moments, min_size=2, max_size=8), st.tuples(moments, moments, moments), moments, st.tuples(steps, steps, steps), st.data())
def test_a_request_counts_the_same_alone_and_in_company(
    arrived: list[float], points: tuple[float, float, float], began: float, told: tuple[float, float, float], data: st.DataObject
) -> None:
    free, sent, answered = sorted([100 + max(0.0, points[0]), 103 + points[1], 106 + points[2]])
    statuses = data.draw(st.lists(st.sampled_from([200, 200, 418, 503]), min_size=len(arrived), max_size=len(arrived)))
    jobs: list[Any] = [SimpleNamespace(arrived=100 + at, request_id=b"%d" % number) for number, at in enumerate(arrived)]
    items = [(status, b"", b"") for status in statuses]
    together, apart = Stats(), Stats()
    together.add_batch(jobs, items, batch_times(free, sent, answered, len(jobs), (sent + began / 3, 0.5, *told)))
    for job, item in zip(jobs, items, strict=True):
        apart.add_batch([job], [item], batch_times(free, sent, answered, 1, (sent + began / 3, 0.5, *told)))
    for name in ("latency", "queue", "batch_wait"):
        one, other = getattr(together, name), getattr(apart, name)
        assert one.count == other.count, name
        assert abs(one.sum - other.sum) < 1e-9, name
    assert together.answers == apart.answers
    assert together.errors == apart.errors == sum(status >= 500 for status in statuses)
    assert abs(together.queue_seconds - apart.queue_seconds) < 1e-9
    assert (together.batches, apart.batches) == (1, len(jobs))
    assert together.preprocess.count * len(jobs) == apart.preprocess.count
    assert together.inference.count * len(jobs) == apart.inference.count
    for job, status in zip(jobs, statuses, strict=True):
        found = together.recent.find(job.request_id), apart.recent.find(job.request_id)
        assert [(seen.status, seen.took) for seen in found if seen is not None] == [(status, answered - job.arrived)] * 2
