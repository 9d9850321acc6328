"""The reply cache in front of a dispatcher that the test moves: nothing is lost, nothing is
answered twice, and it keeps to its size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.jobs import FakeJob
from tests.support.batches import BATCH
from tsx_archiver.metadata.modelconfig import CacheConfig
from tsx_runtime import wire
from tsx_runtime.core.models.reply_cache import LONGEST, OVERHEAD, ReplyCache
from tsx_runtime.core.scheduling.dispatcher import Dispatcher
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.errors import AnswerLate, ClientLeft, DeadlinePassed, TsxError, WorkerDied

NO_FLOW: Any = None
SIZE = 1000


class Client(FakeJob):
    def __init__(
        self,
        body: wire.Body = b"x",
        *,
        query: bytes = b"",
        headers: Iterable[tuple[bytes, bytes]] = (),
        deadline: float | None = None,
        priority: int = 0,
    ) -> None:
        super().__init__(wire.request_meta("id", query, headers), body, 0.0, deadline, priority)

    @property
    def is_hit(self) -> bool:
        return b"x-cache: hit" in self.answers[0][1]


class Model:
    """In place of a dispatcher: holds what it gets until the test answers it."""

    def __init__(self, config: CacheConfig) -> None:
        self.now = 0.0
        self.running: list[Job] = []
        self.left: list[Job] = []
        self.stats = Stats()
        self.cache = ReplyCache(config, cast(Dispatcher, self), lambda: self.now)
        self.entrance = self.cache.before(self.submit)

    def submit(self, job: Job) -> None:
        self.running.append(job)

    def leave(self, job: Job) -> None:
        job.gone = True
        self.left.append(job)

    def send(self, *jobs: Client) -> None:
        for job in jobs:
            self.entrance(job)

    def answer(self, status: int = 200, headers: bytes = b"", body: bytes | None = None) -> None:
        job = self.running.pop(0)
        job.answer(
            status,
            headers,
            body if body is not None else b"of " + bytes(cast(bytes, job.body)),
            BATCH,
        )


def model(size: int = 1 << 20, ttl: float = 60.0, key: tuple[str, ...] = ()) -> Model:
    return Model(CacheConfig(size, ttl, key))


def test_an_answer_is_given_again_with_its_age_until_it_is_too_old() -> None:
    made = model(ttl=60)
    first, second, late = Client(), Client(), Client()
    made.send(first)
    made.answer(headers=b"x-own: 1\r\n")
    made.now = 59.9
    made.send(second)
    assert first.answers == [(200, b"x-own: 1\r\n", b"of x")]
    assert second.answers == [(200, b"x-own: 1\r\nage: 59\r\nx-cache: hit\r\n", b"of x")]
    made.now = 60.0
    made.send(late)
    assert (len(made.running), made.cache.hits, made.cache.misses) == (1, 1, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"body": b"y"},
        {"query": b"a=1"},
        {"headers": [(b"Content-Type", b"text/plain")]},
        {"headers": [(b"accept", b"text/csv")]},
        {"headers": [(b"url_path", b"deep/er")]},
        {"headers": [(b"explain", b"True")]},
        {"headers": [(wire.NODE_HEADER, b"last")]},
        {"headers": [(b"authorization", b"Bearer x")]},
        {"headers": [(b"Proxy-Authorization", b"Basic x")]},
        {"headers": [(b"X-Api-Key", b"x")]},
        {"headers": [(b"x-forwarded-user", b"ada")]},
        {"headers": [(b"X-User", b"ada")]},
    ],
)
def test_what_may_change_the_answer_is_part_of_the_key(other: dict[str, Any]) -> None:
    made = model(key=("x-user",))
    made.send(Client())
    made.answer()
    made.send(Client(**other))
    assert len(made.running) == 1


def test_other_headers_and_the_pieces_of_a_body_do_not_matter() -> None:
    made = model()
    made.send(Client(b"a" * 100))
    made.answer()
    parts = wire.Parts([b"a" * 40, memoryview(b"a" * 60)], 100)
    same = Client(parts, headers=[(b"user-agent", b"curl"), (b"x-tsx-timeout-ms", b"5")])
    made.send(same)
    assert same.is_hit


@pytest.mark.parametrize(
    "request_",
    [
        {"headers": [(b"Cache-Control", b"max-age=3, No-Cache")]},
        {"headers": [(b"cache-control", b"no-store")]},
        {"headers": [(b"range", b"bytes=0-9")]},
        {"body": b"x" * (LONGEST + 1)},
    ],
)
def test_some_requests_are_neither_answered_nor_stored(request_: dict[str, Any]) -> None:
    made = model(size=1 << 30)
    for _ in range(2):
        made.send(Client(**request_))
        made.answer(body=b"fresh")
    assert (made.cache.hits, made.cache.misses, made.cache.size) == (0, 0, 0)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (500, b""),
        (404, b""),
        (204, b""),
        (200, b"Cache-Control: private\r\n"),
        (200, b"cache-control: no-store\r\n"),
        (200, b"set-cookie: a=1\r\n"),
        (200, b"vary: X-User\r\n"),
        (200, b"Vary: Accept\r\nvary: accept, x-user\r\n"),
        (200, b"vary: *\r\n"),
    ],
)
def test_some_answers_are_not_stored_and_those_who_waited_run_for_themselves(
    status: int, headers: bytes
) -> None:
    made = model()
    first, waits = Client(), Client()
    made.send(first, waits)
    assert len(made.running) == 1
    made.answer(status, headers)
    assert made.running == [waits]
    made.answer()
    assert (first.answers[0][0], waits.answers, made.cache.size) == (
        status,
        [(200, b"", b"of x")],
        0,
    )


@pytest.mark.parametrize(
    "vary", [b"Vary: X-User, Accept\r\n", b"vary:\r\n", b"vary: x-user,\r\nx-own: 1\r\n"]
)
def test_an_answer_that_varies_by_headers_of_the_key_is_stored_for_each_of_them(
    vary: bytes,
) -> None:
    made = model(key=("x-user",))
    first, same, other = (Client(headers=[(b"x-user", name)]) for name in (b"ada", b"ada", b"bob"))
    made.send(first)
    made.answer(headers=vary)
    made.send(same, other)
    assert same.is_hit
    assert made.running != []


def test_a_stream_is_for_its_own_client() -> None:
    made = model()
    first, waits = Client(), Client()
    made.send(first, waits)
    made.running[0].piece(b"", b"part", NO_FLOW)
    assert made.running[1:] == [waits]
    made.answer(body=b"end")
    made.send(Client())
    assert (first.pieces, first.answers[0][2]) == ([b"part"], b"end")
    assert (made.cache.size, len(made.running)) == (0, 2)


def test_equal_requests_that_run_share_one_answer() -> None:
    made = model()
    clients = [Client() for _ in range(3)]
    made.send(*clients, Client(b"y"))
    assert len(made.running) == 2
    made.answer()
    assert [client.is_hit for client in clients] == [False, True, True]


def test_a_request_waits_only_for_one_that_is_as_urgent() -> None:
    made = model()
    made.send(
        Client(deadline=10.0),
        Client(deadline=11.0),
        Client(),
        Client(priority=1),
        Client(deadline=9.0),
    )
    assert [job.deadline for job in made.running] == [10.0, None, 9.0]


def test_a_request_goes_on_while_anybody_waits_for_it() -> None:
    made = model()
    first, second = Client(), Client()
    made.send(first, second)
    made.cache.leave(first)
    assert not made.left
    assert not made.running[0].gone
    made.answer()
    assert second.answers
    third, fourth = Client(b"y"), Client(b"y")
    made.send(third, fourth)
    made.cache.leave(third)
    made.cache.leave(fourth)
    assert made.left == made.running


@pytest.mark.parametrize(
    "error", [WorkerDied("x"), DeadlinePassed("x"), AnswerLate("x"), ClientLeft("x")]
)
def test_who_waits_is_refused_with_what_is_refused_unless_that_concerned_the_other_alone(
    error: TsxError,
) -> None:
    made = model()
    first, second = Client(), Client()
    made.send(first, second)
    made.running.pop(0).refuse(error)
    assert first.refusals == [error]
    if isinstance(error, WorkerDied):
        assert second.refusals == [error]
        assert made.stats.refusals == {"WorkerDied": 1}
    else:
        made.answer()
        assert second.answers


def test_the_least_recently_used_goes_first() -> None:
    entry = OVERHEAD + len(b"of a")
    made = model(size=2 * entry)
    for body in (b"a", b"b"):
        made.send(Client(body))
        made.answer()
    made.send(Client(b"a"), Client(b"c"))
    made.answer()
    kept = Client(b"a")
    made.send(kept, Client(b"b"))
    assert kept.is_hit
    assert (len(made.running), made.cache.evictions, made.cache.size) == (1, 1, 2 * entry)
    made.answer(body=b"z" * 2 * entry)
    assert made.cache.size == 2 * entry, "an answer larger than the cache is not stored"
    made.cache.clear()
    assert made.cache.size == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "answer", "fail", "stream", "refuse", "leave", "wait", "clear"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_each_request_is_answered_once_and_rightly(
    steps: list[tuple[str, int]],
) -> None:
    made = model(size=3 * (OVERHEAD + 5), ttl=3)
    clients: list[Client] = []

    def act(what: str, number: int) -> None:
        job = (
            made.running.pop(number % len(made.running))
            if made.running and what in ("answer", "fail", "refuse")
            else None
        )
        if what == "send":
            clients.append(
                Client(b"%d" % (number % 3), deadline=None if number < 3 else float(number))
            )
            made.send(clients[-1])
        elif what == "wait":
            made.now += number
        elif what == "clear" and not number:
            made.cache.clear()
        elif what == "leave" and clients:
            made.cache.leave(clients[number % len(clients)])
        elif what == "stream" and made.running:
            made.running[number % len(made.running)].piece(b"", b"p", NO_FLOW)
        elif job is not None and what == "refuse":
            job.refuse(WorkerDied("x") if number % 2 else DeadlinePassed("x"))
        elif job is not None:
            job.answer(
                200 if what == "answer" else 500, b"", b"of " + bytes(cast(bytes, job.body)), BATCH
            )
        assert 0 <= made.cache.size <= made.cache.config.size

    for step in steps:
        act(*step)
    while made.running:
        act("answer", 0)
    for client in clients:
        assert len(client.answers) + len(client.refusals) == 1
        assert all(
            body == b"of " + bytes(cast(bytes, client.body)) for _, _, body in client.answers
        )
    assert not made.cache._waiting
    assert not made.cache._running


def test_a_request_that_waits_for_another_is_not_kept_once_its_client_has_left() -> None:
    made = model()
    first, second, third = Client(), Client(), Client()
    made.send(first, second, third)
    made.cache.leave(second)
    assert isinstance(second.refusals[0], ClientLeft)
    assert set(made.cache._waiting) == {first, third}
    made.answer()
    assert (len(first.answers), second.answers, len(third.answers)) == (1, [], 1)
