"""A server that is killed at random moments loses no job that it has accepted and no answer under a
key, and answers none twice.

JOB_KILLS: how often it is killed, 4 times if not set.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import DEADLINE, FREE_PORTS, Running, serving

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("JOB_KILLS", "4"))
LONGEST = 0.6  # seconds from the first request to the kill
HANDLER = """
import time, uuid


def handle(data, context):
    if data is None:
        return None
    time.sleep(0.003)
    return [f"{bytes(row['body']).decode()} {uuid.uuid4()}" for row in data]
"""


class Client:
    """Sends requests for later until the server is gone, and looks for their answers meanwhile."""

    def __init__(self) -> None:
        self.sent = 0
        self.accepted: dict[str, str] = {}  # bodies by Location
        self.answers: dict[str, str] = {}  # that were seen
        self.kept: dict[int, str] = {}  # under keys

    def send(self, address: str) -> None:
        with (
            httpx.Client(base_url=address, timeout=DEADLINE) as http,
            suppress(httpx.TransportError),
        ):
            while True:
                self.sent += 1
                body = f"request-{self.sent}"
                answer = http.post(
                    "/predictions/echo", content=body, headers={"prefer": "respond-async"}
                )
                assert answer.status_code == 202, answer.text
                self.accepted[answer.headers["location"]] = body

    def ask(self, address: str) -> None:
        """Under keys, every second one for a job.

        What the kill interrupts comes again at the next server.
        """
        with (
            httpx.Client(base_url=address, timeout=DEADLINE) as http,
            suppress(httpx.TransportError),
        ):
            while True:
                self.ask_once(http, len(self.kept))

    def ask_once(self, http: httpx.Client, number: int) -> None:
        body = f"key-{number}"
        headers = {"idempotency-key": body} | ({"prefer": "respond-async"} if number % 2 else {})
        answer = http.post("/predictions/echo", content=body, headers=headers)
        assert answer.status_code == (202 if number % 2 else 200), answer.text
        if number % 2:
            self.accepted[answer.headers["location"]] = body
        assert self.kept.setdefault(number, answer.text) == answer.text

    def look(self, address: str) -> None:
        """At the newest ones, and again at some of those that were answered before."""
        with (
            httpx.Client(base_url=address, timeout=DEADLINE) as http,
            suppress(httpx.TransportError),
        ):
            while http.get("/ping").status_code:  # until the server is gone
                for where in [*list(self.accepted)[-20:], *list(self.answers)[-5:]]:
                    self.take(where, http.get(where))

    def take(self, where: str, found: httpx.Response) -> bool:
        """Whether it is answered; an answer must be the request's own, and stay."""
        if found.status_code == 202:
            return False
        assert found.status_code == 200, found.text
        assert found.text.split()[0] == self.accepted[where]
        assert self.answers.setdefault(where, found.text) == found.text
        return True


def kill_in(seconds: float, server: Running, client: Client, *, wait: bool) -> None:
    """Counted from the first request, or, with `wait`, from the first jobs that this server has
    accepted of both kinds.
    """
    address, before = server.address("predictions"), (len(client.accepted), len(client.kept))
    with ThreadPoolExecutor() as threads:
        working = [threads.submit(work, address) for work in (client.send, client.ask, client.look)]
        deadline = time.monotonic() + DEADLINE
        while (
            wait
            and (len(client.accepted) == before[0] or len(client.kept) == before[1])
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        time.sleep(seconds)
        server.process.kill()
        for each in working:
            each.result(DEADLINE)


def test_a_server_that_is_killed_loses_no_job_and_answers_none_twice(
    processes: None, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # shown where the test fails
    draw = random.Random(seed)
    make_model(tmp_path / "echo.mar", HANDLER)
    own = {
        "jobs_store": tmp_path / "jobs.sqlite",
        "worker_preload": "false",
        "max_queued_jobs": 100_000,
        "enable_grpc": "false",
    }
    words = [
        "serve",
        tmp_path / "echo.mar",
        *FREE_PORTS,
        *(word for name, value in own.items() for word in ("--set", f"{name}={value}")),
    ]
    client = Client()
    for kill in range(KILLS):
        with serving(words, tmp_path, {}) as server:
            kill_in(draw.uniform(0.01, LONGEST), server, client, wait=kill % 2 == 0)
    with (
        serving(words, tmp_path, {}) as server,
        httpx.Client(base_url=server.address("predictions"), timeout=DEADLINE) as http,
    ):
        deadline = time.monotonic() + DEADLINE
        for number in range(len(client.kept)):
            client.ask_once(http, number)
        for where in client.accepted:
            while not client.take(where, http.get(where)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert server.stop() == 0
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as store:
        states = dict(store.execute("SELECT state, count(*) FROM tsx_jobs GROUP BY state"))
        jobs, bodies = store.execute(
            "SELECT count(*), count(DISTINCT body) FROM tsx_requests"
        ).fetchone()
        (answers,) = store.execute("SELECT count(*) FROM tsx_answers WHERE kind = 'job'").fetchone()
    print(
        f"{KILLS} kills, {client.sent} sent, {len(client.kept)} under keys, {len(client.accepted)} accepted, {states}"
    )
    assert jobs == bodies == sum(states.values())
    assert answers == states.get("done", 0)
    assert len(client.accepted) <= jobs <= client.sent + len(client.kept) // 2 + 1
    assert client.accepted
    assert client.kept
