"""The stages of requests, read from a server's own metrics."""

from __future__ import annotations

import pytest

from tsx_cli.bench.search.usage import batch_sizes, parse, stages

NOTHING = parse("", "m")


def reported(**values: float) -> str:
    return "\n".join(
        f'{name}{{model_name="m",model_version="1.0"}} {value}' for name, value in values.items()
    )


def test_steps_of_batches_are_weighted_by_their_requests() -> None:
    """Nine requests in a batch of 90 ms and one in a batch of 10 ms have a mean of 82 ms."""
    second_scrape = parse(
        reported(
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
    measured_stages = stages(NOTHING, second_scrape, 95.0)
    assert measured_stages.queue_ms == pytest.approx(10)
    assert measured_stages.inference_ms == pytest.approx(82)
    assert measured_stages.transport_ms == pytest.approx(3)


def test_without_batches_there_is_only_transport() -> None:
    measured_stages = stages(NOTHING, parse(reported(tsx_request_seconds_count=0), "m"), 2.0)
    assert (
        measured_stages.queue_ms,
        measured_stages.inference_ms,
        measured_stages.transport_ms,
    ) == (0, 0, 2)


METRICS = """
tsx_queue_seconds_sum{model_name="m",hostname="h"} %s
tsx_queue_seconds_count{model_name="m",hostname="h"} %s
tsx_inference_seconds_sum{model_name="m",hostname="h"} %s
tsx_inference_seconds_count{model_name="m",hostname="h"} %s
tsx_inference_seconds_sum{model_name="other",hostname="h"} 1000.0
tsx_batch_size_bucket{model_name="m",hostname="h",le="1.0"} %s
tsx_batch_size_bucket{model_name="m",hostname="h",le="2.0"} %s
tsx_batch_size_bucket{model_name="m",hostname="h",le="+Inf"} %s
"""


def test_stages_and_batch_sizes_are_computed_from_metrics() -> None:
    first_scrape, second_scrape = (
        parse(METRICS % values, "m")
        for values in ((1, 10, 2, 5, 3, 5, 5), (1.4, 30, 3, 15, 4, 14, 15))
    )
    measured_stages = stages(first_scrape, second_scrape, mean_ms=130)
    assert [round(value) for value in measured_stages.model_dump().values()] == [20, 0, 100, 0, 10]
    assert batch_sizes(first_scrape, second_scrape) == {1: 1, 2: 8, 4: 1}
    stages_without_requests = stages(second_scrape, second_scrape, mean_ms=5)
    assert stages_without_requests.transport_ms == 5
    assert batch_sizes(second_scrape, second_scrape) == {}
