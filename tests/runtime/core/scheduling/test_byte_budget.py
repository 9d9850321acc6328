"""The budget of bytes in flight: requests are admitted, refused or cut off."""

from __future__ import annotations

import asyncio

import pytest

from tsx_runtime.core.scheduling import byte_budget
from tsx_runtime.core.scheduling.byte_budget import MIN_RETURNED_BYTES, ByteBudget
from tsx_runtime.errors import NoRoom

pytestmark = pytest.mark.anyio


class SlowReader:
    def __init__(self) -> None:
        self.is_cut_off = False

    def cut_off(self) -> None:
        self.is_cut_off = True


def test_bodies_may_take_seven_eighths_and_refused_ones_take_nothing() -> None:
    budget = ByteBudget(800)
    budget.take(700)
    with pytest.raises(NoRoom, match="max_inflight_bytes") as exc_info:
        budget.take(1)
    assert (budget.used, budget.refused, exc_info.value.retry_after) == (700, 1, 1)
    budget.give(700)
    assert budget.used == 0


def test_clients_with_the_most_unread_bytes_are_cut_off() -> None:
    budget = ByteBudget(1000)
    readers = [SlowReader() for _ in range(4)]
    for reader, size in zip(readers, (100, 300, 50, 200), strict=True):
        budget.set_unread(reader, size)
    # 650 of 1000 bytes are more than a half.
    assert budget.overdrawn
    budget.shed()
    assert [reader.is_cut_off for reader in readers] == [False, True, False, False]
    budget.take(500)
    # The total is now 1000 bytes, which fit.
    budget.set_unread(readers[0], 250)
    assert not budget.overdrawn
    budget.set_unread(readers[0], 251)
    budget.shed()
    assert [reader.is_cut_off for reader in readers] == [True, True, False, False]
    assert (budget.used, budget.unread, budget.cut_off) == (750, 250, 2)


def test_unread_bytes_per_client_are_counted_once() -> None:
    budget, reader = ByteBudget(1000), SlowReader()
    for size in (10, 400, 400, 3, 0, 0):
        budget.set_unread(reader, size)
        assert (budget.used, budget.unread) == (size, size)


async def test_memory_is_returned_after_most_bytes_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(byte_budget, "RETURN_DELAY_S", 0.0)
    monkeypatch.setattr(
        byte_budget, "return_freed_memory", lambda: loop.call_soon_threadsafe(returned.set)
    )
    budget = ByteBudget(1 << 30)
    budget.take(MIN_RETURNED_BYTES - 1)
    budget.give(MIN_RETURNED_BYTES - 1)
    assert budget._return_timer is None
    budget.take(MIN_RETURNED_BYTES)
    budget.give(MIN_RETURNED_BYTES // 2)
    assert budget._return_timer is None
    budget.give(MIN_RETURNED_BYTES // 2)
    await asyncio.wait_for(returned.wait(), 10)
    assert (budget._return_timer, budget._peak) == (None, 0)
