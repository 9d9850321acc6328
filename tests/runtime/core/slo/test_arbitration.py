"""Models with latency targets on one device, of which the most urgent goes first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.jobs import TIMEOUT
from tests.kit.peers import Peer, add_worker, answer, submit
from tests.runtime.core.slo.sharing import SharedDevice, fleet
from tsx_archiver.metadata.slo import latency_target
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.slo import arbitration
from tsx_runtime.core.slo.arbitration import Claim, DeviceArbiter, turn_order
from tsx_runtime.core.slo.dispatcher import SloDispatcher

pytestmark = pytest.mark.anyio

CLAIMS = st.lists(
    st.builds(Claim, st.floats(0, 10), st.floats(0.01, 5), st.floats(0, 5)), min_size=1, max_size=8
)


@given(CLAIMS, st.floats(0, 20))
def test_the_earliest_deadline_that_can_be_kept_goes_first(claims, now):
    keys = turn_order(claims, now)
    in_time = [
        (claim.deadline, key)
        for claim, key in zip(claims, keys, strict=True)
        if claim.deadline - claim.duration >= now
    ]
    assert sorted(in_time) == sorted(in_time, key=lambda pair: pair[1])


@given(CLAIMS, st.floats(0, 20), st.floats(0.01, 5), st.floats(0, 5))
def test_a_model_that_is_late_in_any_case_has_its_turn_in_the_end(claims, now, target, ahead):
    longest = max(target, *(claim.target for claim in claims))
    old = Claim(
        now - 2 * longest - max(claim.duration for claim in claims) - 0.001,
        target,
        max(ahead, 0.01),
    )
    fresh = [claim._replace(arrived=now) for claim in claims]
    keys = turn_order([old, *fresh], now)
    assert keys[0] == min(keys)


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_more_requests_are_answered_in_time_than_by_other_rules(
    load,
):
    results: dict[str, list[tuple[float, float]]] = {}
    for rule in ("deadline", "shares", "at once"):
        for seed in (21, 22):
            models = SharedDevice(fleet(load, seed), rule, 12).run()
            accepted, on_time = (
                sum(model.accepted for model in models),
                sum(model.in_time for model in models),
            )
            results.setdefault(rule, []).append(
                (
                    1 - on_time / accepted,
                    float(np.mean([model.in_time / model.offered for model in models])),
                )
            )
    late, in_time = (
        {rule: float(np.mean(shares, axis=0)[column]) for rule, shares in results.items()}
        for column in (0, 1)
    )
    assert late["deadline"] < 0.02
    assert in_time["deadline"] > max(in_time["shares"], in_time["at once"])


async def start_models(
    count: int = 2, *, gpu: int | None = 0, seconds: float = 1.0, cores: int = 1
) -> list[tuple[SloDispatcher, Peer]]:
    """Start models on one device, each with one worker and a longer target than the one before."""
    arbiter, models = DeviceArbiter(cores), []
    for number in range(count):
        target = latency_target(f"p99<{60 * (number + 1)}s")
        points = [(1, seconds), (8, 2 * seconds)]
        dispatcher = SloDispatcher(
            f'Model "{number}" [Version 1.0]',
            BatchLimits(1024),
            Bounds(),
            target,
            points,
            None,
            arbiter,
        )
        dispatcher.accept(True)
        channel, peer = await add_worker(dispatcher)
        channel.devices, channel.threads = (gpu,), 1
        models.append((dispatcher, peer))
    return models


async def is_silent(peer: Peer) -> bool:
    """Return whether nothing is sent to a worker in some turns of the loop."""
    reading = asyncio.ensure_future(peer.read())
    for _ in range(20):
        await asyncio.sleep(0)
    done = reading.done()
    reading.cancel()
    return not done


async def test_a_batch_waits_for_another_models_and_the_earliest_deadline_goes_first():
    (first, first_peer), (second, second_peer), (third, third_peer) = await start_models(3)
    (running,) = submit(second, b"x")
    frame = await second_peer.read()
    waits_longer, waits = submit(third, b"x"), submit(first, b"x")
    assert await is_silent(first_peer)
    assert await is_silent(third_peer)
    await second_peer.reply(frame)
    await answer(running)
    frame = await first_peer.read()
    assert await is_silent(third_peer)
    await first_peer.reply(frame)
    await answer(waits[0])
    await third_peer.serve()
    await answer(waits_longer[0])


async def kill_worker(dispatcher: SloDispatcher, peer: Peer) -> None:
    channel = dispatcher.channels[0]
    peer.close()
    await asyncio.wait_for(channel.closed, TIMEOUT)


async def remove_model(dispatcher: SloDispatcher, peer: Peer) -> None:
    dispatcher.remove(dispatcher.channels[0])
    dispatcher.close()


@pytest.mark.parametrize("end", [kill_worker, remove_model])
async def test_no_model_waits_for_a_worker_that_died_or_a_model_that_is_unregistered(end: Callable):
    (first, first_peer), (second, second_peer) = await start_models()
    submit(first, b"x")
    await first_peer.read()
    (waits,) = submit(second, b"x")
    assert await is_silent(second_peer)
    await end(first, first_peer)
    await second_peer.serve()
    assert await answer(waits) == b"x"


async def test_no_model_waits_for_long_for_a_batch_that_never_ends(monkeypatch):
    monkeypatch.setattr(arbitration, "OVERDUE_FACTOR", 0.001)
    monkeypatch.setattr("tsx_runtime.core.slo.dispatcher.OVERDUE_FACTOR", 0.001)

    (first, first_peer), (second, second_peer) = await start_models()
    submit(first, b"x")
    await first_peer.read()
    (waits,) = submit(second, b"x")
    await second_peer.serve()
    assert await answer(waits) == b"x"


async def test_no_model_waits_for_a_request_whose_client_leaves_before_its_batch_starts():
    (first, _), (second, second_peer) = await start_models()
    await asyncio.sleep(0)
    (waits,) = submit(second, b"x")
    (leaves,) = submit(first, b"x")
    first.leave(leaves)
    await second_peer.serve()
    assert await answer(waits) == b"x"
    leaves.done.exception()


class FakeModel:
    """A model on a GPU that has a batch to start, or runs one that is overdue at `until`."""

    def __init__(
        self, arbiter: DeviceArbiter, started: asyncio.Event | None = None, until: float = 0.0
    ) -> None:
        self.channels = [
            SimpleNamespace(devices=(0,), batches=int(until > 0), replied=time.monotonic())
        ]
        self._started, self._until = started, until
        arbiter.join(self)

    def claim(self, now: float) -> Claim | None:
        return None if self._started is None else Claim(now, 1.0, 0.01)

    def overdue(self, channel: object) -> float:
        return self._until

    def start(self) -> None:
        self._started.set()


async def test_a_longer_batch_that_is_gone_does_not_extend_the_wait_for_an_endless_one():
    arbiter, started = DeviceArbiter(1), asyncio.Event()
    arbiter._crowded_devices = {0}
    waits = FakeModel(arbiter, started)
    long = FakeModel(arbiter, until=time.monotonic() + 1000)
    assert arbiter.granted(waits, time.monotonic()) is None
    arbiter.leave(long)
    FakeModel(arbiter, until=time.monotonic() + 0.01)
    assert arbiter.granted(waits, time.monotonic()) is None
    await asyncio.wait_for(started.wait(), TIMEOUT)


async def test_several_workers_of_a_model_alone_and_workers_with_a_core_each_are_not_held_up():
    (first, first_peer), (second, second_peer) = await start_models(gpu=None, cores=2)
    submit(first, b"x")
    submit(second, b"x")
    await first_peer.read()
    await second_peer.read()
    ((alone, peer),) = await start_models(1)
    channel, second_peer = await add_worker(alone)
    channel.devices = (0,)
    submit(alone, b"x")
    await asyncio.sleep(0)
    submit(alone, b"x")
    await peer.read()
    await second_peer.read()


async def test_a_group_waits_for_all_of_its_gpus_and_others_for_the_group():
    (first, first_peer), (second, second_peer), (third, third_peer) = await start_models(3)
    second.channels[0].devices, third.channels[0].devices = (0, 1), (1,)
    second._arbiter.notify_change()
    (running,) = submit(first, b"x")
    frame = await first_peer.read()
    (group,), (last,) = submit(second, b"x"), submit(third, b"x")
    assert await is_silent(second_peer)
    # Its GPU is idle, but the group's deadline is earlier.
    assert await is_silent(third_peer)
    await first_peer.reply(frame)
    await answer(running)
    frame = await second_peer.read()
    (waits,) = submit(first, b"x")
    assert await is_silent(first_peer)
    await second_peer.reply(frame)
    await answer(group)
    await first_peer.serve()
    await third_peer.serve()
    await asyncio.gather(answer(last), answer(waits))


async def test_all_cores_are_used_where_there_are_fewer_than_workers():
    models = await start_models(3, gpu=None, cores=2)
    for dispatcher, _ in models:
        submit(dispatcher, b"x")
    frames = [await peer.read() for _, peer in models[:2]]
    assert await is_silent(models[2][1])
    await models[1][1].reply(frames[1])
    await models[2][1].read()


async def test_a_model_that_waits_starts_when_workers_need_fewer_cores_than_before():
    (first, first_peer), (second, second_peer) = await start_models(gpu=None, cores=1)
    (running,) = submit(first, b"x")
    frame = await first_peer.read()
    (waits,) = submit(second, b"x")
    assert await is_silent(second_peer)
    second._arbiter._cores = 2
    # The number of cores is looked up again.
    second._arbiter.join(second)
    await first_peer.reply(frame)
    await answer(running)
    await second_peer.serve()
    assert await answer(waits) == b"x"
