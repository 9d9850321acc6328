"""The figures of an open-loop load: counts, latencies and goodput."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import openloop
from tests.support.clients.scripted import OK, Request, Step, scripted

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.skipif(sys.platform == "win32", reason="httptools is not there")
def test_every_request_is_counted_and_fast_responses_are_goodput(
    tmp_path: Path,
) -> None:
    requests: list[Request] = []

    def answer(number: int, request: Request) -> list[Step]:
        requests.append(request)
        return [[OK], [BUSY], [0.6, OK]][number % 3]

    (tmp_path / "body").write_bytes(b"abc")
    with scripted(answer) as url:
        row = openloop.run(
            f"{url}/a/b",
            30,
            1,
            40,
            tmp_path / "body",
            headers=["X-Own: 1", "Content-Type: a/b"],
            limit_ms=500,
        )
    assert (row.planned, row.errors, row.unanswered, row.unsent) == (30, {}, 0, 0)
    assert (row.accepted, row.refused) == (20, 10)
    # Every third response took 0.6 s, longer than the limit.
    assert 0 < row.goodput <= 10.5
    assert row.most >= 600
    assert row.refused_p99 > 0
    assert requests[0].line == b"POST /a/b HTTP/1.1"
    assert (
        requests[0].headers[b"x-own"],
        requests[0].headers[b"content-type"],
        requests[0].body,
    ) == (
        b"1",
        b"a/b",
        b"abc",
    )
