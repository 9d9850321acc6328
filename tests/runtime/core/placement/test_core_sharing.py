"""The division of the machine's cores among the workers at work."""

from __future__ import annotations

from tsx_runtime.core.placement.core_sharing import IDLE, CoreSharing


class Worker:
    def __init__(self, *, threads: int = 8, shares: bool = True) -> None:
        self.answered, self.batches = 0, 0
        self.threads, self.shares_cores = threads, shares

    def set_threads(self, threads: int) -> None:
        self.threads = threads


def test_the_workers_at_work_share_what_configured_ones_leave() -> None:
    now = 0.0
    first, second, idle, fixed = Worker(), Worker(), Worker(), Worker(threads=3, shares=False)
    workers = [first, second, idle, fixed]
    sharing = CoreSharing(8, lambda: workers, lambda: now)

    def after(seconds: float, *at_work: Worker) -> list[int]:
        nonlocal now
        now += seconds
        for each in at_work:
            each.answered += 1
        sharing.share()
        return [each.threads for each in workers]

    assert after(1) == [8, 8, 8, 3]
    assert after(1, first) == [8, 8, 8, 3]
    assert after(1, first, second) == [4, 4, 8, 3]
    assert after(1, first, second, fixed) == [2, 2, 8, 3]
    second.batches = 1  # one long request
    assert after(IDLE + 2, first) == [4, 4, 8, 3]
    second.batches = 0
    assert after(IDLE + 2, first) == [8, 4, 8, 3]
    workers.remove(first)
    assert after(1, second) == [8, 8, 3]


def test_each_has_at_least_one_core() -> None:
    workers = [Worker(), Worker(), Worker(), Worker(threads=4, shares=False)]
    for each in workers:
        each.batches = 1
    CoreSharing(2, lambda: workers).share()
    assert [each.threads for each in workers] == [1, 1, 1, 4]
