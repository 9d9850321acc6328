"""Sequences as properties: random requests, workers and a clock that the test turns."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kit.jobs import FakeJob, refusal_of
from tests.kit.peers import submit
from tests.runtime.core.scheduling.test_batching import FakeWorker
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.scheduling.sequence_dispatcher import SequenceDispatcher
from tsx_runtime.core.scheduling.sequences import SequenceConfig, SequenceHeaders, Sequences
from tsx_runtime.errors import ClientLeft, Unavailable

pytestmark = pytest.mark.anyio

TERMS = SequenceConfig(max_idle=10, timeout=60, max_sequences=3, max_waiting=2)
LIMITS = BatchLimits(2, 40)


def mark(id: str = "a", *, start: bool = False, end: bool = False) -> SequenceHeaders:
    return SequenceHeaders(id, start, end)


def admit(sequences: Sequences, now: float, id: str = "a", **marks: bool) -> str | None:
    """Offer a request, and return the reason if it is refused."""
    return sequences.admit(FakeJob(), mark(id, **marks), now)


def start_sequences(terms: SequenceConfig = TERMS, *ids: str) -> tuple[Sequences, FakeWorker]:
    """Start sequences whose first requests are answered, all by one worker."""
    sequences: Sequences = Sequences(terms)
    worker = FakeWorker()
    for id in ids or ("a",):
        job = FakeJob()
        assert sequences.admit(job, mark(id, start=True), 0.0) is None
        assert sequences.assign([worker], 0.0, BatchLimits(8)) == [(worker, [job])]
        assert sequences.on_answered(job, 0.0) == []
    return sequences, worker


class Play(RuleBasedStateMachine):
    """A play in which each accepted request is sent once, or refused once.

    Requests of a sequence are sent one at a time, in order, to one worker.
    """

    terms = TERMS

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sequences: Sequences = Sequences(self.terms)
        self.streams: set[FakeJob] = set()
        self.workers = [FakeWorker(), FakeWorker()]
        self.joining = False
        self.waiting: dict[str, list[FakeJob]] = {}
        self.under_way: list[tuple[FakeWorker, FakeJob, str]] = []
        self.place: dict[str, FakeWorker] = {}

    @rule(
        id=st.sampled_from("abcde"),
        start=st.booleans(),
        end=st.booleans(),
        late=st.none() | st.floats(1, 20),
    )
    def request(self, id: str, start: bool, end: bool, late: float | None) -> None:
        self.expire()
        job = FakeJob(
            meta=id.encode(), arrived=self.now, deadline=None if late is None else self.now + late
        )
        known = self.sequences._sequences.get(id)
        error = self.sequences.admit(job, mark(id, start=start, end=end), self.now)
        if error is None:
            self.waiting.setdefault(id, []).append(job)
        else:
            assert (
                not known
                or known.ending
                or len(known.waiting) == TERMS.max_waiting
                or self.now >= known.began + 60
            )
            assert known or not start or self.sequences.active == TERMS.max_sequences
            assert (
                known
                or self.sequences.active == TERMS.max_sequences
                or error.startswith(f"Sequence {id} ")
            )

    @rule(joining=st.booleans())
    def assign(self, joining: bool) -> None:
        self.expire()
        joining = joining or self.terms.overlap
        for worker, jobs in self.sequences.assign(self.workers, self.now, LIMITS, joining=joining):
            assert 0 < len(jobs) <= LIMITS.max_items
            assert joining or worker.batches == 0
            for job in jobs:
                id = job.meta.decode()
                assert self.waiting[id].pop(0) is job
                assert all(
                    earlier in self.streams for _, earlier, owner in self.under_way if owner == id
                )
                assert self.place.setdefault(id, worker) is worker
                self.under_way.append((worker, job, id))
            worker.batches += len(jobs) if joining else 1
            assert (
                len({id for user, _, id in self.under_way if user is worker}) <= LIMITS.max_items
                or not joining
            )
        # Nobody waits who could be served.
        for worker in self.workers:
            if worker.batches == 0:
                assert not [
                    chain
                    for chain in self.sequences._sequences.values()
                    if chain.ready and chain.worker in (None, worker)
                ]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), last=st.booleans())
    def answer(self, data: st.DataObject, last: bool) -> None:
        worker, job, id = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove((worker, job, id))
        worker.batches = len([True for user, _, _ in self.under_way if user is worker])
        self.refused(self.sequences.on_answered(job, self.now, last=last))
        self.forget_ended()

    @rule(index=st.integers(0, 1))
    def die(self, index: int) -> None:
        worker, self.workers[index] = self.workers[index], FakeWorker()
        self.refused(self.sequences.on_worker_lost(worker, "died"))
        for entry in [entry for entry in self.under_way if entry[0] is worker]:
            self.under_way.remove(entry)
            assert self.sequences.on_answered(entry[1], self.now) == []
        self.forget_ended()

    @rule(seconds=st.floats(0.1, 15))
    def turn_the_clock(self, seconds: float) -> None:
        self.now += seconds
        self.expire()

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from([job for jobs in self.waiting.values() for job in jobs]))
        job.gone = True
        self.sequences.some_clients_left = True
        self.expire()

    def expire(self) -> None:
        if self.sequences.some_clients_left or self.sequences.earliest_deadline <= self.now:
            self.refused([(job, "") for job in self.sequences.drop_expired(self.now)])
        self.refused(self.sequences.expire(self.now))
        assert self.sequences.next_end > self.now
        assert self.sequences.earliest_deadline > self.now
        self.forget_ended()

    def refused(self, refusals: list[tuple[FakeJob, str]]) -> None:
        for job, _ in refusals:
            self.waiting[job.meta.decode()].remove(job)

    def forget_ended(self) -> None:
        self.place = {
            id: worker for id, worker in self.place.items() if id in self.sequences._sequences
        }

    @invariant()
    def what_waits_here_waits_there(self) -> None:
        assert {id: jobs for id, jobs in self.waiting.items() if jobs} == {
            chain.id: list(chain.waiting)
            for chain in self.sequences._sequences.values()
            if chain.waiting
        }
        assert len(self.sequences) == sum(map(len, self.waiting.values()))
        assert self.sequences.size == sum(
            len(job.body) for jobs in self.waiting.values() for job in jobs
        )
        assert self.sequences.active <= TERMS.max_sequences


class PlayOverlapping(Play):
    """A play in which requests of a sequence overlap.

    The next request is sent once those before it stream, though its worker has no free place.
    """

    terms = TERMS._replace(overlap=True)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        _, job, id = data.draw(st.sampled_from(self.under_way))
        if self.sequences.on_begun(job):
            assert self.waiting[id]
        self.streams.add(job)


for play in (Play, PlayOverlapping):
    play.TestCase.settings = settings(stateful_step_count=30)
TestPlay, TestPlayOverlapping = Play.TestCase, PlayOverlapping.TestCase


def test_a_later_request_is_sent_while_the_one_before_it_streams():
    sequences, worker = start_sequences(TERMS._replace(overlap=True), "a", "b")
    single = BatchLimits(1)
    stream, cancel, of_b = (FakeJob() for _ in range(3))
    assert sequences.admit(stream, mark("a"), 0.0) is None
    assert sequences.assign([worker], 0.0, single, joining=True) == [(worker, [stream])]
    worker.batches = 1
    assert sequences.admit(cancel, mark("a"), 0.0) is None
    assert sequences.admit(of_b, mark("b"), 0.0) is None
    assert sequences.assign([worker], 0.0, single, joining=True) == [], (
        "its first call may still be running"
    )
    assert sequences.on_begun(stream)
    assert sequences.assign([worker], 0.0, single, joining=True) == [(worker, [cancel])]
    worker.batches = 2
    assert sequences.on_answered(stream, 0.0) == sequences.on_answered(cancel, 0.0) == []
    worker.batches = 0
    assert sequences.assign([worker], 0.0, single, joining=True) == [(worker, [of_b])]


def test_a_sequence_that_streams_neither_expires_nor_closes_before_its_last_answer():
    sequences, worker = start_sequences(TERMS._replace(overlap=True))
    stream, end = FakeJob(), FakeJob()
    sequences.admit(stream, mark("a"), 0.0)
    sequences.assign([worker], 0.0, LIMITS, joining=True)
    sequences.on_begun(stream)
    assert sequences.expire(TERMS.max_idle + 1) == []
    sequences.admit(end, mark("a", end=True), 11.0)
    sequences.assign([worker], 11.0, LIMITS, joining=True)
    assert sequences.on_answered(end, 12.0) == []
    assert sequences.active == 1
    assert sequences.on_answered(stream, 13.0) == []
    assert sequences.active == 0


def test_a_new_sequence_goes_to_the_idle_worker_with_the_fewest():
    sequences, first = start_sequences()
    second = FakeWorker()
    job = FakeJob()
    sequences.admit(job, mark("b", start=True), 1.0)
    assert sequences.assign([first, second], 1.0, LIMITS) == [(second, [job])]


def test_a_worker_that_leaves_serves_its_sequences_and_gets_no_new_one():
    sequences, worker = start_sequences()
    old, new = FakeJob(), FakeJob()
    sequences.admit(new, mark("b", start=True), 1.0)
    sequences.admit(old, mark("a"), 1.0)
    assert sequences.assign([worker], 1.0, LIMITS, leaving=[worker]) == [(worker, [old])]


def test_an_idle_sequence_expires_and_its_next_request_is_told_so():
    sequences, _ = start_sequences()
    assert sequences.next_end == 10.0
    assert sequences.expire(10.0) == []
    error = admit(sequences, 11.0)
    assert re.match(r"Sequence a has expired: .* 10 s .*sequenceMaxIdleMSec", error)
    assert admit(sequences, 11.0) is None


def test_many_that_expire_at_once_are_ended_in_several_calls():
    sequences, _ = start_sequences(
        SequenceConfig(max_idle=10, timeout=None, max_sequences=2500, max_waiting=1),
        *map(str, range(2500)),
    )
    active = []
    while sequences.next_end <= 10.0:
        sequences.expire(10.0)
        active.append(sequences.active)
    assert active == [1500, 500, 0]


def test_a_request_that_starts_a_lost_sequence_again_is_accepted():
    sequences, worker = start_sequences()
    sequences.on_worker_lost(worker, "is over")
    assert admit(sequences, 1.0, start=True) is None


def test_a_sequence_is_over_after_its_time_however_busy_it_is():
    sequences, worker = start_sequences()
    for now in range(5, 60, 5):
        job = FakeJob()
        assert sequences.admit(job, mark(), now) is None
        sequences.assign([worker], now, LIMITS)
        sequences.on_answered(job, now)
    error = admit(sequences, 60.0)
    assert re.match(r"Sequence a is over: .* 60 s .*sequenceTimeoutMSec", error)


def test_the_sequence_of_a_request_that_is_under_way_does_not_expire():
    sequences, worker = start_sequences()
    job = FakeJob()
    sequences.admit(job, mark(), 1.0)
    sequences.assign([worker], 1.0, LIMITS)
    assert sequences.expire(100.0) == []
    assert sequences.active == 1
    assert sequences.on_answered(job, 100.0) == []


def test_the_last_request_closes_its_sequence_once_it_is_answered():
    sequences, worker = start_sequences()
    job = FakeJob()
    sequences.admit(job, mark(end=True), 1.0)
    assert "Sequence a is closed" in admit(sequences, 1.0)
    sequences.assign([worker], 1.0, LIMITS)
    sequences.on_answered(job, 2.0)
    assert sequences.active == 0
    assert admit(sequences, 3.0) is None


def test_the_number_of_sequences_and_their_queues_are_bounded():
    sequences, _ = start_sequences(SequenceConfig(10, None, max_sequences=1, max_waiting=1))
    assert "maxNumSequence" in admit(sequences, 1.0, "b", start=True)
    admit(sequences, 1.0)
    assert "maxSequenceJobQueueSize" in admit(sequences, 1.0)


def test_a_lost_worker_ends_its_sequences_and_no_others():
    sequences, worker = start_sequences()
    second, job, waits = FakeWorker(), FakeJob(), FakeJob()
    sequences.admit(job, mark("b", start=True), 1.0)
    sequences.assign([second], 1.0, LIMITS)
    sequences.admit(waits, mark(), 1.0)
    assert sequences.on_worker_lost(worker, "is over: its worker has died") == [
        (waits, "Sequence a is over: its worker has died")
    ]
    assert sequences.active == 1


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=8))
def test_a_batch_keeps_to_the_cap_on_bytes_unless_a_request_alone_exceeds_it(bodies: list[bytes]):
    sequences: Sequences = Sequences(SequenceConfig(10, None, max_sequences=8, max_waiting=1))
    for number, body in enumerate(bodies):
        sequences.admit(FakeJob(body=body), mark(str(number), start=True), 0.0)
    ((_, jobs),) = sequences.assign([FakeWorker()], 0.0, BatchLimits(8, 20))
    assert len(jobs) == 1 or sum(len(job.body) for job in jobs) <= 20


def test_what_a_request_costs_does_not_grow_with_the_sequences_that_live() -> None:
    """The costs are calls of Python functions, since seconds vary."""
    few, many = (count_calls(count) for count in (10, 5000))
    assert many < few + 20


def count_calls(count: int) -> int:
    sequences, worker = start_sequences(
        SequenceConfig(max_idle=10, timeout=60, max_sequences=count, max_waiting=1),
        *map(str, range(count)),
    )
    seen = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal seen
        seen += event == "call" or event == "c_call"

    job = FakeJob()
    sys.setprofile(count_call)
    try:
        assert sequences.admit(job, mark("5"), 1.0) is None
        sequences.expire(1.0)
        batches = sequences.assign([worker], 1.0, LIMITS)
        len(sequences)
        sequences.on_answered(job, 1.0)
    finally:
        sys.setprofile(None)
    assert batches == [(worker, [job])]
    return seen


def test_sequences_that_ended_leave_nothing_behind() -> None:
    sequences: Sequences = Sequences(
        SequenceConfig(max_idle=3600, timeout=7200, max_sequences=2, max_waiting=1)
    )
    worker = FakeWorker()
    for number in range(1000):
        job = FakeJob()
        assert sequences.admit(job, mark(str(number), end=True), number) is None
        sequences.assign([worker], number, LIMITS)
        sequences.on_answered(job, number)
    assert sequences.active == 0
    assert (
        sum(
            len(table) for table in vars(sequences).values() if isinstance(table, dict | list | set)
        )
        < 100
    )


async def test_a_request_that_follows_one_that_left_before_its_sequence_began_is_refused() -> None:
    dispatcher = SequenceDispatcher("m", LIMITS, Bounds(), TERMS)
    dispatcher.accept(True)
    jobs = [WaitingJob(b"id\r\n\r\nts_request_sequence_id: a\r\n", b"", 0.0) for _ in range(2)]
    submit(dispatcher, *jobs)
    dispatcher.leave(jobs[0])
    await refusal_of(jobs[1], Unavailable, "Its sequence did not start")
    await refusal_of(jobs[0], ClientLeft)
    await dispatcher.wait_idle()
    assert len(dispatcher.sequences) == 0


def test_ids_that_are_long_enough_to_fill_the_memory_are_not_remembered():
    long = "a" * 10_000
    sequences, worker = start_sequences(TERMS, long)
    sequences.on_worker_lost(worker, "is over")
    assert admit(sequences, 1.0, long) is None
