"""The access log: a line for each answer of either lane, in TorchServe's shape."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import httpx
import pytest

from tests.support.logs import lines_of
from tsx_runtime.api import access_log
from tsx_runtime.api.access_log import AccessLog, sanitized_line
from tsx_runtime.shared.line_log import MAX_BATCH_LINES

LINE = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - /127\.0\.0\.1:\d+ "
    r'"([^"]*)" (\d{3}) (\d+) ([0-9a-f-]{36}) (\S+) (\S+)$'
)


@pytest.fixture(scope="module")
def log(start_server, until):
    """Send some requests and return the lines of their log."""
    settings = {"access_log": True, "log_format": "text", "inference_token": "very-secret"}
    with lines_of("ACCESS_LOG") as lines, start_server(**settings) as server:
        server.register("talker.mar", initial_workers=1)

        def post(query="", model="talker", **request):
            token = {"authorization": "Bearer very-secret"}
            server.ask(path=f"/predictions/{model}{query}", **token, **request)

        post("?a=b&token=very-secret")
        post(x_do="raise")
        post(x_do="stream")
        post(x_do="status", x_status="207")
        post(model="nobody")
        post('?q="%22%0a')
        post(lane="other")
        server.inference.get("/ping")
        server.management.get("/models?limit=1&api_key=very-secret")
        until(lambda: len(lines) >= 9)
    return lines


def test_each_answer_has_one_line(log):
    matches = [LINE.match(line) for line in log]
    assert all(matches), log
    assert sorted((match[1], int(match[2])) for match in matches) == [
        ("GET /models?limit=1&api_key=*** HTTP/1.1", 200),
        ("GET /ping HTTP/1.1", 200),
        ("POST /predictions/nobody HTTP/1.1", 404),
        ("POST /predictions/talker HTTP/1.1", 200),
        ("POST /predictions/talker HTTP/1.1", 200),
        ("POST /predictions/talker HTTP/1.1", 207),
        ("POST /predictions/talker HTTP/1.1", 500),
        ("POST /predictions/talker?a=b&token=*** HTTP/1.1", 200),
        ("POST /predictions/talker?q=%22%22%0a HTTP/1.1", 200),
    ]
    assert "very-secret" not in "".join(log)
    for match in matches:
        served = "/talker" in match[1]
        assert "/nobody" in match[1] or (match[5], match[6]) == (
            ("talker", "1.0") if served else ("-", "-")
        )
    assert len({match[4] for match in matches}) == len(log)


@pytest.mark.parametrize("is_json", [False, True])
def test_an_id_that_a_plugin_sets_costs_no_other_answer_its_line(is_json):
    async def log_two() -> None:
        log = AccessLog(is_json=is_json)
        for request_id in (b"caf\xe9", b"plain"):
            log.add(None, "GET /own HTTP/1.1", 200, 0.0, 0.0, request_id)
        log.flush()

    with lines_of("ACCESS_LOG") as lines:
        asyncio.run(log_two())
    first, second = lines
    assert "caf\xe9" in first
    assert "plain" in second


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_each_answer_has_a_line_with_the_probability_of_the_share(share):
    log = AccessLog(share)
    lines = sum(log.wants() for _ in range(20_000))
    assert abs(lines - 20_000 * share) < 5 * (20_000 * share * (1 - share)) ** 0.5


def test_a_share_of_the_answers_has_lines_in_json_with_their_requests_and_models(
    start_server, until
):
    with (
        lines_of("ACCESS_LOG") as lines,
        start_server(access_log="50%", log_format="json") as server,
    ):
        server.register("talker.mar", initial_workers=1)
        lanes = ["other"] + ["fast"] * 59
        ids = {server.ask(lane=lane).headers["x-request-id"] for lane in lanes}
        until(lambda: lines)
    entries = [json.loads(line) for line in lines]
    # Six deviations.
    assert 30 - 25 <= len(entries) <= 30 + 25
    assert {entry["request_id"] for entry in entries} <= ids
    for entry in entries:
        assert (entry["model"], entry["version"], entry["status"]) == ("talker", "1.0", 200)
        assert entry["message"] == "POST /predictions/talker HTTP/1.1"


@pytest.mark.parametrize("lane", ["fast", "other"])
def test_a_stream_without_an_end_says_so(start_server, until, tmp_path, lane):
    with (
        lines_of("ACCESS_LOG") as lines,
        start_server(access_log=True, log_format="json") as server,
    ):
        server.register("talker.mar", initial_workers=1)
        for action in ("break", "stream-wait"):
            content = b"x" if lane == "fast" else iter([b"x"])
            headers = {"x-do": action, "x-file": str(tmp_path / "go")}
            with server.inference.stream(
                "POST", "/predictions/talker", content=content, headers=headers
            ) as answer:
                parts = answer.iter_raw()
                assert next(parts) == b"a"
                if action == "break":
                    with pytest.raises(httpx.RemoteProtocolError):
                        list(parts)
        until(lambda: len(lines) >= 1)
        (tmp_path / "go").touch()
        until(lambda: len(lines) >= 2)
    entries = [json.loads(line) for line in lines]
    assert [(entry["status"], entry["model"], entry["broken"]) for entry in entries] == [
        (200, "talker", "the answer was interrupted"),
        (200, "talker", "the client disconnected"),
    ]


def test_in_text_the_reason_stands_behind_the_line(caplog):
    log = AccessLog(in_file=True)

    async def add() -> None:
        request = (("127.0.0.1", 5), "POST /a HTTP/1.1", 200, 1.0, 1.5)
        log.add(*request, b"id", "m", "1.0", "the client disconnected")

    with caplog.at_level(logging.INFO, "ACCESS_LOG"):
        asyncio.run(add())
        log.flush()
    line = '/127.0.0.1:5 "POST /a HTTP/1.1" 200 500 (the client disconnected)'
    assert caplog.messages[0].endswith(line)


@pytest.mark.parametrize("is_json", [False, True])
def test_each_line_is_made_with_its_answer_and_passed_on_in_order(monkeypatch, caplog, is_json):
    """No turn of the event loop makes the lines of many answers, and a stop loses none."""
    texts = []
    monkeypatch.setattr(access_log, "sanitized_line", lambda line: texts.append(line) or line)
    count = 3 * MAX_BATCH_LINES + 7

    async def add() -> None:
        for number in range(count):
            log.add(None, f"GET /{number} HTTP/1.1", 200, 1.0, 1.5)
            assert texts.count(f"GET /{number} HTTP/1.1") == 1
            texts.clear()

    log = AccessLog(is_json=is_json, in_file=not is_json)
    with caplog.at_level(logging.INFO, "ACCESS_LOG"):
        asyncio.run(add())
        log.flush()
    assert max(len(text.splitlines()) for text in caplog.messages) <= MAX_BATCH_LINES
    numbers = re.findall(r"GET /(\d+) ", "\n".join(caplog.messages))
    assert [int(number) for number in numbers] == list(range(count))


def test_a_request_cannot_forge_a_line():
    line = sanitized_line('GET /a" 200 1\r\nfake \xff\\ HTTP/1.1')
    assert line == r"GET /a\x22 200 1\x0d\x0afake \xff\x5c HTTP/1.1"


def test_without_the_setting_there_is_no_line(server, caplog):
    with caplog.at_level(logging.INFO, "ACCESS_LOG"):
        server.inference.post("/predictions/talker")
    assert not [record for record in caplog.records if record.name == "ACCESS_LOG"]
