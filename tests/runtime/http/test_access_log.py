"""The access log: a line for each answer of either lane, in TorchServe's shape."""

from __future__ import annotations

import logging
import re

import pytest

from tsx_runtime.http.access import shown

LINE = re.compile(r'^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - /127\.0\.0\.1:\d+ "([^"]*)" (\d{3}) (\d+)$')


@pytest.fixture(scope="module")
def told(start_server, until):
    """What some requests left in the log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())
    logger = logging.getLogger("ACCESS_LOG")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with start_server(access_log=True, inference_token="very-secret") as server:
        server.register("talker.mar", initial_workers=1)
        token = {"authorization": "Bearer very-secret"}
        for path, headers in (
            ("/predictions/talker?a=b", {}),
            ("/predictions/talker", {"x-do": "raise"}),
            ("/predictions/talker", {"x-do": "stream"}),
            ("/predictions/talker", {"x-do": "status", "x-status": "207"}),
            ("/predictions/nobody", {}),
            ('/predictions/talker?q="%22%0a', {}),
        ):
            server.inference.post(path, headers=token | headers)
        server.inference.post("/predictions/talker", content=iter([b"a", b"b"]), headers=token)  # chunked: the other lane
        server.inference.get("/ping")
        server.management.get("/models?limit=1")
        until(lambda: len(lines) >= 9)
    logger.removeHandler(handler)
    return lines


def test_each_answer_has_one_line(told):
    parsed = [LINE.match(line) for line in told]
    assert all(parsed), told
    assert sorted((match[1], int(match[2])) for match in parsed) == sorted(
        [
            ("POST /predictions/talker?a=b HTTP/1.1", 200),
            ("POST /predictions/talker HTTP/1.1", 503),
            ("POST /predictions/talker HTTP/1.1", 200),
            ("POST /predictions/talker HTTP/1.1", 207),
            ("POST /predictions/nobody HTTP/1.1", 404),
            ("POST /predictions/talker?q=%22%22%0a HTTP/1.1", 200),
            ("POST /predictions/talker HTTP/1.1", 200),
            ("GET /ping HTTP/1.1", 200),
            ("GET /models?limit=1 HTTP/1.1", 200),
        ]
    )
    assert "very-secret" not in "".join(told)


def test_a_request_cannot_forge_a_line():
    assert shown('GET /a" 200 1\r\nfake \xff\\ HTTP/1.1') == r"GET /a\x22 200 1\x0d\x0afake \xff\x5c HTTP/1.1"


def test_without_the_setting_there_is_no_line(server, caplog):
    with caplog.at_level(logging.INFO, "ACCESS_LOG"):
        server.inference.post("/predictions/talker")
    assert not [record for record in caplog.records if record.name == "ACCESS_LOG"]
