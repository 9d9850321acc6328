"""Limits of the front end's parsers: no request blocks the event loop for long."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest

# Each attack once took a second or more of CPU between two beats of the loop.
MAX_CPU_S = 0.5
BEAT_S = 0.002
MAX_MESSAGE = 1100  # characters

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nv\r\n'
HEAVY = "[\\pL\\pN]|" * 450  # RE2 needs 60 ms for it.


class Attack(NamedTuple):
    name: str
    target: str  # method and path
    body: bytes | Callable[[], bytes] = b""
    content_type: str = JSON
    headers: Any = ()
    status: int = 400


def keys(count: int) -> bytes:
    return json.dumps({f"weight{number}": number for number in range(count)}).encode()


def nested(count: int) -> bytes:
    return b'{"weights": ' + b"[" * count + b"]" * count + b"}"


def rules(count: int, pattern: str) -> bytes:
    return json.dumps(
        {
            "rules": [
                {"header": "x", "matches": f"{pattern}{number}", "to": "1.0"}
                for number in range(count)
            ]
        }
    ).encode()


INFERENCE = ("/invocations", "/predictions")
TRAFFIC, RECORD = "/models/talker/traffic", "/models/talker/record"
ATTACKS = [
    Attack(
        "multipart of 100,000 parts",
        "POST /invocations",
        PART * 100_000 + b"--x--\r\n",
        MULTIPART,
        status=413,
    ),
    Attack(
        "form of 500,000 fields",
        "POST /invocations",
        b"a=1&" * 500_000,
        FORM,
        status=413,
    ),
    Attack(
        "form of escapes",
        "POST /invocations",
        b"model_name=" + b"%41" * 2_000_000,
        FORM,
        status=404,
    ),
    Attack(
        "long part header",
        "POST /invocations",
        b"--x\r\n" + b"a" * 6_000_000,
        MULTIPART,
    ),
    Attack("query of 30,000 pairs", "POST /invocations?" + "a&" * 30_000),
    Attack("query of 30,000 pairs", "GET /models?" + "a&" * 30_000),
    Attack(
        "query of 30,000 unknown names",
        "PUT /models/talker?" + "&".join(f"wrker{n}" for n in range(6_000)),
    ),
    Attack("query of 8,000 names", "GET /metrics?" + "name[]=&" * 8_000),
    Attack(
        "15,000 headers",
        "POST /predictions/talker",
        b"x",
        headers=[("a", "")] * 10_000,
        status=431,
    ),
    Attack("15,000 headers", "GET /models", headers=[("a", "")] * 10_000, status=431),
    Attack("long name", "POST /predictions/" + "a" * 60_000, b"x", status=404),
    Attack("long name", "GET /models/" + "a" * 60_000, status=404),
    Attack("400,000 keys", f"PUT {TRAFFIC}", partial(keys, 300_000), status=413),
    Attack("100,000 keys", f"PUT {TRAFFIC}", partial(keys, 40_000)),
    Attack("9,000 unknown keys", f"PUT {TRAFFIC}", keys(9_000)),
    Attack("9,000 unknown keys", f"PUT {RECORD}", keys(9_000)),
    Attack(
        "9,000 bad weights",
        f"PATCH {TRAFFIC}",
        json.dumps({"weights": {f"a{n}": -1 for n in range(9_000)}}).encode(),
    ),
    Attack("lists in lists", f"PUT {TRAFFIC}", nested(400)),
    Attack("lists in lists", f"PATCH {TRAFFIC}", b'{"a":' * 400 + b"1" + b"}" * 400),
    Attack("lists in lists", f"PUT {TRAFFIC}", nested(100_000)),
    Attack(
        "a list of lists",
        f"PUT {TRAFFIC}",
        b'{"weights": [' + b"[]," * 300_000 + b"1]}",
    ),
    Attack(
        "a number of 1,000,000 digits",
        f"PUT {TRAFFIC}",
        b'{"weights": {"1.0": ' + b"9" * 1_000_000 + b"}}",
    ),
    Attack(
        "9,000 steps",
        "POST /models/talker/rollout",
        json.dumps({"version": "2.0", "steps": [1] * 9_000}).encode(),
    ),
    Attack("a long pattern many times", f"PUT {TRAFFIC}", rules(100, HEAVY)),
    Attack("patterns that are none", f"PUT {TRAFFIC}", rules(900, "(")),
    Attack("a long url", "POST /models", json.dumps({"url": "%25" * 300_000}).encode()),
    Attack(
        "a long url of https",
        "POST /models",
        json.dumps({"url": "https://h/" + "a/" * 300_000}).encode(),
    ),
    Attack(
        "a long parameter",
        "POST /models",
        json.dumps({"url": "a", "initial_workers": "a" * 900_000}).encode(),
    ),
    Attack(
        "a long token type",
        "POST /workflows",
        json.dumps({"url": "../" * 300_000}).encode(),
    ),
]


class Heart:
    """A meter of the CPU time that the event loop's thread uses between two beats."""

    def __init__(self) -> None:
        self.max_cpu_s = self.last_cpu_s = 0.0

    @contextmanager
    def beating(self, server: Any) -> Iterator[None]:
        def beat() -> None:
            now = time.thread_time()
            self.max_cpu_s, self.last_cpu_s = max(self.max_cpu_s, now - self.last_cpu_s), now
            self.timer = server.loop.call_later(BEAT_S, beat)

        def start() -> None:
            self.max_cpu_s, self.last_cpu_s = 0.0, time.thread_time()
            beat()

        gc.disable()  # A collection would visit the objects of all tests in this process.
        server.call(start)
        try:
            yield
        finally:
            gc.enable()
            server.call(lambda: beat() or self.timer.cancel())
            server.call(lambda: self.timer.cancel())


@pytest.fixture(scope="module")
def target(start_server):
    with start_server(
        max_request_size=6_553_500, allowed_urls=["https?://.*/.*/.*"], decode_input_request=False
    ) as server:
        server.register("talker.mar", initial_workers=1)
        server.register("talker2.mar", initial_workers=0)
        yield server


@pytest.mark.parametrize(
    "attack", ATTACKS, ids=lambda attack: f"{attack.target[:24]}: {attack.name}"
)
def test_parsing_a_request_does_not_block_the_event_loop(target, attack):
    headers = [("content-type", attack.content_type), *attack.headers]
    body = attack.body if isinstance(attack.body, bytes) else attack.body()
    method, path = attack.target.split(" ", 1)
    client = target.inference if path.startswith(INFERENCE) else target.management
    client = target.metrics if path.startswith("/metrics") else client
    request = httpx.Request(method, f"{client.base_url}{path}", headers=headers, content=body)
    heart = Heart()
    with heart.beating(target):
        answer = client.send(request)
    assert answer.status_code == attack.status, answer.text[:300]
    assert len(answer.json()["message"]) < MAX_MESSAGE
    assert heart.max_cpu_s < MAX_CPU_S


def test_the_largest_table_is_accepted(target):
    largest_table = {
        "header": "x",
        "matches": "(" + "|".join(f"user{number}" for number in range(450)) + ")",
        "to": "2.0",
    }
    table = {
        "weights": {f"w{number}": 1 for number in range(1000)},
        "labels": {f"label{number}": "2.0" for number in range(1000)},
        "rules": [
            largest_table,
            *(
                {"header": "x-user", "matches": f"user-{number}-[a-z]{{1,9}}", "to": "2.0"}
                for number in range(999)
            ),
        ],
    }
    answer = target.management.put(f"{TRAFFIC}?force=true", json=table)
    try:
        assert answer.status_code == 200, answer.text[:1000]
        assert target.ask(x_user="user-5-abc").status_code == 200
    finally:
        target.management.delete(TRAFFIC)
        target.management.put(TRAFFIC, json={})


@pytest.mark.parametrize("name", ["weights", "labels", "rules"])
def test_a_larger_table_is_refused(target, name):
    too_large = (
        [{"header": "x", "equals": "y", "to": "1.0"}] * 1001
        if name == "rules"
        else {f"w{number}": "1" for number in range(1001)}
    )
    answer = target.management.put(TRAFFIC, json={name: too_large})
    assert answer.status_code == 400
    assert f"{name}: there are 1001 entries" in answer.json()["message"]


def test_the_total_size_of_patterns_is_limited(target):
    answer = target.management.put(TRAFFIC, content=rules(20, "a" * 4000))
    assert answer.status_code == 400
    assert "80030 characters together; at most 65536" in answer.json()["message"]


@pytest.mark.parametrize("lane", ["inference", "management"])
def test_the_number_of_request_headers_is_limited(server, lane):
    client = server.clients[lane]
    path = "/predictions/talker" if lane == "inference" else "/models"
    default_header_count = len(client.build_request("GET", path).headers)
    enough = [("x-own", str(number)) for number in range(200 - default_header_count)]
    assert client.get(path, headers=enough).status_code == 200
    refusal = client.get(path, headers=[*enough, ("x-own", "200")])
    assert refusal.status_code == 431
    assert refusal.json()["message"] == "The request has 201 headers; the limit is 200."


def test_the_body_of_a_management_request_is_limited(target):
    body = b'{"labels": {"a": "1.0"}}'
    assert target.management.put(TRAFFIC, content=body.ljust(1 << 20)).status_code == 200
    refusal = target.management.put(TRAFFIC, content=body.ljust((1 << 20) + 1))
    assert refusal.status_code == 413
    assert f"at most {1 << 20} bytes" in refusal.json()["message"]
    assert target.ask(b"x" * 2_000_000).status_code == 200


def test_a_too_large_handler_description_is_returned_as_text(target):
    target.write_mar(
        "wordy.mar",
        handler="def handle(data, context):\n    return ['[' + '[],' * 30_000 + '1]' for _ in data or ()]\n",
    )
    target.register("wordy.mar", initial_workers=1)
    answer = target.management.get("/models/wordy", params={"customized": "true"})
    assert answer.json()[0]["customizedMetadata"] == "[" + "[]," * 30_000 + "1]"
