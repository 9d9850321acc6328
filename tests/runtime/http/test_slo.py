"""A latency target over REST, from registration to metrics."""

from __future__ import annotations


def register(server, **parameters):
    """Register a model without workers; return the status and text of the answer."""
    parameters = {"url": "talker.mar", "initial_workers": 0, **parameters}
    answer = server.management.post("/models", params=parameters)
    return answer.status_code, answer.text


def change(server, **parameters):
    answer = server.management.put("/models/talker", params=parameters)
    return answer.status_code, answer.text


def describe(server):
    (description,) = server.management.get("/models/talker").json()
    return description


def test_a_model_with_an_slo_reports_its_attainment(empty):
    assert register(empty, initial_workers=1, slo="p99<60s")[0] == 200
    for _ in range(5):
        assert empty.ask().status_code == 200
    description = describe(empty)
    slo = description["slo"]
    slo_report = {"target": "p99<60s", "attained": 5, "missed": 0, "refused": 0, "attainment": 1}
    assert slo == slo | slo_report | {"budgetLeft": 1}
    assert description["batchSize"] == slo["batchSize"] >= 1
    metrics = empty.metrics.get("/metrics").text
    assert "tsx_slo_attained_total{hostname=" in metrics
    assert "tsx_slo_target_seconds{hostname=" in metrics
    assert "tsx_queue_capacity{" not in metrics


def test_an_slo_can_be_changed_at_run_time(empty):
    register(empty, slo="p99<60s")
    status, text = change(empty, slo="p95<20ms")
    assert (status, "slo = p95<20ms" in text) == (200, True)
    assert describe(empty)["slo"]["target"] == "p95<20ms"
    status, text = change(empty, batch_size=8)
    assert (status, "its slo is p95<20ms" in text) == (400, True)


def test_an_slo_can_only_be_added_by_a_registration(empty):
    register(empty)
    status, text = change(empty, slo="p99<60s")
    assert (status, "registered without an slo" in text) == (400, True)
    assert register(empty, slo="p99<60s", replace="true")[0] == 200
    assert describe(empty)["slo"]["target"] == "p99<60s"
    assert register(empty, batch_size=3, replace="true")[0] == 200
    assert "slo" not in describe(empty)


def test_an_slo_with_a_batch_size_is_refused(empty):
    status, text = register(empty, slo="p99<1s", batch_size=4)
    assert (status, "in place of batchSize" in text) == (400, True)
