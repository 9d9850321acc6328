"""Where the time of requests went, as a server's own metrics tell it."""

from __future__ import annotations

import pytest

from tsx_cli.bench.scrape import parse, stages

NOTHING = parse("", "m")


def told(**values: float) -> str:
    return "\n".join(f'{name}{{model_name="m",model_version="1.0"}} {value}' for name, value in values.items())


def test_steps_of_batches_are_told_as_requests_saw_them_where_large_and_small_ones_alternate() -> None:
    """Nine requests in a batch of 90 ms and one in a batch of 10 ms: the mean batch takes 50 ms, that of the mean request 82 ms."""
    after = parse(
        told(
            tsx_request_seconds_sum=9 * 0.1 + 0.02,
            tsx_request_seconds_count=10,
            tsx_queue_seconds_sum=0.1,
            tsx_queue_seconds_count=10,
            tsx_inference_seconds_sum=0.1,
            tsx_inference_seconds_count=2,
            tsx_batch_size_sum=10,
            tsx_batch_size_count=2,
            tsx_worker_busy_seconds_total=0.1,
        ),
        "m",
    )
    seen = stages(NOTHING, after, 95.0)
    assert seen.queue_ms == pytest.approx(10)
    assert seen.inference_ms == pytest.approx(82)
    assert seen.transport_ms == pytest.approx(3)


def test_without_batches_there_is_only_transport() -> None:
    seen = stages(NOTHING, parse(told(tsx_request_seconds_count=0), "m"), 2.0)
    assert (seen.queue_ms, seen.inference_ms, seen.transport_ms) == (0, 0, 2)


def test_metrics_of_other_models_count_for_nothing() -> None:
    assert stages(NOTHING, parse(told(tsx_queue_seconds_sum=1, tsx_queue_seconds_count=1), "other"), 2.0).queue_ms == 0
