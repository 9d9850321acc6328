"""Versions, weights and labels change under load: each request is answered once, with 200."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.load import load
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model

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


@pytest.fixture
def notes_server(processes: None, tmp_path: Path) -> Iterator[RunningServer]:
    for number in ("1.0", "2.0", "3.0"):
        make_model(
            tmp_path / f"notes-{number}.mar",
            NOTES.format(notes=str(tmp_path / "notes")),
            name="notes",
            version=number,
        )
    with running_server(make_settings(tmp_path, job_queue_size=1000)) as server:
        for number in ("1.0", "2.0"):
            server.register(f"notes-{number}.mar", initial_workers=1, batch_size=8)
        yield server


def test_no_request_is_lost_while_traffic_and_versions_change(
    notes_server: RunningServer, tmp_path: Path
) -> None:
    def call(method: str, path: str, json: object = None) -> None:
        answer = notes_server.management.request(method, f"/models{path}", json=json)
        assert answer.status_code == 200, answer.text

    def request(number: int) -> tuple[str, bytes, dict[str, str]]:
        path = "/predictions/notes/stable" if number % 7 == 0 else "/predictions/notes"
        return path, b"%d" % number, {"X-User": f"user-{number % 50}"}

    call("PUT", "/notes/labels/stable", {"version": "1.0"})
    with load(notes_server, request, clients=8, least=50) as answers:
        for weight in (0, 10, 50, 90, 100):
            policy = {
                "weights": {"1.0": 100 - weight, "2.0": weight},
                "sticky": "header:X-User" if weight % 20 else None,
            }
            call("PATCH", "/notes/traffic", policy)
        call("PUT", "/notes/labels/stable", {"version": "2.0"})
        call("PUT", "/notes/2.0/set-default")
        call("POST", "/notes/rollback")
        call("PUT", "/notes/2.0/set-default")
        # Version 1.0 no longer has a weight, but it answers the requests that it holds.
        call("DELETE", "/notes/1.0")
        call("POST", "?url=notes-3.0.mar&initial_workers=1&batch_size=8")
        policy = {
            "weights": {"2.0": 50, "3.0": 50},
            "rules": [{"header": "X-User", "matches": "user-1.", "to": "3.0"}],
        }
        call("PATCH", "/notes/traffic", policy)
        # Version 3.0 still has a weight; after the removal its requests go to the other version.
        call("DELETE", "/notes/3.0")
        call("POST", "?url=notes-1.0.mar&initial_workers=1&batch_size=8")
        call("PUT", "/notes/labels/stable", {"version": "1.0"})
        call("DELETE", "/notes/traffic")
        call("PUT", "/notes/1.0/set-default")
        call("DELETE", "/notes/2.0")
    assert Counter(answer.status for answer in answers) == {200: len(answers)}
    assert all(answer.content.split()[1] == answer.body for answer in answers)
    # The workers have seen each request once.
    lines = (tmp_path / "notes").read_text().splitlines()
    assert sorted(lines) == sorted(answer.content.decode() for answer in answers)
    assert {line.split()[0] for line in lines} == {"1.0", "2.0", "3.0"}
    table = notes_server.management.get("/models/notes/traffic").json()["table"]
    assert [(row["version"], row["share"], row["errors"]) for row in table] == [("1.0", 1.0, 0)]
