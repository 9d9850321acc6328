"""What a client makes the front end parse is bounded before it is parsed: no request of its own
holds the event loop for long.
"""

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

# seconds of CPU that the loop may spend between two beats; each attack took a second or more before
# it was bounded
HELD = 0.5
BEAT = 0.002  # seconds
LONGEST_TEXT = 1100  # characters of an error's text

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nv\r\n'
HEAVY = "[\\pL\\pN]|" * 450  # takes RE2 60 ms, and is refused or not


class Attack(NamedTuple):
    name: str
    role: str
    method: str
    path: str
    body: bytes | Callable[[], bytes] = b""  # made when it is sent, where that takes time
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


TRAFFIC, RECORD = "/models/talker/traffic", "/models/talker/record"
ATTACKS = [
    Attack(
        "multipart of 100,000 parts",
        "inference",
        "POST",
        "/invocations",
        PART * 100_000 + b"--x--\r\n",
        MULTIPART,
        status=413,
    ),
    Attack(
        "form of 500,000 fields",
        "inference",
        "POST",
        "/invocations",
        b"a=1&" * 500_000,
        FORM,
        status=413,
    ),
    Attack(
        "form of escapes",
        "inference",
        "POST",
        "/invocations",
        b"model_name=" + b"%41" * 2_000_000,
        FORM,
        status=404,
    ),
    Attack(
        "long part header",
        "inference",
        "POST",
        "/invocations",
        b"--x\r\n" + b"a" * 6_000_000,
        MULTIPART,
    ),
    Attack("query of 30,000 pairs", "inference", "POST", "/invocations?" + "a&" * 30_000),
    Attack("query of 30,000 pairs", "management", "GET", "/models?" + "a&" * 30_000),
    Attack(
        "query of 30,000 unknown names",
        "management",
        "PUT",
        "/models/talker?" + "&".join(f"wrker{n}" for n in range(6_000)),
    ),
    Attack("query of 8,000 names", "metrics", "GET", "/metrics?" + "name[]=&" * 8_000),
    Attack(
        "15,000 headers",
        "inference",
        "POST",
        "/predictions/talker",
        b"x",
        headers=[("a", "")] * 10_000,
        status=431,
    ),
    Attack(
        "15,000 headers", "management", "GET", "/models", headers=[("a", "")] * 10_000, status=431
    ),
    Attack("long name", "inference", "POST", "/predictions/" + "a" * 60_000, b"x", status=404),
    Attack("long name", "management", "GET", "/models/" + "a" * 60_000, status=404),
    Attack("400,000 keys", "management", "PUT", TRAFFIC, partial(keys, 300_000), status=413),
    Attack("100,000 keys", "management", "PUT", TRAFFIC, partial(keys, 40_000)),
    Attack("9,000 unknown keys", "management", "PUT", TRAFFIC, keys(9_000)),
    Attack("9,000 unknown keys", "management", "PUT", RECORD, keys(9_000)),
    Attack(
        "9,000 bad weights",
        "management",
        "PATCH",
        TRAFFIC,
        json.dumps({"weights": {f"a{n}": -1 for n in range(9_000)}}).encode(),
    ),
    Attack("lists in lists", "management", "PUT", TRAFFIC, nested(400)),
    Attack("lists in lists", "management", "PATCH", TRAFFIC, b'{"a":' * 400 + b"1" + b"}" * 400),
    Attack("lists in lists", "management", "PUT", TRAFFIC, nested(100_000)),
    Attack(
        "a list of lists",
        "management",
        "PUT",
        TRAFFIC,
        b'{"weights": [' + b"[]," * 300_000 + b"1]}",
    ),
    Attack(
        "a number of 1,000,000 digits",
        "management",
        "PUT",
        TRAFFIC,
        b'{"weights": {"1.0": ' + b"9" * 1_000_000 + b"}}",
    ),
    Attack(
        "9,000 steps",
        "management",
        "POST",
        "/models/talker/rollout",
        json.dumps({"version": "2.0", "steps": [1] * 9_000}).encode(),
    ),
    Attack("a long pattern many times", "management", "PUT", TRAFFIC, rules(100, HEAVY)),
    Attack("patterns that are none", "management", "PUT", TRAFFIC, rules(900, "(")),
    Attack(
        "a long url", "management", "POST", "/models", json.dumps({"url": "%25" * 300_000}).encode()
    ),
    Attack(
        "a long url of https",
        "management",
        "POST",
        "/models",
        json.dumps({"url": "https://h/" + "a/" * 300_000}).encode(),
    ),
    Attack(
        "a long parameter",
        "management",
        "POST",
        "/models",
        json.dumps({"url": "a", "initial_workers": "a" * 900_000}).encode(),
    ),
    Attack(
        "a long token type",
        "management",
        "POST",
        "/workflows",
        json.dumps({"url": "../" * 300_000}).encode(),
    ),
]


class Heart:
    """Measures on the loop how much CPU its thread takes between two beats: what else the machine
    does has no part in that.
    """

    def __init__(self) -> None:
        self.longest = self.last = 0.0

    @contextmanager
    def beating(self, server: Any) -> Iterator[None]:
        def beat() -> None:
            now = time.thread_time()
            self.longest, self.last = max(self.longest, now - self.last), now
            self.timer = server.loop.call_later(BEAT, beat)

        def start() -> None:
            self.longest, self.last = 0.0, time.thread_time()
            beat()

        gc.disable()  # a collection would look at the objects of all tests of this process
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
    "attack", ATTACKS, ids=lambda attack: f"{attack.method} {attack.path[:24]}: {attack.name}"
)
def test_no_request_holds_the_loop_while_it_is_parsed(target, attack: Attack) -> None:
    headers = [("content-type", attack.content_type), *attack.headers]
    body = attack.body if isinstance(attack.body, bytes) else attack.body()
    request = httpx.Request(
        attack.method, target.addresses[attack.role] + attack.path, headers=headers, content=body
    )
    heart = Heart()
    with heart.beating(target):
        answer = target.clients[attack.role].send(request)
    print(
        f"FIGURE {1000 * heart.longest:8.1f} ms {answer.status_code} {len(answer.text):8d} {attack.path[:30]} {attack.name}"
    )
    assert answer.status_code == attack.status, answer.text[:300]
    assert len(answer.json()["message"]) < LONGEST_TEXT
    assert heart.longest < HELD


def test_the_largest_table_that_may_be_is_taken(target) -> None:
    long = {
        "header": "x",
        "matches": "(" + "|".join(f"user{number}" for number in range(450)) + ")",
        "to": "2.0",
    }
    table = {
        "weights": {f"w{number}": 1 for number in range(1000)},
        "labels": {f"label{number}": "2.0" for number in range(1000)},
        "rules": [
            long,
            *(
                {"header": "x-user", "matches": f"user-{number}-[a-z]{{1,9}}", "to": "2.0"}
                for number in range(999)
            ),
        ],
    }
    heart = Heart()
    with heart.beating(target):
        answer = target.management.put("/models/talker/traffic?force=true", json=table)
    try:
        print(f"FIGURE {1000 * heart.longest:8.1f} ms")
        assert answer.status_code == 200, answer.text[:1000]
        assert target.ask(x_user="user-5-abc").status_code == 200
    finally:
        target.management.delete("/models/talker/traffic")
        target.management.put("/models/talker/traffic", json={})


@pytest.mark.parametrize("name", ["weights", "labels", "rules"])
def test_a_larger_table_is_refused(target, name: str) -> None:
    many = (
        [{"header": "x", "equals": "y", "to": "1.0"}] * 1001
        if name == "rules"
        else {f"w{number}": "1" for number in range(1001)}
    )
    answer = target.management.put("/models/talker/traffic", json={name: many})
    assert answer.status_code == 400
    assert f"{name}: there are 1001 entries; at most 1000 can be" in answer.json()["message"]


def test_patterns_may_not_grow_beyond_their_sum_by_one_merge_after_the_other(target) -> None:
    patterns = [f"{'a' * 4000}{number}" for number in range(20)]
    answer = target.management.put(
        TRAFFIC,
        json={"rules": [{"header": "x", "matches": each, "to": "1.0"} for each in patterns]},
    )
    assert answer.status_code == 400
    assert (
        "their patterns have 80030 characters together; at most 65536 can be"
        in answer.json()["message"]
    )


@pytest.mark.parametrize("lane", ["inference", "management"])
def test_the_headers_of_a_request_are_counted(start_server, lane: str) -> None:
    with start_server() as server:
        server.register("talker.mar", initial_workers=1)
        client = httpx.Client(base_url=server.addresses[lane], headers=None)
        path = "/predictions/talker" if lane == "inference" else "/models"
        own = len(client.build_request("GET", path).headers)
        enough = [("x-own", str(number)) for number in range(200 - own)]
        assert client.get(path, headers=enough).status_code == 200
        refused = client.get(path, headers=[*enough, ("x-own", "200")])
        assert refused.status_code == 431
        assert refused.json()["message"] == "The request has 201 headers; the limit is 200."


def test_the_body_of_a_management_request_has_a_bound_of_its_own(start_server) -> None:
    with start_server(max_request_size=2_000_000) as server:
        server.register("talker.mar", initial_workers=1)
        body = json.dumps({"labels": {"a": "1.0"}}).encode()
        assert server.management.put(TRAFFIC, content=body.ljust(1 << 20)).status_code == 200
        refused = server.management.put(TRAFFIC, content=body.ljust((1 << 20) + 1))
        assert refused.status_code == 413
        assert f"may have at most {1 << 20} bytes" in refused.json()["message"]
        assert server.ask(b"x" * 2_000_000).status_code == 200


def test_a_handlers_description_is_shown_as_text_where_it_is_too_large_to_be_parsed(target) -> None:
    target.write_mar(
        "wordy.mar",
        handler="def handle(data, context):\n    return ['[' + '[],' * 30_000 + '1]' for _ in data or ()]\n",
    )
    target.register("wordy.mar", initial_workers=1)
    answer = target.management.get("/models/wordy", params={"customized": "true"})
    assert answer.json()[0]["customizedMetadata"] == "[" + "[]," * 30_000 + "1]"
