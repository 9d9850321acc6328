"""The number of torch's threads for each batch, on simulated models and a fake torch."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable

import pytest

from tsx_runtime.worker.execution.thread_tuning import ThreadTuning, make_tuning

# Returns the seconds of a batch, for threads, requests and the current time.
Cost = Callable[[int, int, float], float]


class Model:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cost: Cost, share: int = 8, *, tunes: bool = True
    ) -> None:
        self.threads, self.calls, self.now, self.cost = share, 0, 0.0, cost
        self.noise = random.Random(0)
        torch = types.SimpleNamespace(
            set_num_threads=self.set, get_num_threads=lambda: self.threads
        )
        monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]  # as a module
        monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
        tuning = make_tuning(share, is_tuning=tunes)
        assert tuning is not None
        self.tuning: ThreadTuning = tuning

    def set(self, threads: int) -> None:
        self.threads, self.calls = threads, self.calls + 1

    def run(self, seconds: float, sizes: tuple[int, ...] = (1,)) -> float:
        """Run batches; return their time relative to that with the best_s number of threads."""
        end, best_s, total_s = self.now + seconds, 0.0, 0.0
        while self.now < end:
            size = self.noise.choice(sizes)
            self.tuning.begin(size)
            batch_s = self.cost(self.threads, size, self.now)
            best_s += min(self.cost(threads, size, self.now) for threads in (1, 2, 4, 8))
            total_s += batch_s
            batch_s *= self.noise.uniform(0.9, 1.1) * self.noise.choices((1, 5), (50, 1))[0]
            self.now += batch_s
            self.tuning.end(self.now, batch_s)
        return total_s / best_s


def small(threads: int, size: int, now: float) -> float:
    return 0.001 * (1 + 0.3 * (threads - 1))


def large(threads: int, size: int, now: float) -> float:
    return 0.08 / threads


def by_size(threads: int, size: int, now: float) -> float:
    return 0.0001 * size / threads + 0.0002 * threads


def narrow(threads: int, size: int, now: float) -> float:
    """Return the seconds of a model that uses at most two threads well."""
    return 0.01 / min(2, threads) + 0.0005 * threads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cost", "sizes"), [(small, (1,)), (large, (1,)), (by_size, (1, 64)), (narrow, (3,))]
)
def test_after_a_few_batches_each_size_has_nearly_the_best_number(
    monkeypatch: pytest.MonkeyPatch, cost: Cost, sizes: tuple[int, ...]
) -> None:
    model = Model(monkeypatch, cost)
    model.run(10, sizes)
    assert model.run(60, sizes) < 1.12


def test_the_number_of_threads_follows_the_load_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulate other programs, which slow down the slowest thread after ten seconds."""
    model = Model(
        monkeypatch,
        lambda threads, size, now: (
            0.016 / threads if now < 10 else 0.016 / threads + 0.02 * (threads - 1)
        ),
    )
    assert model.run(9) < 1.2
    model.run(8)
    assert model.run(30) < 1.12


def test_a_worker_uses_no_more_threads_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, large)
    model.run(2)
    model.tuning.set_cores(2)
    model.run(0.1)
    assert model.threads == 2
    model.tuning.set_cores(8)
    model.run(9)
    assert model.threads == 8


def test_a_single_core_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, large, share=1)
    model.run(10)
    assert model.calls == 0


def test_without_tuning_a_new_share_applies_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(monkeypatch, large, tunes=False)
    model.tuning.set_cores(3)
    assert model.threads == 3


def test_compiled_models_and_handlers_that_set_threads_are_not_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(monkeypatch, small)
    dynamo = types.SimpleNamespace(counters={"frames": {"total": 1, "ok": 1}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)  # type: ignore[arg-type]  # as a module
    model.run(5)
    model.tuning.set_cores(2)
    model.run(1)
    assert model.calls == 0
    assert make_tuning(3, is_tuning=True) is None
