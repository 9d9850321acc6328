"""The reply cache in front of a dispatcher that the test controls."""

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
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.strategies import EntryPoint
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.errors import AnswerLate, ClientLeft, DeadlinePassed, TsxError, WorkerDied
from tsx_runtime.features.cache.reply_cache import ENTRY_OVERHEAD_BYTES, MAX_BODY_BYTES, ReplyCache

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
    """A dispatcher that holds its jobs until the test answers them."""

    def __init__(self, config: CacheConfig) -> None:
        self.now = 0.0
        self.running_jobs: list[Job] = []
        self.left_jobs: list[Job] = []
        self.stats = Stats()
        self.cache = ReplyCache(config, cast(ModelVersion, self), lambda: self.now)
        self.entrance = self.cache.around(EntryPoint(self.submit, self.leave)).submit

    def submit(self, job: Job) -> None:
        self.running_jobs.append(job)

    def leave(self, job: Job) -> None:
        job.gone = True
        self.left_jobs.append(job)

    def send(self, *jobs: Client) -> None:
        for job in jobs:
            self.entrance(job)

    def answer(self, status: int = 200, headers: bytes = b"", body: bytes | None = None) -> None:
        job = self.running_jobs.pop(0)
        job.answer(
            status,
            headers,
            body if body is not None else b"of " + bytes(cast(bytes, job.body)),
            BATCH,
        )


def a_model(size: int = 1 << 20, ttl: float = 60.0, key: tuple[str, ...] = ()) -> Model:
    return Model(CacheConfig(size, ttl, key))


def test_a_cached_answer_is_served_with_its_age_until_it_expires() -> None:
    model = a_model(ttl=60)
    first, second, late_client = Client(), Client(), Client()
    model.send(first)
    model.answer(headers=b"x-own: 1\r\n")
    model.now = 59.9
    model.send(second)
    assert first.answers == [(200, b"x-own: 1\r\n", b"of x")]
    assert second.answers == [(200, b"x-own: 1\r\nage: 59\r\nx-cache: hit\r\n", b"of x")]
    model.now = 60.0
    model.send(late_client)
    assert (len(model.running_jobs), model.cache.hits, model.cache.misses) == (1, 1, 2)


@pytest.mark.parametrize(
    "variation",
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
def test_everything_that_may_change_the_answer_is_in_the_cache_key(
    variation: dict[str, Any],
) -> None:
    model = a_model(key=("x-user",))
    model.send(Client())
    model.answer()
    model.send(Client(**variation))
    assert len(model.running_jobs) == 1


def test_other_headers_and_body_chunks_do_not_change_the_cache_key() -> None:
    model = a_model()
    model.send(Client(b"a" * 100))
    model.answer()
    chunked_body = wire.Parts([b"a" * 40, memoryview(b"a" * 60)], 100)
    hit = Client(chunked_body, headers=[(b"user-agent", b"curl"), (b"x-tsx-timeout-ms", b"5")])
    model.send(hit)
    assert hit.is_hit


@pytest.mark.parametrize(
    "request_",
    [
        {"headers": [(b"Cache-Control", b"max-age=3, No-Cache")]},
        {"headers": [(b"cache-control", b"no-store")]},
        {"headers": [(b"range", b"bytes=0-9")]},
        {"body": b"x" * (MAX_BODY_BYTES + 1)},
    ],
)
def test_some_requests_bypass_the_cache(request_: dict[str, Any]) -> None:
    model = a_model(size=1 << 30)
    for _ in range(2):
        model.send(Client(**request_))
        model.answer(body=b"fresh")
    assert (model.cache.hits, model.cache.misses, model.cache.size) == (0, 0, 0)


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
def test_requests_that_waited_for_an_uncacheable_answer_run_themselves(
    status: int, headers: bytes
) -> None:
    model = a_model()
    first, waiting_client = Client(), Client()
    model.send(first, waiting_client)
    assert len(model.running_jobs) == 1
    model.answer(status, headers)
    assert model.running_jobs == [waiting_client]
    model.answer()
    assert (first.answers[0][0], waiting_client.answers, model.cache.size) == (
        status,
        [(200, b"", b"of x")],
        0,
    )


@pytest.mark.parametrize(
    "vary", [b"Vary: X-User, Accept\r\n", b"vary:\r\n", b"vary: x-user,\r\nx-own: 1\r\n"]
)
def test_an_answer_that_varies_by_key_headers_is_cached_per_value(vary: bytes) -> None:
    model = a_model(key=("x-user",))
    first, hit, miss = (Client(headers=[(b"x-user", name)]) for name in (b"ada", b"ada", b"bob"))
    model.send(first)
    model.answer(headers=vary)
    model.send(hit, miss)
    assert hit.is_hit
    assert model.running_jobs != []


def test_a_stream_is_neither_shared_nor_cached() -> None:
    model = a_model()
    first, waiting_client = Client(), Client()
    model.send(first, waiting_client)
    model.running_jobs[0].piece(b"", b"part", NO_FLOW)
    assert model.running_jobs[1:] == [waiting_client]
    model.answer(body=b"end")
    model.send(Client())
    assert (first.pieces, first.answers[0][2]) == ([b"part"], b"end")
    assert (model.cache.size, len(model.running_jobs)) == (0, 2)


def test_equal_concurrent_requests_share_one_answer() -> None:
    model = a_model()
    clients = [Client() for _ in range(3)]
    model.send(*clients, Client(b"y"))
    assert len(model.running_jobs) == 2
    model.answer()
    assert [client.is_hit for client in clients] == [False, True, True]


def test_a_request_waits_only_for_one_of_at_least_equal_urgency() -> None:
    model = a_model()
    model.send(
        Client(deadline=10.0),
        Client(deadline=11.0),
        Client(),
        Client(priority=1),
        Client(deadline=9.0),
    )
    assert [job.deadline for job in model.running_jobs] == [10.0, None, 9.0]


def test_a_shared_request_continues_while_any_client_waits() -> None:
    model = a_model()
    first, second = Client(), Client()
    model.send(first, second)
    model.cache.leave(first)
    assert not model.left_jobs
    assert not model.running_jobs[0].gone
    model.answer()
    assert second.answers
    third, fourth = Client(b"y"), Client(b"y")
    model.send(third, fourth)
    model.cache.leave(third)
    model.cache.leave(fourth)
    assert model.left_jobs == model.running_jobs


@pytest.mark.parametrize(
    "error", [WorkerDied("x"), DeadlinePassed("x"), AnswerLate("x"), ClientLeft("x")]
)
def test_a_refusal_is_shared_unless_it_concerns_one_client(error: TsxError) -> None:
    model = a_model()
    first, second = Client(), Client()
    model.send(first, second)
    model.running_jobs.pop(0).refuse(error)
    assert first.refusals == [error]
    if isinstance(error, WorkerDied):
        assert second.refusals == [error]
        assert model.stats.refusals == {"WorkerDied": 1}
    else:
        model.answer()
        assert second.answers


def test_the_least_recently_used_answer_is_evicted_first() -> None:
    entry = ENTRY_OVERHEAD_BYTES + len(b"of a")
    model = a_model(size=2 * entry)
    for body in (b"a", b"b"):
        model.send(Client(body))
        model.answer()
    model.send(Client(b"a"), Client(b"c"))
    model.answer()
    hit = Client(b"a")
    model.send(hit, Client(b"b"))
    assert hit.is_hit
    assert (len(model.running_jobs), model.cache.evictions, model.cache.size) == (1, 1, 2 * entry)
    model.answer(body=b"z" * 2 * entry)
    assert model.cache.size == 2 * entry, "an answer larger than the cache is not stored"
    model.cache.clear()
    assert model.cache.size == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "answer", "fail", "stream", "refuse", "leave", "wait", "clear"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_every_request_is_answered_once_and_correctly(steps: list[tuple[str, int]]) -> None:
    model = a_model(size=3 * (ENTRY_OVERHEAD_BYTES + 5), ttl=3)
    clients: list[Client] = []

    def act(action: str, number: int) -> None:
        job = (
            model.running_jobs.pop(number % len(model.running_jobs))
            if model.running_jobs and action in ("answer", "fail", "refuse")
            else None
        )
        if action == "send":
            clients.append(
                Client(b"%d" % (number % 3), deadline=None if number < 3 else float(number))
            )
            model.send(clients[-1])
        elif action == "wait":
            model.now += number
        elif action == "clear" and not number:
            model.cache.clear()
        elif action == "leave" and clients:
            model.cache.leave(clients[number % len(clients)])
        elif action == "stream" and model.running_jobs:
            model.running_jobs[number % len(model.running_jobs)].piece(b"", b"p", NO_FLOW)
        elif job is not None and action == "refuse":
            job.refuse(WorkerDied("x") if number % 2 else DeadlinePassed("x"))
        elif job is not None:
            job.answer(
                200 if action == "answer" else 500,
                b"",
                b"of " + bytes(cast(bytes, job.body)),
                BATCH,
            )
        assert 0 <= model.cache.size <= model.cache.config.size

    for step in steps:
        act(*step)
    while model.running_jobs:
        act("answer", 0)
    for client in clients:
        assert len(client.answers) + len(client.refusals) == 1
        assert all(
            body == b"of " + bytes(cast(bytes, client.body)) for _, _, body in client.answers
        )
    assert not model.cache._miss_by_job
    assert not model.cache._running_misses


def test_a_waiting_request_is_dropped_when_its_client_leaves() -> None:
    model = a_model()
    first, second, third = Client(), Client(), Client()
    model.send(first, second, third)
    model.cache.leave(second)
    assert isinstance(second.refusals[0], ClientLeft)
    assert set(model.cache._miss_by_job) == {first, third}
    model.answer()
    assert (len(first.answers), second.answers, len(third.answers)) == (1, [], 1)
