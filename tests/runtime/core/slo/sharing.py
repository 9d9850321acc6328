"""Simulates models with latency targets that share a device, by several rules of who is next."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from tests.runtime.core.slo.simulation import Case
from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.slo.arbitration import Claim, expected_wait, turn_order
from tsx_runtime.core.slo.control import HeldBatches, SloControl
from tsx_runtime.core.slo.curve import LatencyCurve

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
        self.offered = self.accepted = self.kept = 0

    def claim(self, arrived: float) -> Claim:
        return Claim(arrived, self.case.bound, self.control.ahead(max(1, len(self.waiting))))

    def next_batch(self, now: float) -> Claim:
        return Claim(now, self.case.bound, self.control.aim.ahead)

    def end(self, now: float) -> float:
        return self.control.end(
            HeldBatches(self.began, [len(self.batch)] if self.batch else []), now
        )


class SharedDevice:
    def __init__(self, cases: Sequence[Case], rule: str, seconds: float) -> None:
        self.models = [SharingModel(case, seconds) for case in cases]
        self.rule = rule
        self.now = 0.0
        self.end = min(model.arrivals[-1] for model in self.models)

    def run(self) -> list[SharingModel]:
        coming = [(model.arrivals[0], place, 0) for place, model in enumerate(self.models)]
        heapq.heapify(coming)
        while True:
            running = [model for model in self.models if model.batch]
            slower = 1 if self.rule == "shares" else len(running)
            first = min(running, key=lambda model: model.left, default=None)
            arrival = coming[0][0] if coming else math.inf
            if first is not None and self.now + first.left * slower <= arrival:
                self._pass(running, first.left, slower)
                self._finish(first)
            elif arrival > self.end:
                return self.models
            else:
                self._pass(running, (arrival - self.now) / max(1, slower), max(1, slower))
                self.now, place, number = heapq.heappop(coming)
                self._arrive(self.models[place])
                if number + 1 < len(self.models[place].arrivals):
                    heapq.heappush(
                        coming, (self.models[place].arrivals[number + 1], place, number + 1)
                    )

    def _pass(self, running: list[SharingModel], work: float, slower: int) -> None:
        for model in running:
            model.left -= work
        self.now += work * slower

    def _finish(self, model: SharingModel) -> None:
        batch, model.batch = model.batch, []
        late = bisect_left(batch, self.now - model.case.bound)
        model.control.learn(len(batch), self.now - model.began, self.now, 1, late)
        if self.now > self.end / 4:
            model.accepted += len(batch)
            model.kept += len(batch) - late
        for each in self.models:
            each.control.changed()
        self._start()

    def _arrive(self, model: SharingModel) -> None:
        model.control.offered()
        model.offered += self.now > self.end / 4
        outlook = (
            (lambda now: self._outlook(model, now))
            if self.rule == "deadline"
            else (lambda now: (now, 0.0))
        )
        held = HeldBatches(model.began, [len(model.batch)] if model.batch else [])
        if model.control.admits(model.waiting, [held], self.now, outlook=outlook):
            model.waiting.append(self.now)
            self._start()

    def _outlook(self, model: SharingModel, now: float) -> tuple[float, float]:
        others = [each for each in self.models if each is not model]
        start = max([each.end(now) for each in others if each.batch], default=now)
        waiting = [each.claim(each.waiting[0]) for each in others if each.waiting]
        idle = [each.next_batch(now) for each in others if not each.waiting]
        between = sum(each.control.aim.ahead for each in others if each.batch or each.waiting)
        if not waiting and not any(each.batch for each in others):
            return now, between
        return start + expected_wait(
            model.next_batch(now), waiting, idle, max(each.control.caution for each in self.models)
        ), between

    def _start(self) -> None:
        while ready := [model for model in self.models if model.waiting and not model.batch]:
            if self.rule == "deadline" and any(model.batch for model in self.models):
                return
            claims = [model.claim(model.waiting[0]) for model in ready]
            keys = (
                turn_order(claims, self.now)
                if self.rule == "deadline"
                else [claim.arrived for claim in claims]
            )
            model = ready[keys.index(min(keys))]
            size = model.control.batch_size(model.waiting, self.now, 1024)
            model.batch = model.waiting[:size]
            del model.waiting[:size]
            model.began = self.now
            model.left = model.service(len(model.batch), self.now) * (
                len(self.models) if self.rule == "shares" else 1
            )
            model.control.sent(len(model.batch), cut=False)


def fleet(load: float, seed: int) -> list[Case]:
    """Two to four models with bounds from 50 to 500 ms, which together have `load` times what the
    device can do.
    """
    chance = np.random.default_rng(seed)
    count = int(chance.choice([2, 3, 4]))
    cases = []
    for number in range(count):
        bound = float(chance.choice([0.05, 0.1, 0.2, 0.5]))
        first = bound / float(chance.uniform(8, 20))
        each = first * float(chance.uniform(0.02, 0.5))
        cases.append(Case("affine", first, each, 1024, bound, 1, load / count, seed * 10 + number))
    return cases
