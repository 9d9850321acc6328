"""Sequences as properties: random requests, random worker deaths, and a simulated clock."""

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
from tsx_runtime.core.scheduling.strategies import SequenceConfig
from tsx_runtime.errors import ClientLeft, Unavailable
from tsx_runtime.features.sequences.dispatcher import SequenceDispatcher
from tsx_runtime.features.sequences.sequences import SequenceHeaders, Sequences

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
    """A state machine in which each accepted request is either sent once or refused once.

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
        self.waiting_jobs: dict[str, list[FakeJob]] = {}
        self.running_jobs: list[tuple[FakeWorker, FakeJob, str]] = []
        self.workers_by_sequence: dict[str, FakeWorker] = {}

    @rule(
        id=st.sampled_from("abcde"),
        start=st.booleans(),
        end=st.booleans(),
        time_left_s=st.none() | st.floats(1, 20),
    )
    def request(self, id: str, start: bool, end: bool, time_left_s: float | None) -> None:
        self.expire()
        job = FakeJob(
            meta=id.encode(),
            arrived=self.now,
            deadline=None if time_left_s is None else self.now + time_left_s,
        )
        chain = self.sequences._sequences.get(id)
        error = self.sequences.admit(job, mark(id, start=start, end=end), self.now)
        if error is None:
            self.waiting_jobs.setdefault(id, []).append(job)
        else:
            assert (
                not chain
                or chain.ending
                or len(chain.waiting) == TERMS.max_waiting
                or self.now >= chain.began + 60
            )
            assert chain or not start or self.sequences.active == TERMS.max_sequences
            assert (
                chain
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
                assert self.waiting_jobs[id].pop(0) is job
                assert all(
                    earlier in self.streams
                    for _, earlier, owner in self.running_jobs
                    if owner == id
                )
                assert self.workers_by_sequence.setdefault(id, worker) is worker
                self.running_jobs.append((worker, job, id))
            worker.batches += len(jobs) if joining else 1
            assert (
                len({id for user, _, id in self.running_jobs if user is worker}) <= LIMITS.max_items
                or not joining
            )
        # No sequence waits if an idle worker could serve it.
        for worker in self.workers:
            if worker.batches == 0:
                assert not [
                    chain
                    for chain in self.sequences._sequences.values()
                    if chain.ready and chain.worker in (None, worker)
                ]

    @precondition(lambda self: self.running_jobs)
    @rule(data=st.data(), last=st.booleans())
    def answer(self, data: st.DataObject, last: bool) -> None:
        worker, job, id = data.draw(st.sampled_from(self.running_jobs))
        self.running_jobs.remove((worker, job, id))
        worker.batches = len([True for user, _, _ in self.running_jobs if user is worker])
        self.record_refusals(self.sequences.on_answered(job, self.now, last=last))
        self.forget_ended()

    @rule(index=st.integers(0, 1))
    def die(self, index: int) -> None:
        worker, self.workers[index] = self.workers[index], FakeWorker()
        self.record_refusals(self.sequences.on_worker_lost(worker, "died"))
        for entry in [entry for entry in self.running_jobs if entry[0] is worker]:
            self.running_jobs.remove(entry)
            assert self.sequences.on_answered(entry[1], self.now) == []
        self.forget_ended()

    @rule(seconds=st.floats(0.1, 15))
    def advance_clock(self, seconds: float) -> None:
        self.now += seconds
        self.expire()

    @precondition(lambda self: any(self.waiting_jobs.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job = data.draw(
            st.sampled_from([job for jobs in self.waiting_jobs.values() for job in jobs])
        )
        job.gone = True
        self.sequences.some_clients_left = True
        self.expire()

    def expire(self) -> None:
        if self.sequences.some_clients_left or self.sequences.earliest_deadline <= self.now:
            self.record_refusals([(job, "") for job in self.sequences.drop_expired(self.now)])
        self.record_refusals(self.sequences.expire(self.now))
        assert self.sequences.next_end > self.now
        assert self.sequences.earliest_deadline > self.now
        self.forget_ended()

    def record_refusals(self, refusals: list[tuple[FakeJob, str]]) -> None:
        for job, _ in refusals:
            self.waiting_jobs[job.meta.decode()].remove(job)

    def forget_ended(self) -> None:
        self.workers_by_sequence = {
            id: worker
            for id, worker in self.workers_by_sequence.items()
            if id in self.sequences._sequences
        }

    @invariant()
    def waiting_jobs_match_the_model(self) -> None:
        assert {id: jobs for id, jobs in self.waiting_jobs.items() if jobs} == {
            chain.id: list(chain.waiting)
            for chain in self.sequences._sequences.values()
            if chain.waiting
        }
        assert len(self.sequences) == sum(map(len, self.waiting_jobs.values()))
        assert self.sequences.size == sum(
            len(job.body) for jobs in self.waiting_jobs.values() for job in jobs
        )
        assert self.sequences.active <= TERMS.max_sequences


class PlayOverlapping(Play):
    """A state machine in which requests of a sequence overlap.

    A request is sent once its predecessors stream, even if its worker has no free slot.
    """

    terms = TERMS._replace(overlap=True)

    @precondition(lambda self: self.running_jobs)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        _, job, id = data.draw(st.sampled_from(self.running_jobs))
        if self.sequences.on_begun(job):
            assert self.waiting_jobs[id]
        self.streams.add(job)


for play in (Play, PlayOverlapping):
    play.TestCase.settings = settings(stateful_step_count=30)
TestPlay, TestPlayOverlapping = Play.TestCase, PlayOverlapping.TestCase


def test_the_next_request_is_sent_while_the_previous_one_streams():
    sequences, worker = start_sequences(TERMS._replace(overlap=True), "a", "b")
    one_item = BatchLimits(1)
    stream, cancel, of_b = (FakeJob() for _ in range(3))
    assert sequences.admit(stream, mark("a"), 0.0) is None
    assert sequences.assign([worker], 0.0, one_item, joining=True) == [(worker, [stream])]
    worker.batches = 1
    assert sequences.admit(cancel, mark("a"), 0.0) is None
    assert sequences.admit(of_b, mark("b"), 0.0) is None
    assert sequences.assign([worker], 0.0, one_item, joining=True) == [], (
        "its first call may still be running"
    )
    assert sequences.on_begun(stream)
    assert sequences.assign([worker], 0.0, one_item, joining=True) == [(worker, [cancel])]
    worker.batches = 2
    assert sequences.on_answered(stream, 0.0) == sequences.on_answered(cancel, 0.0) == []
    worker.batches = 0
    assert sequences.assign([worker], 0.0, one_item, joining=True) == [(worker, [of_b])]


def test_a_streaming_sequence_stays_open_until_its_last_answer():
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


def test_a_new_sequence_goes_to_the_idle_worker_with_the_fewest_sequences():
    sequences, first = start_sequences()
    second = FakeWorker()
    job = FakeJob()
    sequences.admit(job, mark("b", start=True), 1.0)
    assert sequences.assign([first, second], 1.0, LIMITS) == [(second, [job])]


def test_a_retiring_worker_serves_its_sequences_but_gets_no_new_one():
    sequences, worker = start_sequences()
    first_job, second_job = FakeJob(), FakeJob()
    sequences.admit(second_job, mark("b", start=True), 1.0)
    sequences.admit(first_job, mark("a"), 1.0)
    assert sequences.assign([worker], 1.0, LIMITS, leaving=[worker]) == [(worker, [first_job])]


def test_the_next_request_of_an_expired_sequence_is_refused():
    sequences, _ = start_sequences()
    assert sequences.next_end == 10.0
    assert sequences.expire(10.0) == []
    error = admit(sequences, 11.0)
    assert re.match(r"Sequence a has expired: .* 10 s .*sequenceMaxIdleMSec", error)
    assert admit(sequences, 11.0) is None


def test_many_expirations_are_processed_in_several_calls():
    sequences, _ = start_sequences(
        SequenceConfig(max_idle=10, timeout=None, max_sequences=2500, max_waiting=1),
        *map(str, range(2500)),
    )
    active = []
    while sequences.next_end <= 10.0:
        sequences.expire(10.0)
        active.append(sequences.active)
    assert active == [1500, 500, 0]


def test_a_lost_sequence_can_be_restarted():
    sequences, worker = start_sequences()
    sequences.on_worker_lost(worker, "is over")
    assert admit(sequences, 1.0, start=True) is None


def test_a_busy_sequence_ends_at_its_maximum_age():
    sequences, worker = start_sequences()
    for now in range(5, 60, 5):
        job = FakeJob()
        assert sequences.admit(job, mark(), now) is None
        sequences.assign([worker], now, LIMITS)
        sequences.on_answered(job, now)
    error = admit(sequences, 60.0)
    assert re.match(r"Sequence a is over: .* 60 s .*sequenceTimeoutMSec", error)


def test_a_sequence_with_a_running_request_does_not_expire():
    sequences, worker = start_sequences()
    job = FakeJob()
    sequences.admit(job, mark(), 1.0)
    sequences.assign([worker], 1.0, LIMITS)
    assert sequences.expire(100.0) == []
    assert sequences.active == 1
    assert sequences.on_answered(job, 100.0) == []


def test_the_end_request_closes_its_sequence_after_its_answer():
    sequences, worker = start_sequences()
    job = FakeJob()
    sequences.admit(job, mark(end=True), 1.0)
    assert "Sequence a is closed" in admit(sequences, 1.0)
    sequences.assign([worker], 1.0, LIMITS)
    sequences.on_answered(job, 2.0)
    assert sequences.active == 0
    assert admit(sequences, 3.0) is None


def test_the_number_of_sequences_and_their_queues_are_limited():
    sequences, _ = start_sequences(SequenceConfig(10, None, max_sequences=1, max_waiting=1))
    assert "maxNumSequence" in admit(sequences, 1.0, "b", start=True)
    admit(sequences, 1.0)
    assert "maxSequenceJobQueueSize" in admit(sequences, 1.0)


def test_a_lost_worker_ends_only_its_own_sequences():
    sequences, worker = start_sequences()
    second, job, waiting_job = FakeWorker(), FakeJob(), FakeJob()
    sequences.admit(job, mark("b", start=True), 1.0)
    sequences.assign([second], 1.0, LIMITS)
    sequences.admit(waiting_job, mark(), 1.0)
    assert sequences.on_worker_lost(worker, "is over: its worker has died") == [
        (waiting_job, "Sequence a is over: its worker has died")
    ]
    assert sequences.active == 1


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=8))
def test_a_batch_keeps_its_byte_limit_except_for_a_single_request(bodies: list[bytes]):
    sequences: Sequences = Sequences(SequenceConfig(10, None, max_sequences=8, max_waiting=1))
    for number, body in enumerate(bodies):
        sequences.admit(FakeJob(body=body), mark(str(number), start=True), 0.0)
    ((_, jobs),) = sequences.assign([FakeWorker()], 0.0, BatchLimits(8, 20))
    assert len(jobs) == 1 or sum(len(job.body) for job in jobs) <= 20


def test_the_cost_per_request_is_independent_of_the_sequence_count() -> None:
    """Count calls of Python functions, since run times vary."""
    few_calls, many_calls = (count_calls(count) for count in (10, 5000))
    assert many_calls < few_calls + 20


def count_calls(count: int) -> int:
    sequences, worker = start_sequences(
        SequenceConfig(max_idle=10, timeout=60, max_sequences=count, max_waiting=1),
        *map(str, range(count)),
    )
    call_count = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal call_count
        call_count += event == "call" or event == "c_call"

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
    return call_count


def test_ended_sequences_leave_no_state() -> None:
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


async def test_a_request_after_an_abandoned_first_one_is_refused() -> None:
    dispatcher = SequenceDispatcher("m", LIMITS, Bounds(), TERMS)
    dispatcher.accept(True)
    jobs = [WaitingJob(b"id\r\n\r\nts_request_sequence_id: a\r\n", b"", 0.0) for _ in range(2)]
    submit(dispatcher, *jobs)
    dispatcher.leave(jobs[0])
    await refusal_of(jobs[1], Unavailable, "Its sequence did not start")
    await refusal_of(jobs[0], ClientLeft)
    await dispatcher.wait_idle()
    assert len(dispatcher.sequences) == 0


def test_long_sequence_ids_are_not_remembered():
    long_id = "a" * 10_000
    sequences, worker = start_sequences(TERMS, long_id)
    sequences.on_worker_lost(worker, "is over")
    assert admit(sequences, 1.0, long_id) is None
