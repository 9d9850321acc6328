"""A simulation of models with latency targets that share a device under several rules."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from tests.runtime.features.slo.simulation import Case
from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.models.latency_curve import LatencyCurve
from tsx_runtime.features.slo.arbitration import Claim, expected_wait, turn_order
from tsx_runtime.features.slo.control import SloControl, WorkerBatches

QUANTILE = 0.99


class SharingModel:
    def __init__(self, case: Case, seconds: float) -> None:
        self.case = case
        self.control = SloControl(LatencyTarget("", QUANTILE, case.bound), LatencyCurve(QUANTILE))
        self.service = case.service()
        self.arrivals = case.arrivals(int(case.rate * seconds))
        self.waiting: list[float] = []
        self.batch: list[float] = []
        self.began = self.left = 0.0  # seconds of work
        self.offered = self.accepted = self.in_time = 0

    def claim(self, arrived: float) -> Claim:
        return Claim(
            arrived, self.case.bound, self.control.next_duration(max(1, len(self.waiting)))
        )

    def next_batch(self, now: float) -> Claim:
        return Claim(now, self.case.bound, self.control.aim.duration)

    def end(self, now: float) -> float:
        return self.control.end(
            WorkerBatches(self.began, [len(self.batch)] if self.batch else []), now
        )


class SharedDevice:
    def __init__(self, cases: Sequence[Case], rule: str, seconds: float) -> None:
        self.models = [SharingModel(case, seconds) for case in cases]
        self.rule = rule
        self.now = 0.0
        self.end = min(model.arrivals[-1] for model in self.models)

    def run(self) -> list[SharingModel]:
        upcoming = [(model.arrivals[0], index, 0) for index, model in enumerate(self.models)]
        heapq.heapify(upcoming)
        while True:
            busy_models = [model for model in self.models if model.batch]
            slowdown = 1 if self.rule == "shares" else len(busy_models)
            first = min(busy_models, key=lambda model: model.left, default=None)
            arrival = upcoming[0][0] if upcoming else math.inf
            if first is not None and self.now + first.left * slowdown <= arrival:
                self._pass(busy_models, first.left, slowdown)
                self._finish(first)
            elif arrival > self.end:
                return self.models
            else:
                self._pass(busy_models, (arrival - self.now) / max(1, slowdown), max(1, slowdown))
                self.now, index, number = heapq.heappop(upcoming)
                self._arrive(self.models[index])
                if number + 1 < len(self.models[index].arrivals):
                    heapq.heappush(
                        upcoming, (self.models[index].arrivals[number + 1], index, number + 1)
                    )

    def _pass(self, busy_models: list[SharingModel], work_seconds: float, slowdown: int) -> None:
        for model in busy_models:
            model.left -= work_seconds
        self.now += work_seconds * slowdown

    def _finish(self, model: SharingModel) -> None:
        batch, model.batch = model.batch, []
        late_count = bisect_left(batch, self.now - model.case.bound)
        model.control.learn(len(batch), self.now - model.began, self.now, 1, late_count)
        if self.now > self.end / 4:
            model.accepted += len(batch)
            model.in_time += len(batch) - late_count
        for sharer in self.models:
            sharer.control.invalidate()
        self._start()

    def _arrive(self, model: SharingModel) -> None:
        model.control.count_arrival()
        model.offered += self.now > self.end / 4
        outlook = (
            (lambda now: self._outlook(model, now))
            if self.rule == "deadline"
            else (lambda now: (now, 0.0))
        )
        held_batches = WorkerBatches(model.began, [len(model.batch)] if model.batch else [])
        if model.control.admits(model.waiting, [held_batches], self.now, outlook=outlook):
            model.waiting.append(self.now)
            self._start()

    def _outlook(self, model: SharingModel, now: float) -> tuple[float, float]:
        other_models = [peer for peer in self.models if peer is not model]
        start = max([peer.end(now) for peer in other_models if peer.batch], default=now)
        waiting_claims = [peer.claim(peer.waiting[0]) for peer in other_models if peer.waiting]
        idle_claims = [peer.next_batch(now) for peer in other_models if not peer.waiting]
        between = sum(
            peer.control.aim.duration for peer in other_models if peer.batch or peer.waiting
        )
        if not waiting_claims and not any(peer.batch for peer in other_models):
            return now, between
        return start + expected_wait(
            model.next_batch(now),
            waiting_claims,
            idle_claims,
            max(sharer.control.caution for sharer in self.models),
        ), between

    def _start(self) -> None:
        while ready_models := [model for model in self.models if model.waiting and not model.batch]:
            if self.rule == "deadline" and any(model.batch for model in self.models):
                return
            claims = [model.claim(model.waiting[0]) for model in ready_models]
            keys = (
                turn_order(claims, self.now)
                if self.rule == "deadline"
                else [claim.arrived for claim in claims]
            )
            model = ready_models[keys.index(min(keys))]
            size = model.control.batch_size(model.waiting, self.now, 1024)
            model.batch = model.waiting[:size]
            del model.waiting[:size]
            model.began = self.now
            model.left = model.service(len(model.batch), self.now) * (
                len(self.models) if self.rule == "shares" else 1
            )
            model.control.sent(len(model.batch), cut=False)


def fleet(load: float, seed: int) -> list[Case]:
    """Draw two to four models with latency bounds from 50 to 500 ms.

    Their total load is `load` times the capacity of the device.
    """
    random = np.random.default_rng(seed)
    count = int(random.choice([2, 3, 4]))
    cases = []
    for number in range(count):
        bound = float(random.choice([0.05, 0.1, 0.2, 0.5]))
        first = bound / float(random.uniform(8, 20))
        further = first * float(random.uniform(0.02, 0.5))
        cases.append(
            Case("affine", first, further, 1024, bound, 1, load / count, seed * 10 + number)
        )
    return cases
