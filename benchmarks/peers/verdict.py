"""The goals of tsx relative to each peer, which pure functions check with the medians."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.peers.measure import CONNECTIONS, WORKLOADS, Key, Point

ALL = tuple(workload.name for workload in WORKLOADS)
BARE = "bare loop"
BARE_SHARE = 0.95


class Promise(NamedTuple):
    """A goal: at each point, tsx (or `of`) is at least `least` times as good as the peer.

    Better means more requests/s or a lower latency. A `least` of 1 means strictly better.
    """

    peer: str
    measure: str
    workloads: tuple[str, ...]
    connections: tuple[int, ...]
    least: float
    of: str = "tsx"

    def __str__(self) -> str:
        measure_name = {"rate": "requests/s", "p50": "p50", "p99": "p99"}[self.measure]
        where = "every workload" if self.workloads == ALL else " and ".join(self.workloads)
        at = (
            ""
            if self.connections == CONNECTIONS
            else f" at {' and '.join(map(str, self.connections))} connections"
        )
        better, bound = (
            ("more", f"at least {self.least:g}")
            if self.measure == "rate"
            else ("lower", f"at most {1 / self.least:g}")
        )
        prefix = "" if self.of == "tsx" else f"{self.of} beside "
        return (
            f"{prefix}{self.peer}: {where}{at}:"
            f" {f'{better} {measure_name}' if self.least == 1 else f'{bound} times the {measure_name}'}"
        )


PROMISES = (
    Promise("TorchServe", "rate", ALL, CONNECTIONS, 1),
    Promise("TorchServe", "p99", ALL, CONNECTIONS, 1),
    Promise("TorchServe", "rate", ("ok",), (16, 64, 256), 8),
    Promise("Mosec", "rate", ("ok",), (1, 16), 10),
    Promise("Mosec", "rate", ("ok",), (64, 256), 1.3),
    Promise("Mosec", "rate", ("mlp",), (1, 16), 3),
    Promise("Mosec", "rate", ("mlp",), (64, 256), 1),
    Promise("Mosec", "rate", ("ok-128k",), CONNECTIONS, 2),
    Promise("Mosec", "p50", ALL, CONNECTIONS, 1),
    Promise("Mosec", "p99", ALL, CONNECTIONS, 1),
    Promise("LitServe", "rate", ("ok",), CONNECTIONS, 20),
    Promise("tsx", "rate", ALL, CONNECTIONS, 0.8, of="tsx-torchserve"),
    Promise("TorchServe", "p99", ("ok",), CONNECTIONS, 2, of="tsx-torchserve"),
)


class Verdict(NamedTuple):
    promise: str
    state: str  # holds, falls short, or not measured
    ratio: float | None  # the worst one
    where: str
    points: int  # number of points that both servers have
    short: tuple[str, ...] = ()  # the points below the promise, with their ratios


def ratio(ours: Point, theirs: Point, measure: str) -> float:
    """Return how many times as good tsx is."""
    good, bad = (
        (ours.rate, theirs.rate)
        if measure == "rate"
        else (getattr(theirs, measure), getattr(ours, measure))
    )
    return good / bad if bad else float("inf")


def judge(promise: Promise, medians: Mapping[Key, Point], failed: Mapping[Key, str]) -> Verdict:
    """Judge a goal by its points.

    A point at which tsx failed has the ratio 0. A point at which only the peer failed is ignored.
    """
    ratios: dict[str, float] = {}
    for workload in promise.workloads:
        for connections in promise.connections:
            ours, theirs = (Key(workload, name, connections) for name in (promise.of, promise.peer))
            if ours in failed and (theirs in medians or theirs in failed):
                ratios[f"{workload} at {connections}"] = 0.0
            elif ours in medians and theirs in medians:
                ratios[f"{workload} at {connections}"] = ratio(
                    medians[ours], medians[theirs], promise.measure
                )
    return verdict(str(promise), ratios, promise.least, strict=promise.least == 1)


def judge_bare(workload: str, medians: Mapping[Key, Point], bare: Mapping[str, float]) -> Verdict:
    """Judge the highest rate of tsx, relative to that of the handler in a plain loop."""
    text = f"{BARE}: {workload}: at least {BARE_SHARE:.0%} of its requests/s"
    rates = {
        key.connections: point.rate
        for key, point in medians.items()
        if (key.workload, key.peer) == (workload, "tsx")
    }
    if not rates or workload not in bare:
        return verdict(text, {}, BARE_SHARE, strict=False)
    best = max(rates, key=lambda connections: rates[connections])
    return verdict(
        text, {f"{workload} at {best}": rates[best] / bare[workload]}, BARE_SHARE, strict=False
    )


def verdict(text: str, ratios: Mapping[str, float], least: float, *, strict: bool) -> Verdict:
    if not ratios:
        return Verdict(text, "not measured", None, "", 0)
    short = tuple(
        f"{where}: {value:.2f}"
        for where, value in ratios.items()
        if value < least or (strict and value == least)
    )
    worst_point = min(ratios, key=lambda where: ratios[where])
    return Verdict(
        text,
        "falls short" if short else "holds",
        ratios[worst_point],
        worst_point,
        len(ratios),
        short,
    )


def judge_all(
    medians: Mapping[Key, Point], failed: Mapping[Key, str], bare: Mapping[str, float]
) -> list[Verdict]:
    return [judge(promise, medians, failed) for promise in PROMISES] + [
        judge_bare(workload, medians, bare) for workload in ("image", "transformer")
    ]
