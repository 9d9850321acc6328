"""The lines of one batch-transform request: each is answered, and every resource is released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.batches import BATCH
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.tokens import BearerToken
from tsx_runtime.api.messages import Message
from tsx_runtime.core.scheduling.job import Route, WaitingJob
from tsx_runtime.errors import InvalidToken
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.targets.sagemaker.app import MultiModel
from tsx_runtime.targets.sagemaker.batch_transform import (
    CSV,
    JSON_LINES,
    LineAnswer,
    LineFormat,
    answer_lines,
    choose_format,
    find_format,
)
from tsx_runtime.targets.sagemaker.environment import read_environment

pytestmark = pytest.mark.anyio

LINES = [(1, b"a"), (3, b"b"), (4, b"c")]


class Echo:
    """A model that answers at once and records its events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gate = asyncio.Semaphore(1)

    def submit(self, job: WaitingJob) -> None:
        self.events.append(f"asked {bytes(job.body).decode()}")
        job.answer(200, b"", job.body, BATCH)

    def leave(self, job: WaitingJob) -> None:
        raise AssertionError("every line was answered")

    def line_of(self, line_answer: LineAnswer) -> bytes:
        self.events.append(f"written {line_answer.body.decode()}")
        return line_answer.body.upper()

    async def answers(self, line_of: Any = None) -> list[LineAnswer]:
        def job_of(number: int, line: bytes) -> tuple[WaitingJob, Callable[[LineAnswer], bytes]]:
            return WaitingJob(b"", line, 0.0), line_of or self.line_of

        return await answer_lines(LINES, cast("Route", self), self.gate, job_of, 1000)


async def test_each_line_is_written_when_it_is_answered() -> None:
    echo = Echo()
    answers = await echo.answers()
    assert [(answer.number, answer.body) for answer in answers] == [(1, b"A"), (3, b"B"), (4, b"C")]
    assert echo.events == [f"{verb} {line}" for line in "abc" for verb in ("asked", "written")]


async def test_an_unexpected_line_failure_fails_the_request() -> None:
    """Fail it, since omitting one line would shift the answers of the following lines."""

    def line_of(line_answer: LineAnswer) -> bytes:
        if line_answer.number == 3:
            raise KeyError("unknown")
        return line_answer.body

    echo = Echo()
    with pytest.raises(KeyError, match="unknown"):
        await echo.answers(line_of)
    assert echo.events == ["asked a", "asked b"]
    assert not echo.gate.locked()


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/models"), ("DELETE", "/models/a"), ("POST", "/models/a b/invoke")],
)
def test_platform_routes_need_the_configured_token(method: str, path: str) -> None:
    environment: Any = read_environment({"SAGEMAKER_MULTI_MODEL": "true"})
    predictions = SimpleNamespace(guard=Guard(BearerToken("right")), limit=1000)
    app: Any = SimpleNamespace(counts=ResponseCounts(), predictions=predictions)
    registry: Any = SimpleNamespace(stopping=False, models={})
    receive: Any = None

    def status_of(path: str) -> int:
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        async def run() -> None:
            platform = MultiModel(environment, registry, app, bool, receive)
            scope = {
                "type": "http",
                "method": method,
                "path": path,
                "raw_path": path.encode(),
                "headers": [],
                "query_string": b"",
            }
            await platform(scope, receive, send)

        asyncio.run(run())
        return int(messages[0]["status"])

    assert status_of(path) == InvalidToken.status
    # The platform sends no token with its ping.
    assert status_of("/ping") == 200


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (b"text/csv;q=0.5, application/jsonlines", JSON_LINES),
        (b"application/*", JSON_LINES),
        (b"text/*;q=0.1, */*", JSON_LINES),
        (b"application/json, text/csv", JSON_LINES),
        (b"image/png", CSV),
        (b"*/*", CSV),
        (b"", CSV),
    ],
)
def test_the_answer_has_the_most_preferred_type(accept: bytes, form: LineFormat) -> None:
    assert choose_format(accept, CSV) is form


def test_a_body_of_lines_is_recognized_by_its_type() -> None:
    assert find_format(b"Text/CSV; charset=utf-8") is CSV
    assert find_format(b"application/json") is None
