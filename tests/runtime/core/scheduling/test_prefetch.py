"""Workers that prefetch the next batch while the model runs, and so hold two batches."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.jobs import TIMEOUT, answer_of, refusal_of
from tests.support.clients.talker import a_talker, ask, submit, until
from tsx_runtime.errors import WorkerDied

pytestmark = pytest.mark.anyio

HANDLER = """
import os, time, torch
from pathlib import Path
from ts.torch_handler.base_handler import BaseHandler

class Talker(BaseHandler):
    def initialize(self, context):
        self.context, self.device, self.initialized = context, torch.device("cpu"), True

    def preprocess(self, data):
        words = [row["body"].decode() for row in data]
        if "exit" in words:
            os._exit(3)
        return words

    def inference(self, words):
        for word in words:
            while word.startswith("until ") and not Path(word[6:]).exists():
                time.sleep(0.005)
        return words

    def postprocess(self, words):
        return words
"""
CONFIG = "overlapPreprocessing: true"


def count_batches(version) -> list[int]:
    return [channel.batches for channel in version.dispatcher.channels]


async def test_every_worker_prefetches_one_full_batch(registry, tmp_path):
    version = await a_talker(
        registry, tmp_path, HANDLER, config=CONFIG, initial_workers=2, batch_size=2
    )
    gate = tmp_path / "gate"
    jobs = [submit(version, f"until {gate}") for _ in range(4)]
    await until(lambda: count_batches(version) == [1, 1])
    jobs += [submit(version, f"until {gate}") for _ in range(7)]
    await until(lambda: count_batches(version) == [2, 2])
    assert version.pending == 3
    gate.touch()
    answers = await asyncio.wait_for(asyncio.gather(*(job.done for job in jobs)), TIMEOUT)
    assert {answer.body.decode() for answer in answers} == {f"until {gate}"}


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_prefetched_request_that_kills_its_worker_fails_alone(registry, tmp_path, workers):
    version = await a_talker(
        registry, tmp_path, HANDLER, config=CONFIG, initial_workers=workers, batch_size=4
    )
    gate = tmp_path / "gate"
    running_jobs = [submit(version, f"until {gate}") for _ in range(4 * workers)]
    await until(lambda: count_batches(version) == [1] * workers)
    prefetched_jobs = [submit(version, body) for body in ("a", "b", "exit", "d")]
    await until(lambda: sum(count_batches(version)) < workers + 1)
    gate.touch()
    for job in running_jobs:
        assert (await answer_of(job)).body.decode() == f"until {gate}"
    for job, body in zip(prefetched_jobs, ("a", "b", "exit", "d"), strict=True):
        if body == "exit":
            await refusal_of(job, WorkerDied)
        else:
            assert (await answer_of(job)).body.decode() == body
    assert await ask(version, "still here") == "still here"
