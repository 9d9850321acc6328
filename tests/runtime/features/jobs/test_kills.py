"""A server that is killed at random moments keeps its jobs and the answers under keys.

It answers no job twice. JOB_KILLS is the number of kills, by default 4.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import DEADLINE, FREE_PORTS, Running, serving

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("JOB_KILLS", "4"))
# Seconds from the first request to the kill.
MAX_DELAY_S = 0.6
HANDLER = """
import time, uuid


def handle(data, context):
    if data is None:
        return None
    time.sleep(0.003)
    return [f"{bytes(row['body']).decode()} {uuid.uuid4()}" for row in data]
"""


class Client:
    """A client that sends jobs until the server is gone and meanwhile fetches their answers."""

    def __init__(self) -> None:
        self.sent_count = 0
        # Bodies by the URL of their job, answers by that URL, and answers by the number of a key.
        self.accepted: dict[str, str] = {}
        self.answers: dict[str, str] = {}
        self.answers_by_key: dict[int, str] = {}

    def send(self, http: httpx.Client) -> None:
        self.sent_count += 1
        body = f"request-{self.sent_count}"
        headers = {"prefer": "respond-async"}
        answer = http.post("/predictions/echo", content=body, headers=headers)
        assert answer.status_code == 202, answer.text
        self.accepted[answer.headers["location"]] = body

    def send_with_key(self, http: httpx.Client, number: int | None = None) -> None:
        """Send a request under a key; every second one is a job.

        A request that a kill interrupts is repeated at the next server.
        """
        number = len(self.answers_by_key) if number is None else number
        body, is_job = f"key-{number}", number % 2
        headers = {"idempotency-key": body} | ({"prefer": "respond-async"} if is_job else {})
        answer = http.post("/predictions/echo", content=body, headers=headers)
        assert answer.status_code == (202 if is_job else 200), answer.text
        if is_job:
            self.accepted[answer.headers["location"]] = body
        assert self.answers_by_key.setdefault(number, answer.text) == answer.text

    def fetch_answers(self, http: httpx.Client) -> None:
        """Fetch the newest jobs, and again some that were answered before."""
        # The call raises once the server is gone.
        http.get("/ping")
        for url in [*list(self.accepted)[-20:], *list(self.answers)[-5:]]:
            self.is_answered(url, http.get(url))

    def is_answered(self, url: str, answer: httpx.Response) -> bool:
        """Check that an answer belongs to the request and does not change."""
        if answer.status_code == 202:
            return False
        assert answer.status_code == 200, answer.text
        assert answer.text.split()[0] == self.accepted[url]
        assert self.answers.setdefault(url, answer.text) == answer.text
        return True


def repeat(call: Callable[[httpx.Client], None], address: str) -> None:
    """Repeat a call until the server is gone."""
    with (
        httpx.Client(base_url=address, timeout=DEADLINE) as http,
        suppress(httpx.TransportError),
    ):
        while True:
            call(http)


def kill_in(seconds: float, server: Running, client: Client, *, wait: bool) -> None:
    """Kill a server `seconds` after the first request.

    With `wait`, the time counts from the first jobs of both kinds that this server has accepted.
    """
    address, counts_before = (
        server.address("predictions"),
        (len(client.accepted), len(client.answers_by_key)),
    )
    with ThreadPoolExecutor() as threads:
        calls = (client.send, client.send_with_key, client.fetch_answers)
        client_tasks = [threads.submit(repeat, call, address) for call in calls]
        deadline = time.monotonic() + DEADLINE
        while (
            wait
            and (
                len(client.accepted) == counts_before[0]
                or len(client.answers_by_key) == counts_before[1]
            )
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        time.sleep(seconds)
        server.process.kill()
        for task in client_tasks:
            task.result(DEADLINE)


def test_a_killed_server_loses_no_job_and_answers_none_twice(
    processes: None, tmp_path: Path
) -> None:
    # A failure shows the seed.
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    make_model(tmp_path / "echo.mar", HANDLER)
    settings = (
        f"jobs_store={tmp_path}/jobs.sqlite",
        "worker_preload=false",
        "max_queued_jobs=100000",
        "enable_grpc=false",
    )
    options = [option for setting in settings for option in ("--set", setting)]
    command = ["serve", tmp_path / "echo.mar", *FREE_PORTS, *options]
    client = Client()
    for kill in range(KILLS):
        with serving(command, tmp_path, {}) as server:
            kill_in(draw.uniform(0.01, MAX_DELAY_S), server, client, wait=kill % 2 == 0)
    with (
        serving(command, tmp_path, {}) as server,
        httpx.Client(base_url=server.address("predictions"), timeout=DEADLINE) as http,
    ):
        deadline = time.monotonic() + DEADLINE
        for number in range(len(client.answers_by_key)):
            client.send_with_key(http, number)
        for url in client.accepted:
            while not client.is_answered(url, http.get(url)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert server.stop() == 0
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as job_store:
        states = dict(job_store.execute("SELECT state, count(*) FROM tsx_jobs GROUP BY state"))
        jobs, bodies = job_store.execute(
            "SELECT count(*), count(DISTINCT body) FROM tsx_requests"
        ).fetchone()
        (answers,) = job_store.execute(
            "SELECT count(*) FROM tsx_answers WHERE kind = 'job'"
        ).fetchone()
    print(
        f"{KILLS} kills, {client.sent_count} sent, {len(client.answers_by_key)} under keys, "
        f"{len(client.accepted)} accepted, {states}"
    )
    assert jobs == bodies == sum(states.values())
    assert answers == states.get("done", 0)
    assert len(client.accepted) <= jobs <= client.sent_count + len(client.answers_by_key) // 2 + 1
    assert client.accepted
    assert client.answers_by_key
