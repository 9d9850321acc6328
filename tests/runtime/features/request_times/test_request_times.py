"""A request's timing: in its answer, in /debug, and as a trace in the metrics."""

from __future__ import annotations

import re

import pytest

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
# The handler is a function, which has no preprocessing.
STAGES = ["queue", "batch", "inference", "total"]

both_lanes = pytest.mark.parametrize("lane", ["fast", "other"])


def durations(answer):
    entries = [
        re.fullmatch(r"([a-z]+);dur=(\d+\.\d{3})", entry)
        for entry in answer.headers["server-timing"].split(", ")
    ]
    return {entry[1]: float(entry[2]) for entry in entries}


def record_of(server, answer):
    id = answer.headers["x-request-id"]
    return server.management.get(f"/debug/requests/{id}").json()


def openmetrics(server):
    accept = {"Accept": "application/openmetrics-text"}
    return server.metrics.get("/metrics", headers=accept).text.splitlines()


@both_lanes
def test_an_answer_has_server_timing_on_request(server, lane):
    answer = server.ask(lane=lane, x_tsx_timing="1", x_do="headers")
    stage_times = durations(answer)
    assert [*stage_times] == STAGES
    assert (
        0
        < stage_times["queue"] + stage_times["batch"] + stage_times["inference"]
        <= stage_times["total"] + 0.01
    )
    assert (answer.text, answer.headers["x-own"]) == ("a,b", "1")
    failure = server.ask(lane=lane, x_tsx_timing="1", x_do="raise")
    assert (failure.status_code, [*durations(failure)]) == (500, STAGES)


@both_lanes
def test_streams_and_other_answers_have_no_server_timing(server, lane):
    assert "server-timing" not in server.ask(lane=lane).headers
    # The head of a stream is sent before its timing is known.
    answer = server.ask(lane=lane, x_tsx_timing="1", x_do="stream")
    assert answer.text == "abc"
    assert "server-timing" not in answer.headers


def test_a_configured_fraction_of_answers_has_server_timing(start_server):
    with start_server(server_timing_share=1.0) as server:
        server.register("talker.mar", initial_workers=1)
        for lane in ("fast", "other"):
            assert [*durations(server.ask(lane=lane))] == STAGES
        assert server.inference.get("/ping").status_code == 200


@both_lanes
def test_a_request_is_found_by_its_id(server, lane):
    answer = server.ask(lane=lane, x_do="status", x_status="418", x_tsx_timing="1")
    record = record_of(server, answer)
    fields = ("modelName", "modelVersion", "status", "batchSize")
    assert [record[field] for field in fields] == ["talker", "1.0", 418, 1]
    assert [*record["milliseconds"]] == [*STAGES[:-1], "other", "total"]
    stage_times = {name: record["milliseconds"][name] for name in STAGES}
    assert stage_times == pytest.approx(durations(answer), abs=0.002)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["arrived"])
    assert "error" not in record


@pytest.mark.parametrize("request_id", ["no-such-id", "a%2Fb%2F..%2Fc", "%00%FF"])
def test_an_unknown_request_is_not_found(server, request_id):
    answer = server.management.get(f"/debug/requests/{request_id}")
    assert answer.status_code == 404
    assert answer.json()["type"] == "RequestNotFoundException"
    assert "x-request-id" in answer.json()["message"]


def test_a_refusal_is_found_with_its_reason(server):
    record = record_of(server, server.ask(path="/predictions/talker/2.0"))
    assert (record["status"], record["error"]) == (503, "NoWorker")
    assert [*record["milliseconds"]] == ["total"]


def test_the_slowest_requests_come_first(server):
    for _ in range(5):
        server.ask()
    slowest = server.management.get("/debug/slowest").json()["requests"]
    stage_times = [record["milliseconds"]["total"] for record in slowest]
    assert len(stage_times) >= 5
    assert stage_times == sorted(stage_times, reverse=True)
    filtered_records = server.management.get("/debug/slowest?model=talker&count=2").json()[
        "requests"
    ]
    assert filtered_records == slowest[:2]
    assert server.management.get("/debug/slowest?model=nobody").status_code == 404
    assert server.management.get("/debug/slowest?count=0").status_code == 400


def test_debug_has_the_guard_of_the_management_api(server):
    assert server.inference.get("/debug/slowest").status_code == 404
    cross_origin = {"Origin": "https://elsewhere.example"}
    assert server.management.get("/debug/slowest", headers=cross_origin).status_code == 403


@both_lanes
def test_a_bucket_has_an_exemplar_trace(server, lane):
    trace = TRACE[:-1] + ("a" if lane == "fast" else "b")
    answer = server.ask(lane=lane, traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    assert "server-timing" not in answer.headers
    buckets = {
        line.partition("{")[0] for line in openmetrics(server) if f'trace_id="{trace}"' in line
    }
    assert buckets >= {"tsx_request_seconds_bucket", "tsx_inference_seconds_bucket"}


def test_records_name_the_version_under_a_traffic_split(start_server):
    with start_server() as server:
        server.register("talker.mar", initial_workers=1)
        server.register("talker2.mar", initial_workers=1)
        policy = {"weights": {"1.0": 0, "2.0": 1}}
        server.management.put("/models/talker/traffic", json=policy).raise_for_status()
        for lane in ("fast", "other"):
            trace = f"00-{TRACE}-00f067aa0ba902b7-01"
            answer = server.ask(lane=lane, x_tsx_timing="1", traceparent=trace)
            assert answer.headers["x-tsx-model-version"] == "2.0"
            assert [*durations(answer)] == STAGES
            assert record_of(server, answer)["modelVersion"] == "2.0"
        lines = [line for line in openmetrics(server) if TRACE in line]
        assert lines
        assert all('model_version="2.0"' in line for line in lines)
