"""The rounds, in which one server at a time gets load, and their results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import machine, openloop, wrk
from benchmarks.peers.field import Contender
from tsx_cli.common.failure import CliError

CONNECTIONS = (1, 16, 64, 256)
LEVELS = (50, 80, 100, 150)  # percent of a server's closed-loop rate
OPEN_CONNECTIONS = 256
BARE = Path(__file__).with_name("bare.py")


class Point(NamedTuple):
    """The figures of a round, or the medians of several rounds."""

    rate: float  # requests/s
    p50: float  # ms
    p99: float  # ms
    cpu: float  # front end's microseconds per request


class Key(NamedTuple):
    workload: str
    peer: str
    connections: int


class OpenKey(NamedTuple):
    workload: str
    peer: str
    level: int
    arrivals: str


class Workload(NamedTuple):
    name: str
    model: str
    size: int | None  # bytes of the body; None: the model's sample
    text: str


WORKLOADS = (
    Workload("ok", "ok", None, "a handler that answers OK, bodies of 7 bytes"),
    Workload("ok-128k", "ok", 128 * 1024, "a handler that answers OK, bodies of 128 KiB"),
    Workload("mlp", "mlp", None, "three layers on 784 floats, raw float32"),
    Workload("image", "image", None, "a small convolutional network on a JPEG"),
    Workload(
        "transformer", "transformer", None, "a small transformer encoder on 32 tokens, raw int64"
    ),
)


@dataclass
class Results:
    closed: dict[Key, list[Point]] = field(default_factory=dict)
    opened: dict[OpenKey, list[openloop.Result]] = field(default_factory=dict)
    # Requests/s of the handler in a plain loop.
    bare: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def medians(self) -> dict[Key, Point]:
        """Return the medians of the points at which no round failed."""
        return {
            key: Point(*(machine.median(column) for column in zip(*rounds, strict=True)))
            for key, rounds in self.closed.items()
            if key not in self.failed
        }

    def bare_medians(self) -> dict[str, float]:
        return {workload: machine.median(rounds) for workload, rounds in self.bare.items()}

    def capacity(self, workload: str, peer: str) -> float | None:
        """Return a server's highest closed-loop rate with any number of connections."""
        return max(
            (point.rate for key, point in self.medians().items() if key[:2] == (workload, peer)),
            default=None,
        )


def closed_round(
    contender: Contender,
    workload: Workload,
    body: Path,
    connections: int,
    seconds: float,
    results: Results,
) -> str:
    """Measure a round, store it in the results, and return a line about it."""
    key = Key(workload.name, contender.name, connections)
    try:
        with contender.turn():
            start_cpu_s = contender.cpu_seconds()
            load = wrk.load(contender.url, connections, seconds, body)
            cpu = (contender.cpu_seconds() - start_cpu_s) * 1e6 / load.requests
    except (wrk.NotAnswered, psutil.Error) as error:
        results.failed[key] = str(error)
        return f"{contender.name}: {error}"
    results.closed.setdefault(key, []).append(Point(load.rate, load.p50, load.p99, cpu))
    return f"{contender.name} {load.rate:,.0f}/s"


def open_round(
    contender: Contender,
    workload: Workload,
    body: Path,
    level: int,
    arrivals: str,
    seconds: float,
    results: Results,
) -> str:
    capacity = results.capacity(workload.name, contender.name)
    if capacity is None:
        return f"{contender.name}: no capacity is known"
    try:
        with contender.turn():
            result = openloop.run(
                *(contender.url, capacity * level / 100, seconds, OPEN_CONNECTIONS, body),
                poisson=arrivals == "Poisson",
                headers=["Content-Type: application/octet-stream"],
            )
    except (CliError, psutil.Error):
        results.left_out[f"{contender.name} (open loop, {workload.name}, {level} %)"] = (
            "it took no connections"
        )
        return f"{contender.name}: no open loop"
    results.opened.setdefault(OpenKey(workload.name, contender.name, level, arrivals), []).append(
        result
    )
    return f"{contender.name} {result.goodput:,.0f}/s" + (" (generator)" if result.limited else "")


def bare_round(model: Path, body: Path, seconds: float) -> tuple[object, float]:
    """Return the handler's answer to the body, and its requests/s in a plain loop."""
    output = subprocess.run(
        [sys.executable, BARE, model, body, str(seconds)], check=True, stdout=subprocess.PIPE
    ).stdout
    result = json.loads(output)
    return result["answer"], result["rate"]


def rounds(
    workloads: Sequence[tuple[Workload, Path]],
    contenders: Sequence[Contender],
    model: Path,
    count: int,
    seconds: float,
    results: Results,
) -> Iterator[str]:
    """Measure closed loops on servers of the same model; yield a line after each turn."""
    for number in range(1, count + 1):
        for workload, body in workloads:
            # Without a server, the rate of a handler that does nothing is meaningless.
            if workload.model != "ok":
                results.bare.setdefault(workload.name, []).append(
                    bare_round(model, body, seconds)[1]
                )
            for connections in CONNECTIONS:
                texts = [
                    closed_round(contender, workload, body, connections, seconds, results)
                    for contender in contenders
                ]
                yield f"{workload.name}, {connections} connections, round {number}: " + ", ".join(
                    texts
                )


def open_rounds(
    workloads: Sequence[tuple[Workload, Path]],
    contenders: Sequence[Contender],
    arrivals: Sequence[str],
    count: int,
    seconds: float,
    results: Results,
) -> Iterator[str]:
    for number in range(1, count + 1):
        for workload, body in workloads:
            for level in LEVELS:
                for arrival_kind in arrivals:
                    texts = [
                        open_round(contender, workload, body, level, arrival_kind, seconds, results)
                        for contender in contenders
                    ]
                    yield (
                        f"{workload.name}, {arrival_kind} arrivals at {level} %, round {number}: "
                        + ", ".join(texts)
                    )
