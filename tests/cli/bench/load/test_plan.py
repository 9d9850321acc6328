"""The plan of a load: its arrival times, its requests as bytes, and the statistics of latencies."""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.bench.load.accounting import (
    MAX_INTERVALS,
    account,
    by_size,
    corrected_p99,
    find_stalls,
    limit,
    over_time,
)
from tsx_cli.bench.load.connection import _plain_ok
from tsx_cli.bench.load.histogram import UNIT_S, Histogram
from tsx_cli.bench.load.loops import SlotCounts
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan, constant, poisson, recorded
from tsx_cli.bench.load.protocols import PROTOCOLS, read_target, render, tensor_of
from tsx_cli.common.failure import UsageError

ONE_PAYLOAD = (Payload(b'{"x":1}', "application/json"),)
RECORDED_PAYLOADS = (Payload(b"x", at=0.0), Payload(b"x", at=1.0))
OK = b"HTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: 2\r\nx-c: d\r\n\r\nOK"


def plan(**changes: Any) -> LoadPlan:
    return LoadPlan(
        **{"url": "http://127.0.0.1:8080", "model": "m", "payloads": ONE_PAYLOAD} | changes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"payloads": ()}, "--input"),
        ({"protocol": "soap"}, "--protocol: 'soap'"),
        ({"mode": "ajar"}, "--mode"),
        ({"mode": "open", "rate": 1.0, "arrivals": "normal"}, "--arrivals: 'normal'"),
        ({"connections": 0}, "--connections: 0"),
        ({"connections": 10_001}, "--connections: 10001"),
        ({"seconds": 0.0}, "--duration"),
        ({"seconds": math.nan}, "--duration"),
        ({"warm_up": -1.0}, "--warm-up"),
        ({"timeout": 0.0}, "--timeout"),
        ({"grace": -1.0}, "late answers"),
        ({"rate": 5.0}, "--rate is for an open loop"),
        ({"mode": "open"}, "needs a rate"),
        ({"mode": "open", "rate": 0.0}, "needs a rate"),
        ({"mode": "open", "rate": math.nan}, "needs a rate"),
        ({"mode": "open", "rate": 1e9}, "too much"),
        (
            {"mode": "open", "rate": 1.0, "arrivals": "recorded", "payloads": RECORDED_PAYLOADS},
            "cannot be combined",
        ),
        ({"mode": "open", "arrivals": "recorded"}, "recorded arrivals need a recording"),
        (
            {"mode": "open", "arrivals": "recorded", "payloads": RECORDED_PAYLOADS, "speed": 0.0},
            "--speed: 0",
        ),
        (
            {"mode": "open", "arrivals": "recorded", "payloads": RECORDED_PAYLOADS, "speed": 1e9},
            "--speed 1e+09",
        ),
        ({"url": "ftp://there"}, "is not the address of a server"),
        ({"url": "http://:80"}, "is not the address of a server"),
        ({"url": "http://there:99999"}, "is not the address of a server"),
    ],
)
def test_a_plan_with_an_invalid_value_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(**changes)
    assert message in str(error.value)


def test_a_recording_is_replayed_at_its_rate_times_the_speed() -> None:
    assert (
        plan(payloads=RECORDED_PAYLOADS, mode="open", arrivals="recorded", speed=2.0).offered.rate
        == 2.0
    )


@given(st.floats(1, 5000), st.floats(0.1, 3), st.integers(0, 5))
def test_arrival_times_are_sorted_and_have_the_given_rate(
    rate: float, seconds: float, seed: int
) -> None:
    for arrival_times, spread in (
        (constant(rate, seconds), 0.0),
        (poisson(rate, seconds, seed), 6 * math.sqrt(rate * seconds) + 5),
    ):
        assert list(arrival_times) == sorted(arrival_times)
        assert all(0 <= moment < seconds for moment in arrival_times) or len(arrival_times) == 1
        assert abs(len(arrival_times) - rate * seconds) <= spread + 1
    assert poisson(rate, seconds, seed) == poisson(rate, seconds, seed)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.integers(1, 30),
)
def test_recorded_arrivals_keep_their_pauses_and_repeat(
    pauses: list[int], speed: float, seconds: int
) -> None:
    times, now = [], 100.0
    for pause in pauses:
        now += pause
        times.append(now)
    arrival_times = recorded(times, speed, float(seconds))
    assert list(arrival_times) == sorted(arrival_times)
    assert arrival_times[0] == 0
    assert all(moment < seconds for moment in arrival_times)
    for number in range(min(len(times), len(arrival_times))):
        assert arrival_times[number] == pytest.approx((times[number] - times[0]) / speed)
    if times[-1] > times[0]:
        repeat_after = (times[-1] - times[0]) * (1 + 1 / max(1, len(times) - 1)) / speed
        assert (
            repeat_after >= seconds
            or len(arrival_times) > len(times) - times.count(times[0])
            or arrival_times[-1] < repeat_after
        )


@given(
    st.lists(st.floats(0, 100), max_size=50),
    st.lists(st.floats(0, 100), max_size=50),
    st.sampled_from([0.5, 0.9, 0.99, 0.999]),
)
def test_percentiles_cover_the_values_of_all_rounds(
    first: list[float], second: list[float], quantile: float
) -> None:
    histogram = Histogram()
    histogram.add(first)
    histogram.add(second)
    all_values = sorted(first + second)
    assert len(histogram) == len(all_values)
    assert sum(count for _, count in histogram.coarse()) == len(all_values)
    if not all_values:
        assert histogram.quantile(quantile) == histogram.latency().p99_ms == 0
        return
    exact = all_values[max(0, math.ceil(len(all_values) * quantile - 1e-9) - 1)]
    assert exact - UNIT_S <= histogram.quantile(quantile) <= exact * 1.001 + 2 * UNIT_S
    assert histogram.latency().max_ms == pytest.approx(1000 * all_values[-1])
    assert histogram.latency().mean_ms == pytest.approx(1000 * sum(all_values) / len(all_values))


@pytest.mark.parametrize("name", [b"content-length", b"Content-Length"])
def test_only_a_complete_response_with_keep_alive_is_plain(name: bytes) -> None:
    answer = OK.replace(b"content-length", name)
    assert _plain_ok(answer)
    assert not any(_plain_ok(answer[:end]) for end in range(len(answer)))
    # Event streams are not plain, since their tokens are counted.
    assert not _plain_ok(
        answer.replace(b"\r\n\r\n", b"\r\ncontent-type: text/event-stream\r\n\r\n")
    )
    for variant in (
        answer + b"H",
        answer.replace(b" 200 ", b" 500 "),
        answer.replace(b"x-a: b", b"Connection: close"),
        answer.replace(b": 2\r", b": x\r"),
        answer.replace(b": 2\r", b": \r"),
        answer.replace(name, b"x-length"),
    ):
        assert not _plain_ok(variant)


def test_a_stall_is_longer_than_responses_and_the_gaps_between_them() -> None:
    gaps = [(0.0, 0.02), (0.2, 0.5), (1.0, 1.09), (2.0, 2.4)]
    assert find_stalls(gaps, 0.1, 10.0, 10_000, 0.001) == [
        (pytest.approx(0.1), 0.3),
        (pytest.approx(0.9), pytest.approx(0.09)),
        (pytest.approx(1.9), pytest.approx(0.4)),
    ]
    assert find_stalls(gaps, 0.1, 10.0, 10_000, 0.11) == [(pytest.approx(1.9), pytest.approx(0.4))]
    assert find_stalls(gaps, 0.1, 10.0, 100, 0.001) == []
    # The second gap begins after the last request.
    begun_late = [(9.9, 10.3), (10.2, 10.7)]
    assert find_stalls(begun_late, 0.1, 10.0, 10_000, 0.001) == [
        (pytest.approx(9.8), pytest.approx(0.4))
    ]


def test_the_corrected_percentile_includes_clients_during_a_stall() -> None:
    histogram = Histogram()
    histogram.add([0.001] * 990 + [0.5])
    assert histogram.latency().p99_ms == pytest.approx(1, rel=0.01)
    # One per cent of 1490 clients are 15 clients, who arrive 2 ms apart.
    assert corrected_p99(histogram, [(1.0, 0.5)], 1000.0) == pytest.approx(486, rel=0.01)


@pytest.mark.parametrize(
    ("cpu", "starved", "late", "p99", "limited"),
    [
        (0.5, 0.1, 0.2, 1, False),
        (0.95, 0, 0.2, 1, True),
        (0.5, 0.45, 0.2, 1, True),
        (0.5, 0, 3, 5, True),
        (0.5, 0, 3, 500, False),
        (0.5, 0, 0.5, 0.6, False),
    ],
)
def test_the_generator_reports_that_it_is_the_limit(
    cpu: float, starved: float, late: float, p99: float, limited: bool
) -> None:
    assert (limit(cpu, starved, late, p99) is not None) == limited


def test_the_end_of_the_warm_up_is_detected() -> None:
    """The load rises for ten time slots and then stays constant for sixty."""
    marks, answers = [], 0
    for number in range(70):
        answers += 100 if number >= 10 else 10
        marks.append(SlotCounts(0.1 * (number + 1), answers, 0, answers, Counter({"404": 1})))
    marks.append(SlotCounts(7.2, answers + 1, 0, answers + 1, Counter()))
    accepted = array("f", [0.5] * 100 + [0.01] * (answers + 1 - 100))
    figures = {
        "start": 0.0,
        "marks": marks,
        "accepted": accepted,
        "refused": array("f"),
        "send_delays": array("f"),
        "gaps": [],
    }
    figures["payload_indexes"] = array("I", [0] * len(accepted))
    noted: Any = SimpleNamespace(**figures, streams=[], unanswered=2, unsent=0, waited=0)
    measured = account(plan(seconds=5.0, warm_up="auto"), noted, 0.1, 0.0)
    assert measured.warm_up_seconds == pytest.approx(1.0)
    assert measured.throughput == pytest.approx(1000)
    assert measured.errors == {"404": 60}
    assert measured.ok == 6001
    assert measured.sent == 6001 + 60 + 2
    assert measured.latency.max_ms == pytest.approx(10, rel=0.001)
    assert measured.by_size == [], "all inputs are of one size"
    seconds, counts, medians, _ = zip(*measured.over_time, strict=True)
    assert [round(second, 3) for second in seconds[:5]] == [-0.8, -0.6, -0.4, -0.2, 0.0], (
        "the warm-up is told as well"
    )
    assert (
        sum(count for second, count in zip(seconds, counts, strict=True) if second > 0)
        == measured.ok - 1
    )
    assert (medians[0], medians[-1]) == (pytest.approx(500), pytest.approx(10))


def test_a_long_round_has_few_time_slots() -> None:
    marks = [
        SlotCounts(0.1 * number, 2 * number, 0, 2 * number, Counter()) for number in range(3001)
    ]
    intervals = over_time(marks, 157, array("f", [0.001, 0.003] * 3000))
    assert len(intervals) <= MAX_INTERVALS
    assert min(abs(interval[0]) for interval in intervals) == 0, (
        "one of them ends where the warm-up does"
    )
    assert {interval[2:] for interval in intervals} == {(1.0, 3.0)}


def test_an_interval_has_enough_responses_for_its_percentiles() -> None:
    slow = [
        SlotCounts(0.1 * number, number // 2, 0, number // 2, Counter()) for number in range(61)
    ]
    intervals = over_time(slow, 0, array("f", [0.001] * 30))
    assert [count for _, count, *_ in intervals] == [5] * 6, (
        "and there are enough intervals to see a course"
    )
    slots = [SlotCounts(0.1 * number, 5 * number, 0, 5 * number, Counter()) for number in range(61)]
    assert [count for _, count, *_ in over_time(slots, 0, array("f", [0.001] * 300))] == [20] * 15


def test_latencies_are_grouped_by_the_sizes_of_inputs() -> None:
    few_values = by_size(
        [10, 500, 10], array("I", [0, 1, 2, 1]), array("f", [0.001, 0.05, 0.002, 0.07])
    )
    assert [
        (group.smallest, group.largest, group.ok, group.p50_ms, group.p99_ms)
        for group in few_values
    ] == [(10, 10, 2, 1, 2), (500, 500, 2, 50, 70)]
    many_values = by_size(
        range(1, 101), array("I", range(100)), array("f", [0.001 * size for size in range(1, 101)])
    )
    assert [(group.smallest, group.largest, group.ok, group.p50_ms) for group in many_values] == [
        (1, 25, 25, 13),
        (26, 50, 25, 38),
        (51, 75, 25, 63),
        (76, 100, 25, 88),
    ]
    assert by_size([7, 7], array("I", [0]), array("f", [1.0])) == []
    assert [group.ok for group in by_size([1, 2], array("I"), array("f"))] == [0, 0]


def rendered_request(
    protocol: str, payload: Payload = ONE_PAYLOAD[0], **changes: Any
) -> tuple[str, dict[str, str], bytes]:
    head, _, body = render(protocol, "http://there:1/up/", "a b", payload, **changes).partition(
        b"\r\n\r\n"
    )
    line, *headers = head.decode().split("\r\n")
    return line, dict(header.split(": ", 1) for header in headers), body


def test_each_protocol_has_its_own_paths_and_bodies() -> None:
    for protocol in ("tsx", "torchserve"):
        line, headers, body = rendered_request(protocol, version="2.0", token="t")
        assert line == "POST /up/predictions/a%20b/2.0 HTTP/1.1"
        assert body == b'{"x":1}'
        assert headers == {
            "Host": "there:1",
            "Content-Type": "application/json",
            "Authorization": "Bearer t",
            "Content-Length": "7",
        }
    line, _, body = rendered_request("kserve-v1")
    assert (line, json.loads(body)) == (
        "POST /up/v1/models/a%20b:predict HTTP/1.1",
        {"instances": [{"x": 1}]},
    )
    assert json.loads(rendered_request("kserve-v1", Payload(b"\xff", "image/png"))[2]) == {
        "instances": [{"b64": base64.b64encode(b"\xff").decode()}]
    }
    assert (
        rendered_request("kserve-v1", Payload(b'{"instances":[]}', None))[2] == b'{"instances":[]}'
    )
    line, headers, body = rendered_request(
        "kserve-v2", Payload(b"[[1.5,2],[3,4]]", "application/json"), version="3"
    )
    assert line == "POST /up/v2/models/a%20b/versions/3/infer HTTP/1.1"
    assert json.loads(body)["inputs"][0] == {
        "name": "input-0",
        "shape": [2, 2],
        "datatype": "FP32",
        "data": [1.5, 2, 3, 4],
    }
    line, headers, body = rendered_request("kserve-v2", Payload(b"\xff\xd8", "image/jpeg"))
    size = int(headers["Inference-Header-Content-Length"])
    assert json.loads(body[:size])["inputs"][0]["datatype"] == "BYTES"
    assert body[size:] == b"\2\0\0\0\xff\xd8"
    assert (
        rendered_request("kserve-v2", Payload(b'{"inputs":[]}', "application/json"))[2]
        == b'{"inputs":[]}'
    )
    assert (
        rendered_request("invocations", Payload(b"x", "text/plain", query="a=1"))[0]
        == "POST /up/invocations?model_name=a%20b&a=1 HTTP/1.1"
    )
    assert (
        rendered_request("post", Payload(b"x", "text/plain", query="a=1"))[0]
        == "POST /up?a=1 HTTP/1.1"
    )
    assert render("post", "http://there", "", ONE_PAYLOAD[0]).startswith(b"POST / HTTP/1.1\r\n")
    for protocol in ("kserve-v1", "invocations", "post"):
        with pytest.raises(UsageError, match="leave --version out"):
            rendered_request(protocol, version="1.0")
    with pytest.raises(UsageError, match="not a protocol over HTTP"):
        rendered_request(PROTOCOLS[-1])


def test_an_inputs_headers_are_sent_except_those_the_generator_sets() -> None:
    payload = Payload(
        b"x",
        "text/plain",
        (("X-Own", "o"), ("content-length", "9"), ("Host", "h"), ("Authorization", "Bearer own")),
    )
    assert rendered_request("tsx", payload)[1] == {
        "Host": "there:1",
        "Content-Type": "text/plain",
        "X-Own": "o",
        "Authorization": "Bearer own",
        "Content-Length": "1",
    }
    assert rendered_request("tsx", payload, token="t")[1]["Authorization"] == "Bearer t"


@pytest.mark.parametrize(
    "value", [[[1, 2], [3]], [], [[]], ["a"], [True], {"x": 1}, 3, None, [[1], 2], [1, [2]]]
)
def test_other_values_are_not_tensors(value: Any) -> None:
    assert tensor_of(value) is None


def test_server_addresses_are_parsed() -> None:
    assert read_target("127.0.0.1:8080").authority == "127.0.0.1:8080"
    assert read_target("http://0.0.0.0:8080").host == "127.0.0.1"
    assert read_target("https://there/a/") == ("there", 443, "/a", True, "")
    assert read_target("http://[::1]:80").authority == "[::1]"
    assert read_target("unix:/run/tsx.sock").socket == "/run/tsx.sock"
