"""A version's queue and its workers: asks `assign` on each arrival and each reply, and carries out what it says."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Collection, Iterable

from tsx_runtime import wire
from tsx_runtime.core.batching import BLAMELESS, Limits, Suspects, assign, halves
from tsx_runtime.core.channel import Channel, Sent
from tsx_runtime.core.jobs import Job
from tsx_runtime.core.stats import Stats
from tsx_runtime.errors import NoWorker, QueueFull, TsxError, Unavailable

# TorchServe's words, which its clients look for, also where the queue is full
_NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. "
    "If this is a sequence inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)


class Dispatcher:
    """Holds what waits and what is under way of one version; every job it accepts is answered or refused exactly once.

    Jobs are accepted while a worker serves the version or is on its way (`accept`), and the queue has room.
    """

    def __init__(self, label: str, limits: Limits, queue_size: int) -> None:
        self.label = label  # as errors name it: Model "m" [Version 1.0]
        self.limits = limits
        self.queue_size = queue_size
        self.queue: deque[Job] = deque()
        self.suspects: deque[Suspects] = deque()
        self.channels: list[Channel] = []
        self.stats = Stats()
        self.accepting = False
        self.why_not = ""
        self._loop = asyncio.get_running_loop()
        self._flush_due = False
        self._wake: asyncio.TimerHandle | None = None
        self._open = 0  # accepted and neither answered nor refused yet
        self._quiet = asyncio.Event()
        self._quiet.set()

    # What routes call

    def submit(self, job: Job) -> None:
        if len(self.queue) >= self.queue_size and self._flush_due:  # a burst in one turn may fill the queue while workers idle
            self._flush()
        if not self.accepting:
            self._turn_away(job, self._no_worker())
        elif len(self.queue) >= self.queue_size:
            full = f". The queue is full: {self.queue_size} requests wait (jobQueueSize); try again."
            self._turn_away(job, QueueFull(f"{self.label} {_NO_WORKER}{full}"))
        else:
            self.stats.requests += 1
            self._open += 1
            self._quiet.clear()
            self.queue.append(job)
            if not self._flush_due:  # one flush a turn of the loop: what arrived together leaves together
                self._flush_due = True
                self._loop.call_soon(self._flush)

    # What the supervisor calls

    def add(self, channel: Channel) -> None:
        self.channels.append(channel)
        self._flush()

    def remove(self, channel: Channel) -> None:
        """Send it nothing more; what it holds it still answers."""
        if channel in self.channels:
            self.channels.remove(channel)

    def accept(self, accepting: bool, why_not: str = "") -> None:
        """Whether there is a worker that serves, or will. When there is none, what waits is refused, with the reason if it is known."""
        self.accepting = accepting
        self.why_not = why_not
        if not accepting:
            self.refuse_waiting(self._no_worker())

    def refuse_waiting(self, error: TsxError) -> None:
        while self.suspects:
            self.refuse_lost(self.suspects.popleft().jobs, error)
        while self.queue:
            self._refuse(self.queue.popleft(), error)

    def refuse_lost(self, jobs: Iterable[Job], error: TsxError) -> None:
        """Answer what a worker had begun when it ended."""
        for job in jobs:
            self._refuse(job, error)

    def retry_lost(self, lost: Sent, streaming: Collection[int], error: TsxError) -> None:
        """Try what a worker had begun when it died again, in smaller groups; refuse what cannot be, and what is found guilty."""
        self.refuse_lost([job for position, job in enumerate(lost.jobs) if position in streaming], error)
        left = [job for position, job in enumerate(lost.jobs) if position not in streaming]
        groups = halves(Suspects(left, lost.deaths)) if len(left) == len(lost.jobs) else [Suspects([job], lost.deaths + 1) for job in left]
        if groups and self.accepting:
            self.suspects.extend(groups)
            self._flush()
        else:
            self.refuse_lost(left, error)

    def take_back(self, lost: Sent, streaming: Collection[int], error: TsxError) -> None:
        """Run again, as it is, what a worker had begun that was stuck through no fault of its requests.

        Once: a request that stops its own worker would stop one after the other.
        """
        self.refuse_lost([job for position, job in enumerate(lost.jobs) if position in streaming], error)
        left = [job for position, job in enumerate(lost.jobs) if position not in streaming]
        if left and self.accepting:
            self.suspects.append(Suspects(left, BLAMELESS))
            self._flush()
        else:
            self.refuse_lost(left, error)

    async def quiet(self) -> None:
        """Wait until nothing waits and nothing is under way."""
        await self._quiet.wait()

    # What channels call

    def on_reply(self, channel: Channel, sent: Sent, frame: wire.Frame) -> None:
        now = time.monotonic()
        self._flush()  # the next batch leaves before this one's answers are written
        self._count(sent, frame, now)
        for job, (status, headers, body) in zip(sent.jobs, frame.items, strict=True):
            job.answer(status, headers, body)
        if frame.extra:
            self.stats.add_handler_metrics(json.loads(bytes(frame.extra)))
        self._close(len(sent.jobs))

    def on_closed(self, channel: Channel) -> None:
        """What it had not begun goes back to its old place; what it had begun stays in `channel.sent` for the supervisor."""
        self.remove(channel)
        while len(channel.sent) > 1:
            self.queue.extendleft(reversed(channel.sent.pop().jobs))
        if not self.accepting:  # it was the last, on its way out
            self.refuse_waiting(self._no_worker())
        else:
            self._flush()

    def _flush(self) -> None:
        self._flush_due = False
        if not self.queue and not self.suspects:
            return
        now = time.monotonic()
        todo = assign(self.queue, self.channels, now, self.limits, self.suspects)
        for channel, jobs in todo.batches:
            channel.send(jobs, now)
        for channel, group in todo.retries:
            channel.send(group.jobs, now, group.deaths)
        for job in todo.skipped:
            self._refuse(job, Unavailable(f"{self.label} did not reach the request before its deadline, or its client has left."))
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if todo.wake is not None:
            self._wake = self._loop.call_later(todo.wake - now, self._flush)

    def _count(self, sent: Sent, frame: wire.Frame, now: float) -> None:
        stats, jobs = self.stats, sent.jobs
        count = len(jobs)
        arrived = sum([job.arrived for job in jobs])
        stats.batches += 1
        stats.batch_sizes[count] += 1
        stats.queue_seconds += count * sent.at - arrived
        stats.latency_seconds += count * now - arrived
        stats.inference_seconds += now - sent.at
        stats.last_queue_seconds = sent.at - jobs[0].arrived
        stats.last_worker_seconds = now - sent.at
        for item in frame.items:
            stats.answers[item[0]] += 1

    def _turn_away(self, job: Job, error: TsxError) -> None:
        """Refuse what was never accepted."""
        self.stats.refusals[type(error).__name__] += 1
        job.refuse(error)

    def _no_worker(self) -> NoWorker:
        return NoWorker(f"{self.label} {_NO_WORKER}{self.why_not}")

    def _refuse(self, job: Job, error: TsxError) -> None:
        self._turn_away(job, error)
        self._close(1)

    def _close(self, jobs: int) -> None:
        self._open -= jobs
        if not self._open:
            self._quiet.set()
