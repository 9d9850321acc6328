"""Replacing versions under load: no request is refused, lost or run twice."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import DEADLINE, RunningServer, make_settings, running_server
from tests.support.models import STATEFUL, make_model

COUNTS = """
import os, time
from ts.handler_utils.utils import send_intermediate_predict_response

LOG = os.open(LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def handle(data, context):
    for idx, row in enumerate(data or []):
        os.write(LOG, bytes(row["body"]) + b"\\n")
    if data and context.get_request_header(0, "x-stream"):
        ids = {idx: context.get_request_id(idx) for idx in range(len(data))}
        for _ in range(3):
            send_intermediate_predict_response(["part "] * len(data), ids, "", 200, context)
            time.sleep(0.002)
    return ["WHO"] * len(data or [])
"""
CONTINUOUS = """
import os

class Handler:
    def initialize(self, context):
        self.log = os.open(LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.steps = {}

    def handle(self, data, context):
        criteria = []
        for idx, row in enumerate(data):
            id = context.get_request_id(idx)
            if id not in self.steps:
                os.write(self.log, bytes(row["body"]) + b"\\n")
            self.steps[id] = self.steps.get(id, 0) + 1
            criteria.append(lambda result, id=id: self.steps[id] == 3)
        context.stopping_criteria = criteria
        return ["WHO "] * len(data)
"""
SEQUENCES = "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 100\nmaxSequenceJobQueueSize: 10\n"
MODEL_KINDS = {
    "plain": (COUNTS, "batchSize: 8\n"),
    "flow": (CONTINUOUS, "batchSize: 8\ncontinuousBatching: true\n"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("replacing")
    for kind, (handler, config) in MODEL_KINDS.items():
        for build in ("one", "two", "three"):
            version = "2.0" if build == "three" else "1.0"
            text = handler.replace("LOG_FILE", repr(str(store / kind))).replace("WHO", build)
            make_model(
                store / f"{kind}-{build}.mar",
                text,
                name=kind,
                config=f"{config}jobQueueSize: 1000\n",
                version=version,
            )
    for build in ("one", "two", "three"):
        make_model(store / f"sums-{build}.mar", STATEFUL, name="sums", config=SEQUENCES)
    make_model(store / "broken.mar", "import nothing_of_that_name", name="plain")
    return store


@pytest.fixture(scope="module")
def replacement_server(processes: None, folder: Path) -> Iterator[RunningServer]:
    with running_server(make_settings(folder)) as server:
        for kind in (*MODEL_KINDS, "sums"):
            server.register(f"{kind}-one.mar", initial_workers=2)
        yield server


def post(server: RunningServer, file: str, **query: Any) -> httpx.Response:
    return server.management.post("/models", params={"url": file, "replace": "true", **query})


def while_replacing(
    server: RunningServer, model: str, ask: Callable[[httpx.Client, int], None], clients: int = 6
) -> list[str]:
    """Replace a model by `two` and `three` while clients ask; return the management statuses."""
    stop = threading.Event()
    answer_signal = threading.Semaphore(0)

    def keep_asking(client: int) -> None:
        with httpx.Client(base_url=server.inference.base_url, timeout=DEADLINE) as http:
            while not stop.wait(0.003):
                try:
                    ask(http, client)
                finally:
                    answer_signal.release()

    def let_clients_ask() -> None:
        while answer_signal.acquire(blocking=False):
            pass
        # Failed clients send no further signals; their errors are raised at the end.
        all(answer_signal.acquire(timeout=10) for _ in range(10 * clients))

    statuses = []
    with ThreadPoolExecutor(clients) as pool:
        client_tasks = [pool.submit(keep_asking, client) for client in range(clients)]
        try:
            for build in ("two", "three"):
                let_clients_ask()
                answer = post(server, f"{model}-{build}.mar")
                assert answer.status_code == 200, answer.text
                statuses.append(answer.json()["status"])
            let_clients_ask()
        finally:
            stop.set()
        for client in client_tasks:
            client.result()
    return statuses


@pytest.mark.parametrize(
    ("kind", "has_weights"), [("plain", False), ("plain", True), ("flow", False)]
)
def test_replacements_lose_no_request_under_load(replacement_server, folder, kind, has_weights):
    if has_weights:  # the version of the last replacement
        replacement_server.management.put(f"/models/{kind}/traffic", json={"weights": {"2.0": 1}})
    numbers, sent_numbers = itertools.count(), Counter[str]()
    answers = Counter[str]()
    (folder / kind).unlink(missing_ok=True)
    post(replacement_server, f"{kind}-one.mar")

    def ask(http: httpx.Client, client: int) -> None:
        number = f"{client}-{next(numbers)}"
        # A body in chunks takes the ASGI lane.
        body: Any = number.encode() if client % 2 else iter([number.encode()])
        answer = http.post(
            f"/predictions/{kind}",
            content=body,
            headers={"x-stream": "1"} if client % 3 == 0 else {},
        )
        assert answer.status_code == 200, answer.text
        sent_numbers[number] += 1
        answers[answer.text.split()[-1]] += 1

    statuses = while_replacing(replacement_server, kind, ask)
    assert f'"{kind}" Version: 2.0 has taken the place of version 1.0' in statuses[1]
    assert Counter((folder / kind).read_text().split()) == sent_numbers
    assert min(answers[build] for build in ("one", "two", "three")) > 0


def test_sequences_keep_their_state_under_load(replacement_server):
    totals: Counter[int] = Counter()
    request_counts: Counter[int] = Counter()

    def ask(http: httpx.Client, client: int) -> None:
        step = request_counts[client] % 8
        headers = {"ts_request_sequence_id": f"{client}-{request_counts[client] // 8}"}
        if step == 0:
            headers["ts_request_sequence_start"] = "true"
            totals[client] = 0
        if step == 7:
            headers["ts_request_sequence_end"] = "true"
        answer = http.post("/predictions/sums", content=str(step).encode(), headers=headers)
        assert answer.status_code == 200, answer.text
        totals[client] += step
        assert answer.json()["total"] == totals[client]
        request_counts[client] += 1

    while_replacing(replacement_server, "sums", ask)


def test_a_version_that_fails_to_load_replaces_nothing(replacement_server, error_of):
    description_before = replacement_server.management.get("/models/plain").json()
    kind, text = error_of(post(replacement_server, "broken.mar"))
    assert kind == "InternalServerException"
    assert "nothing_of_that_name" in text
    (description_after,) = replacement_server.management.get("/models/plain").json()
    assert [worker["pid"] for worker in description_after["workers"]] == [
        worker["pid"] for worker in description_before[0]["workers"]
    ]
    assert "has not taken its place" in description_after["lastError"]
    assert replacement_server.inference.post("/predictions/plain", content=b"x").status_code == 200
