"""Warm-up requests from model-config.yaml, which a real worker runs before it has loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.worker.conftest import StartWorker, Worker
from tsx_runtime.recordings import Recorded, encode, file_head

RECORDING_HANDLER = """
import json

def handle(data, context):
    if data is None:
        return None
    heads = [dict(context.get_all_request_header(idx)) for idx in range(len(data))]
    bodies = [row["body"] if type(row["body"]) is str else bytes(row["body"]).decode() for row in data]
    lower = [{k.lower(): v for k, v in head.items()} for head in heads]
    with open("notes", "a") as notes:
        notes.write(json.dumps([[len(data), *pair] for pair in zip(bodies, lower)]) + "\\n")
    if bodies[0] == "bad":
        raise ValueError("no such thing")
    context.metrics.add_counter("seen", len(data))
    return ["ok"] * len(data)
"""
CONTINUOUS = """
class Handler:
    def initialize(self, context):
        self.steps = {}

    def handle(self, data, context):
        criteria = []
        for idx, row in enumerate(data):
            id = context.get_request_id(idx)
            if id not in self.steps and bytes(row["body"]) == b"bad":
                raise ValueError("no such thing")
            self.steps[id] = self.steps.get(id, 0) + 1
            criteria.append(lambda result, id=id: self.steps[id] == 3)
        context.stopping_criteria = criteria
        open("notes", "a").write(f"[{len(data)}]\\n")
        return ["part "] * len(data)
"""
ASYNC_HANDLER = """
import asyncio

class Handler:
    async def initialize(self, context):
        self.now = 0

    async def handle(self, data, context):
        if bytes(data[0]["body"]) == b"bad":
            raise ValueError("no such thing")
        self.now += 1
        await asyncio.sleep(0)
        open("notes", "a").write(f"[{self.now}]\\n")
        return ["ok"]
"""


X: dict[str, str | bytes] = {"x": "x"}
MODES = pytest.mark.parametrize(
    ("handler", "mode"),
    [(RECORDING_HANDLER, "batch"), (CONTINUOUS, "continuous"), (ASYNC_HANDLER, "async")],
    ids=["batch", "continuous", "async"],
)


def notes(worker: Worker) -> list[Any]:
    file = Path(worker.directory) / "notes"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def warm_up(entry: Any, *entries: Any) -> dict[str, Any]:
    return {"warmup": [entry, *entries]}


def test_a_file_is_sent_alone_and_in_a_full_batch_during_loading(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(
        RECORDING_HANDLER, files={"a/x.txt": "x"}, model_config=warm_up("a/x.txt"), batch_size=3
    )
    assert worker.loaded
    batches = notes(worker)
    assert [len(batch) for batch in batches] == [1, 3]
    assert batches[0][0] == [1, "x", {"content-type": "text/plain"}]
    worker.ask(b"y")
    # The metrics of the warm-up are not reported.
    assert [metric["value"] for metric in worker.metrics] == [1]


def test_an_entry_may_set_count_type_and_headers(start_worker: StartWorker) -> None:
    entry = {"file": "x", "contentType": "a/b", "headers": {"explain": "True"}, "count": 5}
    worker = start_worker(RECORDING_HANDLER, files=X, model_config=warm_up(entry), batch_size=2)
    batches = notes(worker)
    assert sum(len(batch) for batch in batches) == 5
    assert batches[-1][-1][2] == {"content-type": "a/b", "explain": "True"}


def test_a_recording_is_sent_in_order(start_worker: StartWorker) -> None:
    entries = [
        Recorded(float(timestamp), "1.0", "", [("X-A", str(timestamp))], b"%d" % timestamp)
        for timestamp in (3, 1, 2)
    ]
    recording = file_head("m") + b"".join(map(encode, entries))
    config = warm_up({"file": "r.tsxrec"})
    worker = start_worker(
        RECORDING_HANDLER, files={"r.tsxrec": recording}, model_config=config, batch_size=2
    )
    assert [[(row[1], row[2]) for row in batch] for batch in notes(worker)] == [
        [("1", {"x-a": "1"}), ("2", {"x-a": "2"})],
        [("3", {"x-a": "3"})],
    ]


@MODES
def test_a_failed_request_fails_only_a_strict_load(
    start_worker: StartWorker, handler: str, mode: str
) -> None:
    files: dict[str, str | bytes] = {"bad": "bad", "good": "good"}
    config = warm_up("bad", "good")
    lenient = start_worker(handler, files=files, model_config=config, mode=mode, batch_size=2)
    assert lenient.loaded
    assert notes(lenient)
    config = warm_up("good", {"file": "bad", "strict": True})
    strict = start_worker(handler, files=files, model_config=config, mode=mode)
    assert not strict.loaded
    assert "a request of bad was answered with 5" in strict.report["message"]
    assert strict.ended() == 0


def test_a_missing_file_fails_only_a_strict_load(start_worker: StartWorker) -> None:
    assert start_worker(RECORDING_HANDLER, model_config=warm_up("absent")).loaded
    worker = start_worker(
        RECORDING_HANDLER, model_config=warm_up({"file": "absent", "strict": True})
    )
    assert not worker.loaded
    assert "absent cannot be read: No such file" in worker.report["message"]


@pytest.mark.parametrize(
    ("handler", "mode"), [(CONTINUOUS, "continuous"), (ASYNC_HANDLER, "async")]
)
def test_continuous_and_asynchronous_handlers_get_all_requests_at_once(
    start_worker: StartWorker, handler: str, mode: str
) -> None:
    config = warm_up({"file": "x", "count": 3})
    worker = start_worker(handler, files=X, model_config=config, mode=mode, batch_size=3)
    assert notes(worker) == [[3]] * 3


def test_each_request_of_a_stateful_model_is_a_sequence(start_worker: StartWorker) -> None:
    config = warm_up({"file": "x", "count": 2})
    worker = start_worker(
        RECORDING_HANDLER, files=X, model_config=config, stateful=True, batch_size=2
    )
    headers = [row[2] for batch in notes(worker) for row in batch]
    assert len({block["ts_request_sequence_id"] for block in headers}) == 2
    assert {block["ts_request_sequence_end"] for block in headers} == {"true"}


LOSE_DEVICE = 'raise RuntimeError("CUDA error: device-side assert triggered")'


@MODES
def test_a_worker_that_lost_its_device_does_not_serve(
    start_worker: StartWorker, handler: str, mode: str
) -> None:
    handler = handler.replace('raise ValueError("no such thing")', LOSE_DEVICE)
    files: dict[str, str | bytes] = {"bad": "bad"}
    worker = start_worker(
        handler, files=files, model_config=warm_up("bad"), mode=mode, batch_size=2
    )
    assert worker.report["message"].startswith("The device stopped responding")


@pytest.mark.parametrize(
    ("result", "reason"),
    [("['one']", "expect: 3, got: 1"), ("'text'", "Invalid model predict output")],
)
def test_a_result_that_does_not_fit_the_batch_fails_the_load(
    start_worker: StartWorker, result: str, reason: str
) -> None:
    handler = f"def handle(data, context):\n    return None if data is None else {result}\n"
    worker = start_worker(handler, files=X, model_config=warm_up("x"), batch_size=3)
    assert not worker.loaded
    assert reason in worker.report["message"]
