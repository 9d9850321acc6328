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
from tsx_runtime.api.access_log import AccessLog, shown
from tsx_runtime.shared.line_log import MAX_BATCH_LINES

LINE = re.compile(
    r'^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - /127\.0\.0\.1:\d+ "([^"]*)" (\d{3}) (\d+) ([0-9a-f-]{36}) (\S+) (\S+)$'
)


@pytest.fixture(scope="module")
def reported(start_server, until):
    """What some requests left in the log."""
    settings = {"access_log": True, "log_format": "text", "inference_token": "very-secret"}
    with lines_of("ACCESS_LOG") as lines, start_server(**settings) as server:
        server.register("talker.mar", initial_workers=1)
        token = {"authorization": "Bearer very-secret"}
        for path, headers in (
            ("/predictions/talker?a=b&token=very-secret", {}),
            ("/predictions/talker", {"x-do": "raise"}),
            ("/predictions/talker", {"x-do": "stream"}),
            ("/predictions/talker", {"x-do": "status", "x-status": "207"}),
            ("/predictions/nobody", {}),
            ('/predictions/talker?q="%22%0a', {}),
        ):
            server.inference.post(path, headers=token | headers)
        server.inference.post(
            "/predictions/talker", content=iter([b"a", b"b"]), headers=token
        )  # chunked: the other lane
        server.inference.get("/ping")
        server.management.get("/models?limit=1&api_key=very-secret")
        until(lambda: len(lines) >= 9)
    return lines


def test_each_answer_has_one_line(reported):
    parsed = [LINE.match(line) for line in reported]
    assert all(parsed), reported
    assert sorted((match[1], int(match[2])) for match in parsed) == sorted(
        [
            ("POST /predictions/talker?a=b&token=*** HTTP/1.1", 200),
            ("POST /predictions/talker HTTP/1.1", 500),
            ("POST /predictions/talker HTTP/1.1", 200),
            ("POST /predictions/talker HTTP/1.1", 207),
            ("POST /predictions/nobody HTTP/1.1", 404),
            ("POST /predictions/talker?q=%22%22%0a HTTP/1.1", 200),
            ("POST /predictions/talker HTTP/1.1", 200),
            ("GET /ping HTTP/1.1", 200),
            ("GET /models?limit=1&api_key=*** HTTP/1.1", 200),
        ]
    )
    assert "very-secret" not in "".join(reported)
    served = {match[1].partition("?")[0]: (match[5], match[6]) for match in parsed}
    assert (
        served["POST /predictions/talker HTTP/1.1"]
        == served["POST /predictions/talker"]
        == ("talker", "1.0")
    )
    assert served["GET /ping HTTP/1.1"] == ("-", "-")
    assert len({match[4] for match in parsed}) == len(reported)


@pytest.mark.parametrize("is_json", [False, True])
def test_an_id_that_a_plugin_sets_costs_no_other_answer_its_line(is_json):
    async def log_two() -> None:
        log = AccessLog(is_json=is_json)
        for request_id in (b"caf\xe9", b"plain"):
            log.add(None, "GET /own HTTP/1.1", 200, 0.0, 0.0, request_id)
        log.flush()

    with lines_of("ACCESS_LOG") as lines:
        asyncio.run(log_two())
    assert [("caf\xe9" in line, "plain" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_of_a_share_each_answer_has_a_line_with_that_probability(share):
    log = AccessLog(share)
    wanted = sum(log.wants() for _ in range(20_000))
    assert abs(wanted - 20_000 * share) < 5 * (20_000 * share * (1 - share)) ** 0.5


def test_a_share_of_the_answers_has_lines_in_json_with_their_requests_and_models(
    start_server, until
):
    with (
        lines_of("ACCESS_LOG") as lines,
        start_server(access_log="50%", log_format="json") as server,
    ):
        server.register("talker.mar", initial_workers=1)
        chunked = {"content": iter([b"a"])}
        ids = [
            server.inference.post("/predictions/talker", **(chunked if n == 0 else {})).headers[
                "x-request-id"
            ]
            for n in range(60)
        ]
        until(lambda: lines)
    reported = [json.loads(line) for line in lines]
    assert 5 <= len(reported) <= 55  # 30, give or take six deviations
    assert {line["request_id"] for line in reported} <= set(ids)
    assert {(line["model"], line["version"], line["status"]) for line in reported} == {
        ("talker", "1.0", 200)
    }
    assert reported[0]["message"] == "POST /predictions/talker HTTP/1.1"


@pytest.mark.parametrize("lane", ["fast lane", "other lane"])
def test_a_stream_without_an_end_says_so(start_server, until, tmp_path, lane):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())
    logger = logging.getLogger("ACCESS_LOG")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with start_server(access_log=True, log_format="json") as server:
        server.register("talker.mar", initial_workers=1)
        for word in ("break", "stream-wait"):
            sent = b"x" if lane == "fast lane" else iter([b"x"])
            headers = {"x-do": word, "x-file": str(tmp_path / "go")}
            with server.inference.stream(
                "POST", "/predictions/talker", content=sent, headers=headers
            ) as answer:
                parts = answer.iter_raw()
                assert next(parts) == b"a"
                if word == "break":
                    with pytest.raises(httpx.RemoteProtocolError):
                        list(parts)
        until(lambda: len(lines) >= 1)
        (tmp_path / "go").touch()
        until(lambda: len(lines) >= 2)
    logger.removeHandler(handler)
    reported = [json.loads(line) for line in lines]
    assert [(line["status"], line["model"], line["broken"]) for line in reported] == [
        (200, "talker", "the answer was interrupted"),
        (200, "talker", "the client disconnected"),
    ]


def test_in_text_the_reason_stands_behind_the_line(caplog):
    log = AccessLog(in_file=True)
    with caplog.at_level(logging.INFO, "ACCESS_LOG"):

        async def add() -> None:
            log.add(
                ("127.0.0.1", 5),
                "POST /a HTTP/1.1",
                200,
                1.0,
                1.5,
                b"id",
                "m",
                "1.0",
                "the client disconnected",
            )

        asyncio.run(add())
        log.flush()
    assert re.search(
        r'/127\.0\.0\.1:5 "POST /a HTTP/1\.1" 200 500 \(the client disconnected\)$',
        caplog.messages[0],
    )


@pytest.mark.parametrize("is_json", [False, True])
def test_each_line_is_made_with_its_answer_and_passed_on_in_order(monkeypatch, caplog, is_json):
    """At any rate: no turn of the event loop has to make the lines of many answers, and stopping
    loses none.
    """
    texts = []
    monkeypatch.setattr(access_log, "shown", lambda line: texts.append(line) or line)
    many = 3 * MAX_BATCH_LINES + 7

    async def add() -> None:
        for number in range(many):
            log.add(None, f"GET /{number} HTTP/1.1", 200, 1.0, 1.5)
            assert texts.count(f"GET /{number} HTTP/1.1") == 1
            texts.clear()

    log = AccessLog(is_json=is_json, in_file=not is_json)
    with caplog.at_level(logging.INFO, "ACCESS_LOG"):
        asyncio.run(add())
        log.flush()
    assert max(len(text.splitlines()) for text in caplog.messages) <= MAX_BATCH_LINES
    assert [
        int(found) for text in caplog.messages for found in re.findall(r"GET /(\d+) ", text)
    ] == list(range(many))


def test_a_request_cannot_forge_a_line():
    assert (
        shown('GET /a" 200 1\r\nfake \xff\\ HTTP/1.1')
        == r"GET /a\x22 200 1\x0d\x0afake \xff\x5c HTTP/1.1"
    )


def test_without_the_setting_there_is_no_line(server, caplog):
    with caplog.at_level(logging.INFO, "ACCESS_LOG"):
        server.inference.post("/predictions/talker")
    assert not [record for record in caplog.records if record.name == "ACCESS_LOG"]
