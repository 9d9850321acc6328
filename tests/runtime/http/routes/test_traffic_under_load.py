"""Weights, labels, defaults and versions change under load: each request is answered with 200 by
one worker, once.
"""

from __future__ import annotations

import http.client
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model

CLIENTS = 8
LEAST = 100  # requests of each client
NOTES = """
import os

NOTES = {notes!r}

def handle(data, context):
    if data is None:
        return None
    version = context.manifest["model"]["modelVersion"]
    bodies = [bytes(row["body"]).decode() for row in data]
    file = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, "".join(f"{{version}} {{body}}\\n" for body in bodies).encode())
    os.close(file)
    return [f"{{version}} {{body}}" for body in bodies]
"""


class Load:
    """Clients that ask until they are told to stop, on connections that they keep, by both
    lanes.
    """

    def __init__(self, server: RunningServer) -> None:
        parts = urlsplit(str(server.inference.base_url))
        self._address = parts.hostname or "", parts.port or 0
        self._numbers = itertools.count()
        self._enough = threading.Event()
        self.asked: list[tuple[int, int, str]] = []  # number, status, answer

    def run(self, client: int) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        for turn in itertools.count():
            if turn >= LEAST and self._enough.is_set():
                break
            number = next(self._numbers)
            path = "/predictions/notes/stable" if turn % 7 == 0 else "/predictions/notes"
            headers = {"X-User": f"user-{(client * 31 + turn) % 50}"}
            body = str(number).encode()
            chunked = turn % 3 == 0
            connection.request(
                "POST", path, iter([body]) if chunked else body, headers, encode_chunked=chunked
            )
            answer = connection.getresponse()
            self.asked.append((number, answer.status, answer.read().decode()))
        connection.close()

    def stop(self) -> None:
        self._enough.set()


@pytest.fixture
def served(processes: None, tmp_path: Path) -> Iterator[RunningServer]:
    for number in ("1.0", "2.0", "3.0"):
        make_model(
            tmp_path / f"notes-{number}.mar",
            NOTES.format(notes=str(tmp_path / "notes")),
            name="notes",
            version=number,
        )
    with running_server(make_settings(tmp_path, job_queue_size=1000)) as running:
        for number in ("1.0", "2.0"):
            running.register(f"notes-{number}.mar", initial_workers=1, batch_size=8)
        yield running


def test_nothing_is_lost_while_traffic_changes_and_versions_come_and_go(
    served: RunningServer, tmp_path: Path
) -> None:
    management, load = served.management, Load(served)

    def call(method: str, path: str, json: object = None) -> None:
        answer = management.request(method, f"/models{path}", json=json)
        assert answer.status_code == 200, answer.text

    call("PUT", "/notes/labels/stable", {"version": "1.0"})
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(load.run, client) for client in range(CLIENTS)]
        try:
            for share in (0, 10, 50, 90, 100):
                call(
                    "PATCH",
                    "/notes/traffic",
                    {
                        "weights": {"1.0": 100 - share, "2.0": share},
                        "sticky": "header:X-User" if share % 20 else None,
                    },
                )
            call("PUT", "/notes/labels/stable", {"version": "2.0"})
            call("PUT", "/notes/2.0/set-default")
            call("POST", "/notes/rollback")
            call("PUT", "/notes/2.0/set-default")
            call("DELETE", "/notes/1.0")  # it has no weight any more, and what it holds it answers
            call("POST", "?url=notes-3.0.mar&initial_workers=1&batch_size=8")
            call(
                "PATCH",
                "/notes/traffic",
                {
                    "weights": {"2.0": 50, "3.0": 50},
                    "rules": [{"header": "X-User", "matches": "user-1.", "to": "3.0"}],
                },
            )
            call("DELETE", "/notes/3.0")  # it has, and they go to the others
            call("POST", "?url=notes-1.0.mar&initial_workers=1&batch_size=8")
            call("PUT", "/notes/labels/stable", {"version": "1.0"})
            call("DELETE", "/notes/traffic")
            call("PUT", "/notes/1.0/set-default")
            call("DELETE", "/notes/2.0")
        finally:
            load.stop()
        for client in clients:
            client.result()
    assert Counter(status for _, status, _ in load.asked) == {200: len(load.asked)}
    assert [answer.split()[1] for _, _, answer in load.asked] == [
        str(number) for number, _, _ in load.asked
    ]
    noted = (tmp_path / "notes").read_text().splitlines()
    assert sorted(noted) == sorted(
        answer for _, _, answer in load.asked
    )  # the workers have seen each once
    assert len(load.asked) >= CLIENTS * LEAST
    assert {answer.split()[0] for answer in noted} == {"1.0", "2.0", "3.0"}
    table = served.management.get("/models/notes/traffic").json()["table"]
    assert [(share["version"], share["share"], share["errors"]) for share in table] == [
        ("1.0", 1.0, 0)
    ]
