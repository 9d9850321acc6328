"""The times of handlers' steps, which are measured without other changes to the handlers."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import threading
from typing import Any

import pytest

from tsx_runtime.worker.execution import step_times

STEPS = """
import time

class Steps:
    def initialize(self, context):
        self.factor = 2

    def preprocess(self, data):
        time.sleep(0.02)
        return [len(row["body"]) for row in data]

    def inference(self, data):
        return [self.factor * length for length in data]

    def postprocess(self, data):
        return [str(length) for length in data]

    def handle(self, data, context):
        return self.postprocess(self.inference(self.preprocess(data)))
"""


class Handler:
    def __init__(self) -> None:
        self.called: list[str] = []

    def preprocess(self, data: int) -> int:
        self.called.append("preprocess")
        return self.inference(data + 1) if data < 3 else data

    def inference(self, data: int) -> int:
        return self.preprocess(data) if data < 3 else data

    def postprocess(self, data: int) -> int:
        raise ValueError("bad")


def steps_in(laps: step_times.Laps) -> set[int]:
    return {stage for stage, _ in laps}


def watched_handler() -> Handler:
    handler = Handler()
    step_times.measure_steps(handler)
    return handler


def test_a_nested_step_is_counted_once() -> None:
    handler = watched_handler()
    laps = step_times.begin()
    assert handler.preprocess(0) == 3
    assert steps_in(laps) == {0, 1}
    assert all(seconds >= 0 for _, seconds in laps)


def test_a_step_that_raises_is_measured_too() -> None:
    handler = watched_handler()
    laps = step_times.begin()
    with pytest.raises(ValueError, match="bad"):
        handler.postprocess(1)
    assert steps_in(laps) == {2}


def test_a_handler_can_be_copied_and_pickled_as_before() -> None:
    handler = watched_handler()
    for handler_copy in (copy.deepcopy(handler), pickle.loads(pickle.dumps(handler))):
        laps = step_times.begin()
        assert handler_copy.preprocess(5) == 5
        assert (handler_copy.called, handler.called) == (["preprocess"], [])
        assert not laps
    assert handler.preprocess.__self__ is handler  # type: ignore[attr-defined]
    assert handler.preprocess.__name__ == "preprocess"


def test_a_handler_without_steps_or_writable_attributes_is_not_changed() -> None:
    class Slots:
        __slots__ = ()

        def preprocess(self, data: int) -> int:
            return data

    class Streams:
        inference = None

        def preprocess(self, data: int) -> Any:
            yield data

    step_times.measure_steps(None)
    step_times.measure_steps(Slots())
    streams = Streams()
    step_times.measure_steps(streams)
    assert vars(streams) == {}


def test_steps_in_a_handlers_own_threads_are_not_measured() -> None:
    handler = watched_handler()
    laps = step_times.begin()
    thread = threading.Thread(target=handler.preprocess, args=(5,))
    thread.start()
    thread.join()
    assert not laps


def test_each_batch_gets_a_new_list_unless_the_previous_one_is_empty() -> None:
    handler = watched_handler()
    unused = step_times.begin()
    first = step_times.begin_next()
    assert first is unused
    handler.preprocess(3)
    second = step_times.begin_next()
    assert steps_in(first) == {0}
    assert second == []


def test_concurrent_requests_on_one_loop_have_separate_laps() -> None:
    class AsyncHandler:
        async def inference(self, data: int) -> int:
            await asyncio.sleep(0)
            return data

    handler = AsyncHandler()
    step_times.measure_steps(handler)

    async def run_steps(times: int) -> int:
        laps = step_times.begin()
        for _ in range(times):
            await handler.inference(1)
        return len(laps)

    async def main() -> list[int]:
        return await asyncio.gather(run_steps(1), run_steps(3))

    assert asyncio.run(main()) == [1, 3]


def test_the_time_of_a_handler_without_steps_is_inference() -> None:
    assert step_times.sum_steps(2.0, [])[2] == 2.0
    assert math.isnan(step_times.sum_steps(2.0, [])[1])
    _, preprocess, inference, postprocess = step_times.sum_steps(2.0, [(0, 0.5), (0, 0.25)])
    assert preprocess == 0.75
    assert math.isnan(inference)
    assert math.isnan(postprocess)


def test_a_reply_has_the_step_times_of_a_custom_handle(start_worker: Any) -> None:
    worker = start_worker(STEPS)
    assert worker.ask_bodies(b"abc", b"x") == [b"6", b"2"]
    start, seconds, preprocess, inference, postprocess = worker.times
    assert 0.02 <= preprocess <= seconds
    assert 0 <= inference + postprocess <= seconds - preprocess
    assert start > 0


DERIVED = """
import time
from ts.torch_handler.base_handler import BaseHandler

class Handler(BaseHandler):
    def initialize(self, context):
        self.context = context

    def preprocess(self, rows):
        time.sleep(0.02)
        return [bytes(row["body"]) for row in rows]

    def inference(self, rows):
        return rows

    def postprocess(self, rows):
        return rows
"""


@pytest.mark.parametrize(
    "config", [{}, {"overlapPreprocessing": True}, {"micro_batching": {"micro_batch_size": 1}}]
)
def test_steps_that_run_in_other_threads_are_reported_too(
    start_worker: Any, config: dict[str, Any]
) -> None:
    worker = start_worker(DERIVED, model_config=config)
    for _ in range(2):
        worker.ask(b"a", b"b")
        _, seconds, *steps = worker.times
        assert steps[0] >= 0.02
        assert all(step >= 0 for step in steps)
        assert seconds > 0.02


ASYNC_HANDLER = """
import asyncio

class Handler:
    async def initialize(self, context):
        pass

    async def preprocess(self, data):
        await asyncio.sleep(0.02)
        return data[0]["body"]

    async def handle(self, data, context):
        return [await self.preprocess(data)]
"""


@pytest.mark.parametrize(("source", "mode"), [(STEPS, "continuous"), (ASYNC_HANDLER, "async")])
def test_requests_that_join_a_batch_have_their_own_step_times(
    start_worker: Any, source: str, mode: str
) -> None:
    worker = start_worker(source, mode=mode)
    for _ in range(2):
        worker.ask(b"a")
        _, seconds, preprocess, inference, _ = worker.times
        assert 0.02 <= preprocess <= seconds
        assert math.isnan(inference) == (mode == "async")
