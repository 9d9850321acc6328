"""Where a request's time went: told by its answer, by /debug, and from the metrics by a trace."""

from __future__ import annotations

import re

import httpx
import pytest

PATH = "/predictions/talker"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARTS = ["queue", "batch", "inference", "total"]  # the handler is a function

both_lanes = pytest.mark.parametrize(
    "content", [b"x", [b"x"]], ids=["fast lane", "other lane"]
)  # of chunks, its length is not told before


def post(server, content=b"x", **headers):
    body = iter(content) if isinstance(content, list) else content
    return server.inference.post(
        PATH,
        content=body,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def durations(answer):
    entries = [
        re.fullmatch(r"([a-z]+);dur=(\d+\.\d{3})", entry)
        for entry in answer.headers["server-timing"].split(", ")
    ]
    return {entry[1]: float(entry[2]) for entry in entries}


@both_lanes
def test_an_answer_says_where_its_time_went_when_it_is_asked(server, content):
    answer = post(server, content, x_tsx_timing="1", x_do="headers")
    reported = durations(answer)
    assert [*reported] == PARTS
    assert (
        0
        < reported["queue"] + reported["batch"] + reported["inference"]
        <= reported["total"] + 0.01
    )
    assert (answer.text, answer.headers["x-own"]) == ("a,b", "1")


@both_lanes
def test_an_answer_that_was_not_asked_says_nothing(server, content):
    assert "server-timing" not in post(server, content).headers


@both_lanes
def test_an_error_of_the_handlers_says_where_its_time_went_too(server, content):
    answer = post(server, content, x_tsx_timing="1", x_do="raise")
    assert answer.status_code == 500
    assert [*durations(answer)] == PARTS


@both_lanes
def test_a_stream_has_gone_before_its_time_is_known(server, content):
    answer = post(server, content, x_tsx_timing="1", x_do="stream")
    assert answer.text == "abc"
    assert "server-timing" not in answer.headers


def test_a_share_of_the_answers_says_it_unasked(start_server):
    with start_server(server_timing_share=1.0) as server:
        server.register("talker.mar", initial_workers=1)
        assert [*durations(post(server))] == [*durations(post(server, [b"x"]))] == PARTS
        assert server.inference.get("/ping").status_code == 200


@both_lanes
def test_a_request_is_found_under_its_id(server, content):
    answer = post(server, content, x_do="status", x_status="418", x_tsx_timing="1")
    reported = server.management.get(f"/debug/requests/{answer.headers['x-request-id']}").json()
    assert (
        reported["modelName"],
        reported["modelVersion"],
        reported["status"],
        reported["batchSize"],
    ) == ("talker", "1.0", 418, 1)
    assert [*reported["milliseconds"]] == [*PARTS[:-1], "other", "total"]
    header = durations(answer)
    assert {name: reported["milliseconds"][name] for name in PARTS} == pytest.approx(
        header, abs=0.002
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", reported["arrived"])
    assert "error" not in reported


@pytest.mark.parametrize("request_id", ["no-such-id", "a%2Fb%2F..%2Fc", "%00%FF"])
def test_a_request_that_nobody_knows_is_not_found(server, request_id):
    answer = server.management.get(f"/debug/requests/{request_id}")
    assert answer.status_code == 404
    assert answer.json()["type"] == "RequestNotFoundException"
    assert "x-request-id" in answer.json()["message"]


def test_a_refusal_is_found_and_says_why(server):
    refused = server.inference.post(f"{PATH}/2.0")
    reported = server.management.get(f"/debug/requests/{refused.headers['x-request-id']}").json()
    assert (reported["status"], reported["error"], [*reported["milliseconds"]]) == (
        503,
        "NoWorker",
        ["total"],
    )


def test_the_slowest_come_first(server):
    for _ in range(5):
        post(server)
    reported = server.management.get("/debug/slowest").json()["requests"]
    took = [each["milliseconds"]["total"] for each in reported]
    assert len(took) >= 5
    assert took == sorted(took, reverse=True)
    fewer = server.management.get("/debug/slowest", params={"model": "talker", "count": 2}).json()[
        "requests"
    ]
    assert fewer == reported[:2]
    assert server.management.get("/debug/slowest", params={"model": "nobody"}).status_code == 404
    assert server.management.get("/debug/slowest", params={"count": 0}).status_code == 400


def test_debug_is_where_models_are_managed_and_behind_the_same_guard(server):
    assert server.inference.get("/debug/slowest").status_code == 404
    foreign = httpx.get(
        f"{server.addresses['management']}/debug/slowest",
        headers={"Origin": "https://elsewhere.example"},
        timeout=60,
    )
    assert foreign.status_code == 403


@both_lanes
def test_a_bucket_points_to_the_trace_of_a_request_in_it(server, content):
    trace = TRACE[:-1] + ("a" if isinstance(content, list) else "b")
    answer = post(server, content, traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    assert "server-timing" not in answer.headers
    text = server.metrics.get("/metrics", headers={"Accept": "application/openmetrics-text"}).text
    pointing = [line for line in text.splitlines() if f'trace_id="{trace}"' in line]
    assert {line.partition("{")[0] for line in pointing} >= {
        "tsx_request_seconds_bucket",
        "tsx_inference_seconds_bucket",
    }


def test_of_a_model_whose_requests_are_shared_out_whoever_answered_tells(start_server):
    with start_server() as server:
        server.register("talker.mar", initial_workers=1)
        server.register("talker2.mar", initial_workers=1)
        weights = {"weights": {"1.0": 0, "2.0": 1}}
        assert server.management.put("/models/talker/traffic", json=weights).status_code == 200
        for content in (b"x", [b"x"]):
            answer = post(
                server, content, x_tsx_timing="1", traceparent=f"00-{TRACE}-00f067aa0ba902b7-01"
            )
            assert answer.headers["x-tsx-model-version"] == "2.0"
            assert [*durations(answer)] == PARTS
            reported = server.management.get(
                f"/debug/requests/{answer.headers['x-request-id']}"
            ).json()
            assert reported["modelVersion"] == "2.0"
        text = server.metrics.get(
            "/metrics", headers={"Accept": "application/openmetrics-text"}
        ).text
        assert all('model_version="2.0"' in line for line in text.splitlines() if TRACE in line)
        assert TRACE in text
