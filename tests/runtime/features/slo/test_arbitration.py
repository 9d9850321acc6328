"""Models with latency targets on one device: the most urgent goes first."""

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
from tests.runtime.features.slo.sharing import SharedDevice, fleet
from tsx_archiver.metadata.slo import latency_target
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.features.slo import arbitration
from tsx_runtime.features.slo.arbitration import Claim, DeviceArbiter, turn_order
from tsx_runtime.features.slo.dispatcher import SloDispatcher

pytestmark = pytest.mark.anyio

CLAIMS = st.lists(
    st.builds(Claim, st.floats(0, 10), st.floats(0.01, 5), st.floats(0, 5)), min_size=1, max_size=8
)


@given(CLAIMS, st.floats(0, 20))
def test_the_earliest_feasible_deadline_goes_first(claims, now):
    keys = turn_order(claims, now)
    in_time = [
        (claim.deadline, key)
        for claim, key in zip(claims, keys, strict=True)
        if claim.deadline - claim.duration >= now
    ]
    assert sorted(in_time) == sorted(in_time, key=lambda pair: pair[1])


@given(CLAIMS, st.floats(0, 20), st.floats(0.01, 5), st.floats(0, 5))
def test_a_model_that_is_already_late_is_served_eventually(claims, now, target, duration):
    longest = max(target, *(claim.target for claim in claims))
    old_claim = Claim(
        now - 2 * longest - max(claim.duration for claim in claims) - 0.001,
        target,
        max(duration, 0.01),
    )
    new_claims = [claim._replace(arrived=now) for claim in claims]
    keys = turn_order([old_claim, *new_claims], now)
    assert keys[0] == min(keys)


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_more_requests_are_answered_in_time_than_by_other_rules(load):
    results: dict[str, list[tuple[float, float]]] = {}
    for rule in ("deadline", "shares", "at once"):
        for seed in (21, 22):
            models = SharedDevice(fleet(load, seed), rule, 12).run()
            accepted, in_time_count = (
                sum(model.accepted for model in models),
                sum(model.in_time for model in models),
            )
            results.setdefault(rule, []).append(
                (
                    1 - in_time_count / accepted,
                    float(np.mean([model.in_time / model.offered for model in models])),
                )
            )
    late_fraction, in_time_fraction = (
        {
            rule: float(np.mean(result_pairs, axis=0)[column])
            for rule, result_pairs in results.items()
        }
        for column in (0, 1)
    )
    assert late_fraction["deadline"] < 0.02
    assert in_time_fraction["deadline"] > max(
        in_time_fraction["shares"], in_time_fraction["at once"]
    )


async def start_models(
    count: int = 2, *, gpu: int | None = 0, seconds: float = 1.0, cores: int = 1
) -> list[tuple[SloDispatcher, Peer]]:
    """Start models on one device; each has one worker and a longer target than the previous."""
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
    """Return whether a worker receives nothing during some iterations of the event loop."""
    read_task = asyncio.ensure_future(peer.read())
    for _ in range(20):
        await asyncio.sleep(0)
    has_data = read_task.done()
    read_task.cancel()
    return not has_data


async def test_batches_wait_for_the_device_in_deadline_order():
    (first, first_peer), (second, second_peer), (third, third_peer) = await start_models(3)
    (running_job,) = submit(second, b"x")
    frame = await second_peer.read()
    later_jobs, next_jobs = submit(third, b"x"), submit(first, b"x")
    assert await is_silent(first_peer)
    assert await is_silent(third_peer)
    await second_peer.reply(frame)
    await answer(running_job)
    frame = await first_peer.read()
    assert await is_silent(third_peer)
    await first_peer.reply(frame)
    await answer(next_jobs[0])
    await third_peer.serve()
    await answer(later_jobs[0])


async def kill_worker(dispatcher: SloDispatcher, peer: Peer) -> None:
    channel = dispatcher.channels[0]
    peer.close()
    await asyncio.wait_for(channel.closed, TIMEOUT)


async def remove_model(dispatcher: SloDispatcher, peer: Peer) -> None:
    dispatcher.remove(dispatcher.channels[0])
    dispatcher.close()


@pytest.mark.parametrize("end", [kill_worker, remove_model])
async def test_a_dead_worker_or_removed_model_releases_the_device(end: Callable):
    (first, first_peer), (second, second_peer) = await start_models()
    submit(first, b"x")
    await first_peer.read()
    (next_jobs,) = submit(second, b"x")
    assert await is_silent(second_peer)
    await end(first, first_peer)
    await second_peer.serve()
    assert await answer(next_jobs) == b"x"


async def test_an_endless_batch_releases_the_device_after_a_timeout(monkeypatch):
    monkeypatch.setattr(arbitration, "OVERDUE_FACTOR", 0.001)
    monkeypatch.setattr("tsx_runtime.features.slo.dispatcher.OVERDUE_FACTOR", 0.001)

    (first, first_peer), (second, second_peer) = await start_models()
    submit(first, b"x")
    await first_peer.read()
    (next_jobs,) = submit(second, b"x")
    await second_peer.serve()
    assert await answer(next_jobs) == b"x"


async def test_a_request_without_a_client_releases_its_turn():
    (first, _), (second, second_peer) = await start_models()
    await asyncio.sleep(0)
    (next_jobs,) = submit(second, b"x")
    (leaves,) = submit(first, b"x")
    first.leave(leaves)
    await second_peer.serve()
    assert await answer(next_jobs) == b"x"
    leaves.done.exception()


class FakeModel:
    """A model on a GPU with a batch to start, or with one that is overdue at `until`."""

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


async def test_an_ended_batch_does_not_extend_the_wait_for_an_endless_one():
    arbiter, started = DeviceArbiter(1), asyncio.Event()
    arbiter._crowded_devices = {0}
    next_jobs = FakeModel(arbiter, started)
    long_batch_model = FakeModel(arbiter, until=time.monotonic() + 1000)
    assert arbiter.granted(next_jobs, time.monotonic()) is None
    arbiter.leave(long_batch_model)
    FakeModel(arbiter, until=time.monotonic() + 0.01)
    assert arbiter.granted(next_jobs, time.monotonic()) is None
    await asyncio.wait_for(started.wait(), TIMEOUT)


async def test_models_that_do_not_share_a_device_do_not_wait():
    (first, first_peer), (second, second_peer) = await start_models(gpu=None, cores=2)
    submit(first, b"x")
    submit(second, b"x")
    await first_peer.read()
    await second_peer.read()
    ((single_model, peer),) = await start_models(1)
    channel, second_peer = await add_worker(single_model)
    channel.devices = (0,)
    submit(single_model, b"x")
    await asyncio.sleep(0)
    submit(single_model, b"x")
    await peer.read()
    await second_peer.read()


async def test_a_process_group_waits_for_all_its_gpus():
    (first, first_peer), (second, second_peer), (third, third_peer) = await start_models(3)
    second.channels[0].devices, third.channels[0].devices = (0, 1), (1,)
    second._arbiter.notify_change()
    (running_job,) = submit(first, b"x")
    frame = await first_peer.read()
    (group,), (last,) = submit(second, b"x"), submit(third, b"x")
    assert await is_silent(second_peer)
    # The third model's GPU is idle, but the group's deadline is earlier.
    assert await is_silent(third_peer)
    await first_peer.reply(frame)
    await answer(running_job)
    frame = await second_peer.read()
    (next_jobs,) = submit(first, b"x")
    assert await is_silent(first_peer)
    await second_peer.reply(frame)
    await answer(group)
    await first_peer.serve()
    await third_peer.serve()
    await asyncio.gather(answer(last), answer(next_jobs))


async def test_all_cores_are_used_if_workers_outnumber_them():
    models = await start_models(3, gpu=None, cores=2)
    for dispatcher, _ in models:
        submit(dispatcher, b"x")
    frames = [await peer.read() for _, peer in models[:2]]
    assert await is_silent(models[2][1])
    await models[1][1].reply(frames[1])
    await models[2][1].read()


async def test_a_waiting_model_starts_when_workers_need_fewer_cores():
    (first, first_peer), (second, second_peer) = await start_models(gpu=None, cores=1)
    (running_job,) = submit(first, b"x")
    frame = await first_peer.read()
    (next_jobs,) = submit(second, b"x")
    assert await is_silent(second_peer)
    second._arbiter._cores = 2
    # Joining again makes the arbiter read the number of cores.
    second._arbiter.join(second)
    await first_peer.reply(frame)
    await answer(running_job)
    await second_peer.serve()
    assert await answer(next_jobs) == b"x"
