"""Continuous batching in a real worker process: requests join between two calls of the handler, and
leave when they are done.
"""

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
            for gone in set(context.cache) - set(context.request_ids.values()):
                del context.cache[gone]
            for idx, row in enumerate(data):  # first who is new: what fails here has changed nothing of the others
                id = context.get_request_id(idx)
                if id not in context.cache:
                    word, _, count = row["body"].decode().partition(" ")
                    if word == "raise":
                        raise ValueError("no such prompt")
                    if word == "file":
                        context.set_response_header(idx, "x-first", "yes")
                    context.cache[id] = {"word": word, "step": 0, "stop": stop_after(int(count or 1)), "row": row}
                else:
                    assert row == {}, row
            results, criteria = [], []
            for idx in range(len(data)):
                state = context.cache[context.get_request_id(idx)]
                state["step"] += 1
                word = state["word"]
                if word == "calls":
                    results.append(calls)
                elif word == "late-raise" and state["step"] == 2:
                    raise RuntimeError("lost its cache")
                elif word == "status":
                    context.set_response_status(418, "tea", idx)
                    results.append("short and stout")
                elif word == "wait" and state["step"] > 1:
                    while not Path("go").exists():
                        time.sleep(0.002)
                    results.append("went")
                else:
                    results.append(f"{word}{state['step']} ")
                criteria.append(state["stop"])
            context.stopping_criteria = criteria
            return results
"""

MORE = "ts_stream_next: true\r\n"  # as in TorchServe, at the head of an answer of several parts


@pytest.fixture
def worker(start_worker: StartWorker) -> Worker:
    return start_worker(HANDLER, mode="continuous")


def send(worker: Worker, *words: str, first: int = 1) -> None:
    """All at once, each a batch of its own."""
    frames = []
    for number, word in enumerate(words, first):
        frames += wire.encode(
            Kind.BATCH, number, [(0, wire.request_meta(f"id-{number}", b"", ()), word.encode())]
        )
    worker.sock.sendall(b"".join(bytes(part) for part in frames))


def answers(worker: Worker, count: int) -> dict[int, tuple[int, str, list[str]]]:
    """Batch -> status, headers of its first frame, its parts."""
    parts: dict[int, list[str]] = {}
    headers: dict[int, str] = {}
    done: dict[int, tuple[int, str, list[str]]] = {}
    while len(done) < count:
        frame = worker.receive()
        assert frame is not None, "the worker ended"
        ((code, block, body),) = frame.items
        headers.setdefault(frame.batch, str(block, "latin-1"))
        parts.setdefault(frame.batch, []).append(str(body, "utf-8"))
        if frame.kind is Kind.REPLY:
            done[frame.batch] = (code, headers[frame.batch], parts[frame.batch])
    return done


def test_each_call_gives_one_part_until_the_stopping_criteria_say_so(worker: Worker) -> None:
    send(worker, "a 3", "b 1")
    assert answers(worker, 2) == {1: (200, MORE, ["a1 ", "a2 ", "a3 "]), 2: (200, "", ["b1 "])}


def test_headers_go_with_the_first_part(worker: Worker) -> None:
    send(worker, "file 2")
    assert answers(worker, 1) == {1: (200, "x-first: yes\r\n" + MORE, ["file1 ", "file2 "])}


def test_requests_join_a_batch_that_runs(worker: Worker) -> None:
    send(worker, "wait 4")
    assert worker.receive().kind is Kind.PIECE  # its first call is over; the second waits
    send(worker, "b 2", "calls", first=2)
    open_gate(worker)
    done = answers(worker, 3)
    assert done[1][2] == ["went", "went", "went"]
    assert done[2][2] == ["b1 ", "b2 "]
    assert json.loads(done[3][2][0])[-1] == 3


def test_a_request_that_fails_when_it_joins_fails_alone(worker: Worker) -> None:
    send(worker, "wait 3")
    worker.receive()
    send(worker, "b 2", "raise", "c 2", first=2)
    open_gate(worker)
    done = answers(worker, 4)
    assert done[1][2] == ["went", "went"]
    assert done[2][2] == ["b1 ", "b2 "]
    assert done[4][2] == ["c1 ", "c2 "]
    assert done[3][0] == 500
    assert "no such prompt" in done[3][2][0]


def test_a_call_that_fails_without_newcomers_fails_all_and_the_worker_goes_on(
    worker: Worker,
) -> None:
    send(worker, "late-raise 3", "b 3")
    done = answers(worker, 2)
    assert (done[1][0], done[2][0]) == (500, 500)
    send(worker, "c", first=3)
    assert answers(worker, 1)[3][0] == 200


def test_a_cancelled_request_is_closed_and_in_no_further_call(worker: Worker) -> None:
    send(worker, "a 1000000")
    worker.receive()
    worker.send(Kind.CANCEL, 1)
    assert answers(worker, 1)[1][0] == 499
    worker.send(Kind.CANCEL, 1)
    send(worker, "calls", first=2)
    assert json.loads(answers(worker, 1)[2][2][0])[-1] == 1


def test_a_status_ends_the_answer_and_a_body_that_cannot_be_read_is_refused(worker: Worker) -> None:
    send(worker, "status 5")
    assert answers(worker, 1)[1] == (418, "", ["short and stout"])
    bad = wire.request_meta("id-2", b"", [(b"content-type", b"multipart/form-data")])
    worker.send(Kind.BATCH, 2, [(0, bad, b"x")])
    assert answers(worker, 1)[2][0] == 400


def test_a_handler_can_say_by_a_header_that_more_follows(start_worker: StartWorker) -> None:
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
    send(worker, "x")
    assert answers(worker, 1)[1][2] == ["part 1", "part 2", "part 3"]


def test_a_handler_without_stopping_criteria_answers_with_one_call(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(
        "def handle(data, context):\n    return data and [len(data)] * len(data)", mode="continuous"
    )
    send(worker, "a")
    assert answers(worker, 1) == {1: (200, "content-type: application/json\r\n", ["1"])}
    worker.send(Kind.PING, 0)
    assert worker.receive().kind is Kind.PONG
    assert worker.close() == 0


def test_a_part_that_is_longer_than_an_answer_may_be_fails_its_request(
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
    send(worker, "a")
    status, _, parts = answers(worker, 1)[1]
    assert status == 500
    assert "max_response_size is 100000" in parts[0]


@pytest.mark.parametrize("criteria", ["[]", "[None]", "5"])
def test_stopping_criteria_that_are_none_fail_the_request(
    start_worker: StartWorker, criteria: str
) -> None:
    source = f"def handle(data, context):\n    context.stopping_criteria = {criteria}\n    return data and ['x']"
    worker = start_worker(source, mode="continuous")
    send(worker, "a")
    assert answers(worker, 1)[1][0] == 500


def open_gate(worker: Worker) -> None:
    (worker.directory / "go").touch()
