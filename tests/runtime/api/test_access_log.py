"""The access log: one line for each response of both lanes, in TorchServe's format."""

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
        is_talker = "/talker" in match[1]
        assert "/nobody" in match[1] or (match[5], match[6]) == (
            ("talker", "1.0") if is_talker else ("-", "-")
        )
    assert len({match[4] for match in matches}) == len(log)


@pytest.mark.parametrize("is_json", [False, True])
def test_a_non_ascii_request_id_of_a_plugin_does_not_lose_log_lines(is_json):
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


@pytest.mark.parametrize("sampling_rate", [0.5, 0.02])
def test_the_access_log_samples_responses_at_the_configured_rate(sampling_rate):
    log = AccessLog(sampling_rate)
    lines = sum(log.wants() for _ in range(20_000))
    assert (
        abs(lines - 20_000 * sampling_rate)
        < 5 * (20_000 * sampling_rate * (1 - sampling_rate)) ** 0.5
    )


def test_sampled_json_lines_name_their_request_and_model(start_server, until):
    with (
        lines_of("ACCESS_LOG") as lines,
        start_server(access_log="50%", log_format="json") as server,
    ):
        server.register("talker.mar", initial_workers=1)
        lanes = ["other"] + ["fast"] * 59
        ids = {server.ask(lane=lane).headers["x-request-id"] for lane in lanes}
        until(lambda: lines)
    entries = [json.loads(line) for line in lines]
    # Six standard deviations around the expected 30.
    assert 30 - 25 <= len(entries) <= 30 + 25
    assert {entry["request_id"] for entry in entries} <= ids
    for entry in entries:
        assert (entry["model"], entry["version"], entry["status"]) == ("talker", "1.0", 200)
        assert entry["message"] == "POST /predictions/talker HTTP/1.1"


@pytest.mark.parametrize("lane", ["fast", "other"])
def test_the_line_of_an_incomplete_stream_says_so(start_server, until, tmp_path, lane):
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
                chunks = answer.iter_raw()
                assert next(chunks) == b"a"
                if action == "break":
                    with pytest.raises(httpx.RemoteProtocolError):
                        list(chunks)
        until(lambda: len(lines) >= 1)
        (tmp_path / "go").touch()
        until(lambda: len(lines) >= 2)
    entries = [json.loads(line) for line in lines]
    assert [(entry["status"], entry["model"], entry["broken"]) for entry in entries] == [
        (200, "talker", "the answer was interrupted"),
        (200, "talker", "the client disconnected"),
    ]


def test_a_text_line_ends_with_the_reason_of_an_error(caplog):
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
def test_lines_are_written_in_the_order_of_their_responses(monkeypatch, caplog, is_json):
    """Bound the lines that one turn of the event loop writes, and write the rest at the stop."""
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


def test_a_request_cannot_forge_a_log_line():
    line = sanitized_line('GET /a" 200 1\r\nfake \xff\\ HTTP/1.1')
    assert line == r"GET /a\x22 200 1\x0d\x0afake \xff\x5c HTTP/1.1"


def test_without_the_setting_no_line_is_written(server, caplog):
    with caplog.at_level(logging.INFO, "ACCESS_LOG"):
        server.inference.post("/predictions/talker")
    assert not [record for record in caplog.records if record.name == "ACCESS_LOG"]
