"""Asynchronous handlers in a real worker process, whose requests overlap."""

from __future__ import annotations

import json
import select
from typing import Any

import pytest

from tests.runtime.worker.conftest import DEADLINE_S, StartWorker, Worker, encode_request
from tests.support.served_model import a_served_model
from tsx_runtime import wire
from tsx_runtime.wire import Kind
from tsx_runtime.worker.execution import async_handlers
from tsx_runtime.worker.handler_api.context import Context

HANDLER = """
    import asyncio, time
    from ts.handler_utils.utils import send_intermediate_predict_response

    class Handler:
        async def initialize(self, context):
            self.loop = asyncio.get_running_loop()
            self.gate = asyncio.Event()
            context.cache = {"seen": 0}

        async def handle(self, data, context):
            assert asyncio.get_running_loop() is self.loop
            assert len(data) == 1
            context.cache["seen"] += 1
            word = data[0]["body"].decode()
            if word == "wait":
                context.metrics.add_metric("waiting", context.cache["seen"], "count", metric_type="gauge")
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    context.cache["cancelled"] = context.get_request_id(0)
                    raise
                return [f"{context.get_request_id(0)} waited"]
            if word == "open":
                self.gate.set()
            if word == "block":
                time.sleep(0.2)
            if word == "raise":
                raise ValueError("no such prompt")
            if word == "exit":
                raise SystemExit(3)
            if word == "cancelled":
                raise asyncio.CancelledError
            if word == "pieces":
                context.set_response_header(0, "x-first", "yes")
                for part in "abc":
                    send_intermediate_predict_response([part], context.request_ids, "Intermediate", 200, context)
                    await asyncio.sleep(0)
                return [""]
            if word == "two":
                return ["a", "b"]
            if word == "cache":
                return [context.cache]
            return [word]
"""


@pytest.fixture
def worker(start_worker: StartWorker) -> Worker:
    return start_worker(HANDLER, mode="async")


def test_a_waiting_request_does_not_delay_others(worker: Worker) -> None:
    worker.send_each(b"wait", b"wait", b"a")
    assert worker.read_answers(1) == {3: (200, "", ["a"])}
    worker.send_each(b"open", first=4)
    assert worker.read_answers(3) == {
        4: (200, "", ["open"]),
        1: (200, "", ["id-1 waited"]),
        2: (200, "", ["id-2 waited"]),
    }


def test_parts_are_sent_at_once_and_the_return_value_is_the_last_part(worker: Worker) -> None:
    worker.send_each(b"pieces")
    assert worker.read_answers(1) == {
        1: (200, "x-first: yes\r\nts_stream_next: true\r\n", ["a", "b", "c", ""])
    }


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (b"raise", "ValueError: no such prompt"),
        (b"exit", "SystemExit: 3"),
        (b"two", "number of batch response mismatched"),
        (b"cancelled", "was cancelled before it was answered"),
    ],
)
def test_a_request_that_fails_fails_alone(worker: Worker, prompt: bytes, reason: str) -> None:
    worker.send_each(b"wait", prompt)
    status, _, (body,) = worker.read_answers(1)[2]
    assert status == (503 if prompt == b"cancelled" else 500)
    assert reason in body
    worker.send_each(b"open", first=3)
    assert worker.read_answers(2)[1] == (200, "", ["id-1 waited"])


def test_a_cancelled_request_is_closed_and_reported_as_cancelled(worker: Worker) -> None:
    worker.send_each(b"wait", b"a")
    assert 2 in worker.read_answers(1)
    worker.send(Kind.CANCEL, 1)
    assert worker.read_answers(1)[1][0] == 499
    worker.send_each(b"cache", first=3)
    assert json.loads(worker.read_answers(1)[3][2][0]) == {"seen": 3, "cancelled": "id-1"}


def test_metrics_of_a_long_answer_are_reported_before_it_ends(worker: Worker) -> None:
    worker.send_each(b"wait")
    select.select([worker.sock], [], [], DEADLINE_S)
    worker.ping()
    (metric,) = worker.reports[0]["metrics"]
    assert (metric["name"], metric["value"]) == ("waiting", 1)


def test_the_loop_answers_pings_and_the_worker_ends_with_its_front_end(
    worker: Worker,
) -> None:
    worker.send_each(b"wait")
    worker.ping()
    assert worker.close() == 0


def test_a_handler_that_is_not_a_coroutine_function_is_served(start_worker: StartWorker) -> None:
    worker = start_worker("def handle(data, context):\n    return data and ['plain']", mode="async")
    worker.send_each(b"a", b"b")
    assert worker.read_answers(2) == {1: (200, "", ["plain"]), 2: (200, "", ["plain"])}


def test_a_request_cancelled_before_its_task_begins_is_closed_too(
    worker: Worker,
) -> None:
    # The worker reads these frames together, after a request that blocks the event loop.
    frames = [
        *encode_request(1, b"block"),
        *encode_request(2, b"wait"),
        *wire.encode(Kind.CANCEL, 2),
    ]
    worker.sock.sendall(b"".join(map(bytes, frames)))
    answers = worker.read_answers(2)
    assert {batch: status for batch, (status, _, _) in answers.items()} == {1: 200, 2: 499}


def test_a_body_that_is_not_json_is_a_client_error() -> None:
    async def fails(data: Any, context: Context) -> list[Any]:
        raise TypeError("no input")

    model = a_served_model(fails)
    item = (0, wire.request_meta("id", b"", [(b"content-type", b"application/json")]), b'{"a')
    ((status, _, body),) = async_handlers.answer(model, [item]).answers
    assert (status, b"not valid JSON" in bytes(body)) == (400, True)
