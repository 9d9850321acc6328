"""Continuous batching in a real worker process, where requests join and leave between calls."""

from __future__ import annotations

import json

import pytest

from tests.runtime.worker.conftest import StartWorker, Worker
from tsx_runtime import wire
from tsx_runtime.wire import Kind

HANDLER = """
    import os, time
    from pathlib import Path

    calls = []

    def stop_after(count):
        def stop(result):
            nonlocal count
            count -= 1
            return count <= 0

        return stop

    class Handler:
        def initialize(self, context):
            context.cache = {}

        def handle(self, data, context):
            calls.append(len(data))
            for id in set(context.cache) - set(context.request_ids.values()):
                del context.cache[id]
            for idx, row in enumerate(data):
                id = context.get_request_id(idx)
                if id not in context.cache:
                    action, _, count = row["body"].decode().partition(" ")
                    if action == "raise":
                        raise ValueError("no such prompt")
                    if action == "file":
                        context.set_response_header(idx, "x-first", "yes")
                    context.cache[id] = {"action": action, "step": 0, "stop": stop_after(int(count or 1)), "row": row}
                else:
                    assert row == {}, row
            results, criteria = [], []
            for idx in range(len(data)):
                state = context.cache[context.get_request_id(idx)]
                state["step"] += 1
                action = state["action"]
                if action == "calls":
                    results.append(calls)
                elif action == "late-raise" and state["step"] == 2:
                    raise RuntimeError("lost its cache")
                elif action == "status":
                    context.set_response_status(418, "tea", idx)
                    results.append("short and stout")
                elif action == "wait" and state["step"] > 1:
                    while not Path("go").exists():
                        time.sleep(0.002)
                    results.append("went")
                else:
                    results.append(f"{action}{state['step']} ")
                criteria.append(state["stop"])
            context.stopping_criteria = criteria
            return results
"""

# TorchServe sends this header if an answer has several parts.
NEXT_PART_HEADER = "ts_stream_next: true\r\n"


@pytest.fixture
def worker(start_worker: StartWorker) -> Worker:
    return start_worker(HANDLER, mode="continuous")


def test_each_call_gives_one_part_until_the_stopping_criteria_apply(worker: Worker) -> None:
    worker.send_each(b"a 3", b"b 1")
    assert worker.read_answers(2) == {
        1: (200, NEXT_PART_HEADER, ["a1 ", "a2 ", "a3 "]),
        2: (200, "", ["b1 "]),
    }


def test_headers_are_sent_with_the_first_part(worker: Worker) -> None:
    worker.send_each(b"file 2")
    assert worker.read_answers(1) == {
        1: (200, "x-first: yes\r\n" + NEXT_PART_HEADER, ["file1 ", "file2 "])
    }


def test_requests_join_a_running_batch(worker: Worker) -> None:
    worker.send_each(b"wait 4")
    # The first call has ended, and the second one waits.
    worker.expect(Kind.PIECE)
    worker.send_each(b"b 2", b"calls", first=2)
    (worker.directory / "go").touch()
    answers = worker.read_answers(3)
    assert answers[1][2] == ["went", "went", "went"]
    assert answers[2][2] == ["b1 ", "b2 "]
    assert json.loads(answers[3][2][0])[-1] == 3


def test_a_request_that_fails_when_it_joins_fails_alone(worker: Worker) -> None:
    worker.send_each(b"wait 3")
    worker.expect(Kind.PIECE)
    worker.send_each(b"b 2", b"raise", b"c 2", first=2)
    (worker.directory / "go").touch()
    answers = worker.read_answers(4)
    assert answers[1][2] == ["went", "went"]
    assert answers[2][2] == ["b1 ", "b2 "]
    assert answers[4][2] == ["c1 ", "c2 "]
    assert answers[3][0] == 500
    assert "no such prompt" in answers[3][2][0]


def test_a_failed_call_without_new_requests_fails_all_but_not_the_worker(
    worker: Worker,
) -> None:
    worker.send_each(b"late-raise 3", b"b 3")
    answers = worker.read_answers(2)
    assert (answers[1][0], answers[2][0]) == (500, 500)
    worker.send_each(b"c", first=3)
    assert worker.read_answers(1)[3][0] == 200


def test_a_cancelled_request_is_closed_and_not_passed_to_further_calls(worker: Worker) -> None:
    worker.send_each(b"a 1000000")
    worker.expect(Kind.PIECE)
    worker.send(Kind.CANCEL, 1)
    assert worker.read_answers(1)[1][0] == 499
    worker.send(Kind.CANCEL, 1)
    worker.send_each(b"calls", first=2)
    assert json.loads(worker.read_answers(1)[2][2][0])[-1] == 1


def test_a_status_ends_the_answer_and_an_unreadable_body_is_refused(worker: Worker) -> None:
    worker.send_each(b"status 5")
    assert worker.read_answers(1)[1] == (418, "", ["short and stout"])
    meta = wire.request_meta("id-2", b"", [(b"content-type", b"multipart/form-data")])
    worker.send(Kind.BATCH, 2, [(0, meta, b"x")])
    assert worker.read_answers(1)[2][0] == 400


def test_a_handler_may_announce_more_parts_by_a_header(start_worker: StartWorker) -> None:
    worker = start_worker(
        """
        count = 0

        def handle(data, context):
            global count
            if data is None:
                return None
            count += 1
            context.set_response_header(0, "ts_stream_next", "true" if count < 3 else "false")
            return [f"part {count}"]
        """,
        mode="continuous",
    )
    worker.send_each(b"x")
    assert worker.read_answers(1)[1][2] == ["part 1", "part 2", "part 3"]


def test_a_handler_without_stopping_criteria_answers_with_one_call(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(
        "def handle(data, context):\n    return data and [len(data)] * len(data)", mode="continuous"
    )
    worker.send_each(b"a")
    assert worker.read_answers(1) == {1: (200, "content-type: application/json\r\n", ["1"])}
    worker.ping()
    assert worker.close() == 0


def test_a_part_larger_than_max_response_size_fails_its_request(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(
        """
        from ts.handler_utils.utils import send_intermediate_predict_response

        def handle(data, context):
            if data:
                send_intermediate_predict_response(["x" * 100_001], context.request_ids, "", 200, context)
            return data and ["rest"]
        """,
        mode="continuous",
    )
    worker.send_each(b"a")
    status, _, parts = worker.read_answers(1)[1]
    assert status == 500
    assert "max_response_size is 100000" in parts[0]


@pytest.mark.parametrize("criteria", ["[]", "[None]", "5"])
def test_invalid_stopping_criteria_fail_the_request(
    start_worker: StartWorker, criteria: str
) -> None:
    source = f"def handle(data, context):\n    context.stopping_criteria = {criteria}\n    return data and ['x']"
    worker = start_worker(source, mode="continuous")
    worker.send_each(b"a")
    assert worker.read_answers(1)[1][0] == 500
