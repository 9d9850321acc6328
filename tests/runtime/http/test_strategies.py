"""Sequences, continuous batching, asynchronous handlers and job tickets with real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.kit.connections import connect_raw
from tests.runtime.conftest import TALKER
from tests.support.clients.rawhttp import request
from tests.support.models import STATEFUL

CONTINUOUS = """
import os, time
from pathlib import Path

class Handler:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        for ended_id in set(context.cache) - set(context.request_ids.values()):
            del context.cache[ended_id]
        for idx, row in enumerate(data):
            id = context.get_request_id(idx)
            if id not in context.cache:
                words = row["body"].decode().split()
                if words[0] == "raise":
                    raise ValueError("no such prompt")
                context.cache[id] = {"words": words, "step": 0}
        parts, criteria = [], []
        for idx in range(len(data)):
            state = context.cache[context.get_request_id(idx)]
            word = state["words"][state["step"]]
            state["step"] += 1
            if word == "exit":
                os._exit(7)
            if word == "forever":
                state["step"] -= 1
                time.sleep(0.005)
            if word == "who":
                word = ",".join(str(len(other["words"])) for other in context.cache.values())
            if word.startswith("/"):
                deadline = time.monotonic() + 90
                while not Path(word).exists() and time.monotonic() < deadline:
                    time.sleep(0.002)
                word = "opened"
            parts.append(word + " ")
            criteria.append(lambda result, state=state: state["step"] == len(state["words"]))
        context.stopping_criteria = criteria
        return parts
"""

ASYNC = """
import asyncio, os
from ts.handler_utils.utils import send_intermediate_predict_response

class Handler:
    async def initialize(self, context):
        self.gates = {}
        self.cancelled = []

    async def handle(self, data, context):
        word, _, rest = data[0]["body"].decode().partition(" ")
        if word == "wait":
            try:
                await self.gates.setdefault(rest, asyncio.Event()).wait()
            except asyncio.CancelledError:
                self.cancelled.append(rest)
                raise
        if word == "open":
            self.gates.setdefault(rest, asyncio.Event()).set()
        if word == "stream":
            for part in rest.split():
                send_intermediate_predict_response([part], context.request_ids, "", 200, context)
                if part == "wait":
                    await asyncio.Event().wait()
                if part == "exit":
                    os._exit(7)
            return [""]
        if word == "begun":
            return [list(self.gates)]
        if word == "cancelled":
            return [self.cancelled]
        return [word]
"""

PLAIN_STREAM = """
from pathlib import Path
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    words = [row["body"].decode() for row in data]
    gates = [Path(word) for word in words if word.startswith("/")]
    while not all(gate.exists() for gate in gates) or (not gates and "forever" in words):
        if "forever" in words:
            send_intermediate_predict_response(["part "] * len(data), context.request_ids, "", 200, context)
    return ["opened" if word.startswith("/") else word for word in words]
"""

SESSIONS = """
import time

class Handler:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        results = []
        for idx, row in enumerate(data):
            sequence, request = context.get_sequence_id(idx), context.get_request_id(idx)
            context.set_response_header(idx, context.header_key_sequence_id, sequence)
            if context.get_request_header(idx, context.header_key_sequence_start) == "true":
                context.cache[sequence] = {"count": 0, "stopped": False}
            session = context.cache[sequence]  # fails where no request has started the sequence
            if request not in context.cache:
                context.cache[request] = row["body"].decode()
            if context.cache[request] == "stop":
                session["stopped"] = True
            elif context.cache[request] == "end":
                session["stopped"] = True
                context.set_response_header(idx, context.header_key_sequence_end, sequence)
            elif context.cache[request] == "count":
                time.sleep(0.002)
            session["count"] += 1
            results.append(f"{session['count']} ")
        context.stopping_criteria = [Criterion(context, idx) for idx in range(len(data))]
        return results

class Criterion:
    def __init__(self, context, idx):
        self.word = context.cache[context.get_request_id(idx)]
        self.session = context.cache[context.get_sequence_id(idx)]

    def __call__(self, result):
        return self.session["stopped"] if self.word == "count" else None
"""

SEQUENCES = """
sequenceBatching: true
sequenceMaxIdleMSec: 600000
maxNumSequence: 4
maxSequenceJobQueueSize: 3
batchSize: 4
minWorkers: 2
maxWorkers: 2
"""


ONE_WORKER = "minWorkers: 1\nmaxWorkers: 1\n"
ASYNC_MODEL = f"asyncCommunication: true\n{ONE_WORKER}"
MODELS = {
    "counter": (STATEFUL, SEQUENCES),
    "old": (STATEFUL, SEQUENCES.replace("Workers: 2", "Workers: 1") + "maxWorkerRequests: 4\n"),
    "shrinking": (STATEFUL, SEQUENCES),
    "sessions": (
        SESSIONS,
        SEQUENCES.replace("batchSize: 4", "batchSize: 1") + "continuousBatching: true\n",
    ),
    "talk": (CONTINUOUS, f"continuousBatching: true\nbatchSize: 3\n{ONE_WORKER}"),
    "engine": (ASYNC, ASYNC_MODEL),
    "hurried": (ASYNC, f"{ASYNC_MODEL}responseTimeout: 2\n"),
    "plain": (PLAIN_STREAM, f"batchSize: 2\n{ONE_WORKER}"),
    "ticket": (TALKER, f"useJobTicket: true\n{ONE_WORKER}"),
}


@pytest.fixture(scope="module")
def server(start_server) -> Iterator[Any]:
    with start_server() as running:
        for name, (handler, config) in MODELS.items():
            running.write_mar(f"{name}.mar", handler=handler, config=config)
            running.register(f"{name}.mar")
        yield running


def ask(server: Any, model: str, body: object, **headers: str) -> httpx.Response:
    return server.inference.post(f"/predictions/{model}", content=str(body), headers=headers)


def step(
    server: Any,
    id: str,
    body: object,
    *,
    model: str = "counter",
    start: bool = False,
    end: bool = False,
) -> httpx.Response:
    headers = {"ts_request_sequence_id": id} if id else {}
    headers |= {"ts_request_sequence_start": "true"} if start else {}
    headers |= {"ts_request_sequence_end": "true"} if end else {}
    return ask(server, model, body, **headers)


def scale(server: Any, model: str, workers: int) -> None:
    options = {"min_worker": workers, "synchronous": "true"}
    server.management.put(f"/models/{model}", params=options).raise_for_status()


def version_of(server: Any, model: str) -> Any:
    return server.registry.models[model].versions["1.0"]


def channel_of(server: Any, model: str) -> Any:
    return version_of(server, model).workers[0].channel


def is_busy(version: Any) -> bool:
    return any(worker.channel.batches for worker in version.workers)


def test_a_sequence_stays_with_its_worker_until_its_last_request(server):
    answers = [
        step(server, "a", number, start=number == 1, end=number == 4).json()
        for number in (1, 2, 3, 4)
    ]
    assert [answer["total"] for answer in answers] == [1, 3, 6, 10]
    assert len({answer["pid"] for answer in answers}) == 1
    assert step(server, "a", 5, start=True, end=True).json()["total"] == 5


@pytest.mark.parametrize(("body", "total"), [(1, 3), ("stream", 2)])
def test_a_sequence_without_an_id_gets_one(server, body, total):
    id = step(server, "", body, start=True).headers["ts_request_sequence_id"]
    assert id.startswith("ts-seq-")
    assert step(server, id, 2, end=True).json()["total"] == total
    assert not version_of(server, "counter").dispatcher._generated


def test_a_request_without_sequence_headers_is_its_own_sequence(server):
    answer = ask(server, "counter", "raise")
    assert answer.status_code == 500
    step(server, answer.headers["ts_request_sequence_id"], 0, start=True, end=True)


def test_the_handler_can_close_a_sequence(server):
    sequences = version_of(server, "counter").dispatcher.sequences
    step(server, "h", 1, start=True)
    assert sequences.active == 1
    assert step(server, "h", "close").status_code == 200
    assert sequences.active == 0


def test_requests_of_several_sequences_share_a_batch(server, until, tmp_path):
    version = version_of(server, "counter")
    pids = {id: step(server, id, 0, start=True).json()["pid"] for id in "pqrs"}
    same_worker_ids = [id for id in "pqrs" if pids[id] == pids["p"]]
    assert len(same_worker_ids) == 2
    with ThreadPoolExecutor(3) as pool:
        held_request = pool.submit(step, server, "p", tmp_path / "gate")
        until(lambda: is_busy(version))
        waiting_requests = [pool.submit(step, server, id, 1) for id in same_worker_ids]
        until(lambda: version.pending == 2)
        (tmp_path / "gate").touch()
        assert held_request.result().json()["together"] == 1
        assert [answer.result().json()["together"] for answer in waiting_requests] == [2, 2]
    for id in "pqrs":
        step(server, id, 0, end=True)


def test_a_failed_request_is_not_rerun_and_its_sequence_continues(server):
    step(server, "f", 1, start=True)
    assert step(server, "f", "raise").status_code == 500
    assert step(server, "f", 1, end=True).json()["total"] == 2


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_worker_death_ends_its_sequences_with_an_error(
    server, until, tmp_path, error_of, by_itself
):
    version = version_of(server, "counter")
    until(lambda: len(version.dispatcher.channels) == 2)
    pids = {id: step(server, id, 0, start=True).json()["pid"] for id in "uvw"}
    lost_ids = [id for id in pids if pids[id] == pids["u"]]
    intact_id = next(id for id in pids if id not in lost_ids)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(step, server, "u", "exit" if by_itself else tmp_path / "never")
        if not by_itself:
            until(lambda: is_busy(version))
            waiting_request = pool.submit(step, server, "u", 1)
            until(lambda: version.pending == 1)
            os.kill(pids["u"], signal.SIGKILL)
            assert waiting_request.result().status_code == 503
        assert running.result().status_code == (500 if by_itself else 507)
    for id in lost_ids:
        assert f"Sequence {id} is over" in error_of(step(server, id, 1))[1]
        assert step(server, id, 5, start=True, end=True).json()["total"] == 5
    assert step(server, intact_id, 1, end=True).json()["total"] == 1


def test_a_recycled_worker_serves_its_sequences_to_their_end(server, until):
    version = version_of(server, "old")
    pid = step(server, "a", 1, model="old", start=True).json()["pid"]
    for _ in range(3):
        step(server, "a", 1, model="old")
    until(lambda: version.workers[0].pid != pid)
    assert step(server, "a", 1, model="old").json() == {"total": 5, "pid": pid, "together": 1}
    assert step(server, "b", 1, model="old", start=True, end=True).json()["pid"] != pid
    assert step(server, "a", 1, model="old", end=True).json() == {
        "total": 6,
        "pid": pid,
        "together": 1,
    }
    until(lambda: not version.workers[0].retiring)


def test_scaling_down_ends_an_old_process_with_sequences(server, until):
    version = version_of(server, "old")
    scale(server, "old", 2)
    ids = {step(server, id, 1, model="old", start=True).json()["pid"]: id for id in "yz"}
    last = version.workers[1]
    pid = last.pid
    for _ in range(3):
        step(server, ids[pid], 1, model="old")
    until(lambda: last.retiring)
    scale(server, "old", 1)
    until(lambda: not psutil.pid_exists(pid))


def test_scaling_down_ends_sequences_with_an_error(server, until, error_of):
    version = version_of(server, "shrinking")
    until(lambda: len(version.dispatcher.channels) == 2)
    pids = {id: step(server, id, 0, model="shrinking", start=True).json()["pid"] for id in "ab"}
    scale(server, "shrinking", 1)
    for id, pid in pids.items():
        answer = step(server, id, 1, model="shrinking")
        if pid == version.workers[0].pid:
            assert answer.json()["total"] == 1
        else:
            assert f"Sequence {id} is over" in error_of(answer)[1]


@pytest.mark.parametrize("body", ["stop", "end"])
def test_a_later_request_of_a_sequence_can_end_a_streaming_one(server, body):
    """Use a criterion that returns None, which ends a non-streamed answer as in TorchServe."""
    first = step(server, "", "open", model="sessions")
    assert first.text == "1 "
    assert "transfer-encoding" not in first.headers
    id = first.headers["ts_request_sequence_id"]
    with server.inference.stream(
        "POST", "/predictions/sessions", content="count", headers={"ts_request_sequence_id": id}
    ) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        parts = answer.iter_text()
        assert next(parts).startswith("2 ")
        stop_response = step(server, id, body, model="sessions")
        counts = "".join(parts).split()
    assert "transfer-encoding" not in stop_response.headers
    assert int(stop_response.text) == int(counts[-1]) + 1, "the handler was called with both"
    assert version_of(server, "sessions").dispatcher.sequences.is_active(id) == (body == "stop")


def parts_of(server: Any, model: str, body: str) -> list[str]:
    with server.inference.stream("POST", f"/predictions/{model}", content=body) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        return [part for part in answer.iter_text() if part]


def test_a_continuous_answer_streams_until_it_is_complete(server):
    assert "".join(parts_of(server, "talk", "a b c")) == "a b c "
    answer = ask(server, "talk", "a")
    assert answer.text == "a "
    assert answer.headers["content-length"] == "2"


def test_requests_join_while_others_run_up_to_the_batch_size(server, until, tmp_path):
    version = version_of(server, "talk")
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(ask, server, "talk", f"{tmp_path}/one {tmp_path}/two who 4")
        until(lambda: channel_of(server, "talk").batches == 1)
        joining_requests = [pool.submit(ask, server, "talk", " ".join(["x"] * 9)) for _ in range(2)]
        until(lambda: channel_of(server, "talk").batches == 3)
        waiting_request = pool.submit(ask, server, "talk", "last")
        until(lambda: version.pending == 1)
        (tmp_path / "one").touch()
        (tmp_path / "two").touch()
        assert first.result().text == "opened opened 4,9,9 4 "
        assert [answer.result().text for answer in joining_requests] == ["x " * 9] * 2
        assert waiting_request.result().text == "last "


def test_a_failing_request_does_not_affect_concurrent_streams(server, until, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, server, "talk", f"a {tmp_path}/gate b")
        until(lambda: channel_of(server, "talk").batches == 1)
        failing_request = pool.submit(ask, server, "talk", "raise")
        # The request may join before the stream waits, and fail at once.
        until(lambda: channel_of(server, "talk").batches == 2 or failing_request.done())
        (tmp_path / "gate").touch()
        assert failing_request.result().status_code == 500
        assert first.result().text == "a opened b "


# A body in chunks takes the ASGI lane.
@pytest.mark.parametrize("content", ["forever", iter([b"forever"])], ids=["fast", "asgi"])
def test_a_client_that_leaves_frees_its_slot(server, until, content):
    with server.inference.stream("POST", "/predictions/talk", content=content) as answer:
        parts = answer.iter_text()  # Dropping it would close the connection.
        assert next(parts).startswith("forever ")
        assert channel_of(server, "talk").batches == 1
    until(lambda: channel_of(server, "talk").batches == 0)
    assert ask(server, "talk", "a").text == "a "


def test_a_worker_death_breaks_streams_but_waiting_requests_are_answered(server, until, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        with server.inference.stream(
            "POST", "/predictions/talk", content=f"a {tmp_path}/gate b"
        ) as answer:
            parts = answer.iter_text()
            assert next(parts) == "a "
            waiting_requests = [pool.submit(ask, server, "talk", body) for body in "xy"]
            until(lambda: channel_of(server, "talk").batches == 3)
            os.kill(version_of(server, "talk").workers[0].pid, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                list(parts)
        assert [answer.result().text for answer in waiting_requests] == ["x ", "y "]


def test_a_request_that_kills_workers_is_isolated(server):
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: ask(server, "talk", body), ["a", "exit", "c"]))
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    assert [answers[0].text, answers[2].text] == ["a ", "c "]


def test_asynchronous_requests_overlap(server, until):
    with ThreadPoolExecutor(20) as pool:
        waiting_requests = [pool.submit(ask, server, "engine", "wait one") for _ in range(19)]
        until(lambda: channel_of(server, "engine").batches == 19)
        assert ask(server, "engine", "open one").text == "open"
        assert [answer.result().text for answer in waiting_requests] == ["wait"] * 19


def test_an_asynchronous_answer_streams(server):
    assert "".join(parts_of(server, "engine", "stream a b c")) == "abc"


def test_a_client_that_leaves_cancels_its_request(server, until):
    channel = channel_of(server, "engine")
    with connect_raw(server) as client:
        client.send(request(target=b"/predictions/engine", body=b"wait gone"))
        until(lambda: "gone" in ask(server, "engine", "begun").json())
    until(lambda: channel.batches == 0)
    assert "gone" in ask(server, "engine", "cancelled").json()


def test_a_request_past_its_client_timeout_is_cancelled(server, error_of, until):
    late_response = ask(server, "engine", "wait late", **{"x-tsx-timeout-ms": "300"})
    assert late_response.status_code == 504
    assert "did not answer" in error_of(late_response)[1]
    until(lambda: "late" in ask(server, "engine", "cancelled").json())


def test_an_overdue_request_is_refused_without_affecting_others(server, error_of, until):
    version = version_of(server, "hurried")
    pid = version.workers[0].pid
    with ThreadPoolExecutor(1) as pool:
        late_response = pool.submit(ask, server, "hurried", "wait never")
        until(lambda: ask(server, "hurried", "a").text == "a" and late_response.done())
    assert late_response.result().status_code == 500
    assert "2 s (responseTimeout)" in error_of(late_response.result())[1]
    assert ask(server, "hurried", "cancelled").json() == ["never"]
    assert version.workers[0].pid == pid


def test_unstarted_asynchronous_requests_survive_a_worker_death(server, until):
    with ThreadPoolExecutor(4) as pool:
        waiting_requests = [pool.submit(ask, server, "engine", "wait two") for _ in range(3)]
        until(lambda: channel_of(server, "engine").batches == 3)
        with pytest.raises(httpx.RemoteProtocolError):
            parts_of(server, "engine", "stream a exit")
        until(
            lambda: (
                ask(server, "engine", "open two").status_code == 200
                and all(answer.done() for answer in waiting_requests)
            )
        )
        assert [answer.result().text for answer in waiting_requests] == ["wait"] * 3


def test_requests_of_a_stopped_worker_run_on_another(server, until):
    with ThreadPoolExecutor(3) as pool:
        waiting_requests = [pool.submit(ask, server, "engine", "wait three") for _ in range(2)]
        until(lambda: channel_of(server, "engine").batches == 2)
        os.kill(version_of(server, "engine").workers[0].pid, signal.SIGSTOP)
        assert ask(server, "engine", "open three").status_code == 200
        assert [answer.result().text for answer in waiting_requests] == ["wait"] * 2


def test_with_job_tickets_requests_never_wait(server, until, tmp_path, error_of):
    gate = {"x-do": "wait", "x-file": str(tmp_path / "gate")}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: ask(server, "ticket", "", **gate))
        until(lambda: channel_of(server, "ticket").batches == 1)
        refusal = ask(server, "ticket", "")
        assert refusal.status_code == 503
        assert "useJobTicket" in error_of(refusal)[1]
        (tmp_path / "gate").touch()
        assert first.result().text == "waited"
    assert ask(server, "ticket", "").status_code == 200


def test_a_model_description_shows_its_strategy(server):
    strategies_by_model = {
        name: server.management.get(f"/models/{name}").json()[0]
        for name in ("counter", "talk", "ticket")
    }
    keys = [
        "stateful",
        "sequenceMaxIdleMSec",
        "sequenceTimeoutMSec",
        "maxNumSequence",
        "maxSequenceJobQueueSize",
    ]
    assert [strategies_by_model["counter"][key] for key in keys] == [True, 600000, 0, 4, 3]
    assert [model["continuousBatching"] for model in strategies_by_model.values()] == [
        False,
        True,
        False,
    ]
    assert [model["useJobTicket"] for model in strategies_by_model.values()] == [False, False, True]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "continuousBatching: true\nasyncCommunication: true",
            "a worker supports only one of the two",
        ),
        ("continuousBatching: true\ntorchrun:\n  nproc-per-node: 2", "they would get out of sync"),
        ("continuousBatching: true\nbatchPolicy: wait", "Remove it"),
        ("sequenceBatching: true", "set sequenceMaxIdleMSec"),
    ],
)
def test_conflicting_strategies_are_refused_at_registration(server, config, message):
    server.write_mar("odd.mar", handler=TALKER, config=config)
    answer = server.management.post("/models", params={"url": "odd.mar"})
    assert answer.status_code == 400
    assert message in answer.json()["message"]


def leave_after_a_part(server: Any, content: Any = "forever") -> None:
    with server.inference.stream("POST", "/predictions/plain", content=content) as answer:
        assert next(answer.iter_text()).startswith("part")


@pytest.mark.parametrize("content", ["forever", iter([b"forever"])], ids=["fast", "asgi"])
def test_a_plain_stream_whose_client_leaves_is_stopped(server, content):
    leave_after_a_part(server, content)
    assert ask(server, "plain", "a").text == "a"


def test_a_plain_stream_continues_while_any_client_of_its_batch_remains(server, until, tmp_path):
    version = version_of(server, "plain")
    with ThreadPoolExecutor(3) as pool:
        held_request = pool.submit(ask, server, "plain", tmp_path / "first")
        until(lambda: is_busy(version))
        staying_request = pool.submit(ask, server, "plain", tmp_path / "second")
        until(lambda: version.pending == 1)
        leaving_request = pool.submit(leave_after_a_part, server)
        until(lambda: version.in_flight == 3)
        (tmp_path / "first").touch()
        held_request.result()
        leaving_request.result()
        (tmp_path / "second").touch()
        assert staying_request.result().text.endswith("opened")
