"""A latency target from registration to metrics: real workers, real requests."""

from __future__ import annotations

import pytest


def status_of(answer):
    return answer.json().get("status") or answer.json()["message"]


def test_a_model_with_a_target_serves_and_says_how_well(empty):
    assert (
        empty.management.post(
            "/models", params={"url": "talker.mar", "initial_workers": 1, "slo": "p99<60s"}
        ).status_code
        == 200
    )
    for _ in range(5):
        assert (
            empty.inference.post(
                "/predictions/talker", content=b"x", headers={"x-do": "bytes"}
            ).status_code
            == 200
        )
    (described,) = empty.management.get("/models/talker").json()
    slo = described["slo"]
    assert (
        slo["target"],
        slo["attained"],
        slo["missed"],
        slo["refused"],
        slo["attainment"],
        slo["budgetLeft"],
    ) == (
        "p99<60s",
        5,
        0,
        0,
        1,
        1,
    )
    assert described["batchSize"] == slo["batchSize"] >= 1
    metrics = empty.metrics.get("/metrics").text
    assert "tsx_slo_attained_total{hostname=" in metrics
    assert "tsx_slo_target_seconds{hostname=" in metrics
    assert "tsx_queue_capacity{" not in metrics


def test_a_target_is_changed_while_the_model_is_served(empty):
    empty.management.post(
        "/models", params={"url": "talker.mar", "initial_workers": 0, "slo": "p99<60s"}
    )
    answer = empty.management.put("/models/talker", params={"slo": "p95<20ms"})
    assert status_of(answer) == 'Changed for model "talker" Version: 1.0: slo = p95<20ms'
    assert empty.management.get("/models/talker").json()[0]["slo"]["target"] == "p95<20ms"
    answer = empty.management.put("/models/talker", params={"batch_size": 8})
    assert answer.status_code == 400
    assert "cannot be given batch_size while it is served, since its slo is p95<20ms" in status_of(
        answer
    )


def test_a_target_needs_a_registration_of_its_own(empty):
    empty.management.post("/models", params={"url": "talker.mar", "initial_workers": 0})
    answer = empty.management.put("/models/talker", params={"slo": "p99<60s"})
    assert answer.status_code == 400
    assert "it was registered without an slo. Register it with what you want" in status_of(answer)
    answer = empty.management.post(
        "/models",
        params={"url": "talker.mar", "initial_workers": 0, "slo": "p99<60s", "replace": "true"},
    )
    assert answer.status_code == 200
    assert empty.management.get("/models/talker").json()[0]["slo"]["target"] == "p99<60s"
    empty.management.post(
        "/models",
        params={"url": "talker.mar", "initial_workers": 0, "batch_size": 3, "replace": "true"},
    )
    assert "slo" not in empty.management.get("/models/talker").json()[0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"slo": "fast"}, "Parameter slo is 'fast': 'fast' is not a bound."),
        ({"slo": "p99<1s,p50<1ms"}, "it must be one percentile and a time, such as p99<50ms"),
        (
            {"slo": "p99<1s", "batch_size": 4, "job_queue_size": 9},
            "slo: p99<1s stands in place of batchSize, jobQueueSize",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(empty, params, message):
    answer = empty.management.post(
        "/models", params={"url": "talker.mar", "initial_workers": 0, **params}
    )
    assert answer.status_code == 400
    assert message in status_of(answer)
