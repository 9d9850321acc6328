"""A simulated machine for `tsx bench`: servers are formulas, and the clock is a number.

The search, the final comparison and the noise detection are real. The speed of each configuration
on the quiet machine is known, so that tests can judge the choice.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tsx_archiver import ModelConfig
from tsx_cli.bench.commands.progress import Progress
from tsx_cli.bench.commands.run import Bench
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import (
    Accuracy,
    Curve,
    CurvePoint,
    Environment,
    Inputs,
    Latency,
    ModelInfo,
    Noise,
    OfferedLoad,
    Results,
    Round,
    Stages,
)
from tsx_cli.bench.report.journal import Journal
from tsx_cli.bench.search.confirm import ROUND_OVERHEAD_S
from tsx_cli.bench.search.options import BenchOptions, configurations
from tsx_cli.bench.search.predict import predict
from tsx_cli.bench.search.trial import LoadMeasurement

CORES = 2
DETECTOR = Path(__file__).parents[2] / "docs" / "reference" / "bench" / "detector"
LOADING, STARTING, STEP = 2.5, 3.0, 0.25  # seconds
GRID = BenchOptions(slo="p99<100ms", workers="1..16", precisions="fp32,bf16")
Others = Callable[[float], float]  # the cores that other processes use at a time in seconds


def quiet(now: float) -> float:
    return 0.0


def hog(now: float) -> float:
    return 1.0


def bursts(seed: int) -> Others:
    """Return other processes that use half of the machine or all of it for 2 to 8 seconds.

    The pauses between them last 5 to 30 seconds.
    """
    random_source, periods, time = random.Random(seed), [], 0.0
    while time < 4000:
        time += random_source.uniform(5, 30)
        periods.append((time, time + random_source.uniform(2, 8), random_source.choice([1.0, 2.0])))
        time = periods[-1][1]
    return lambda now: next((cores for begin, end, cores in periods if begin <= now < end), 0.0)


@dataclass
class SimulatedMachine:
    """A machine that slows down by the fraction `drift` and recovers, every ten minutes."""

    seed: int
    other_cores: Others = quiet
    drift: float = 0.0
    bound_ms: float = 100.0
    now: float = 0.0
    running: set[Configuration] = field(default_factory=set)
    log: list[tuple[float, Configuration, OfferedLoad]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        model = random.Random(self.seed + 1000)
        self.first, self.each = model.uniform(1, 6), model.uniform(3, 8)
        self.half, self.parallel = model.uniform(0.5, 0.95), model.uniform(0.55, 0.8)
        self.space = configurations(GRID, ModelConfig(), CORES, 0)
        self.errors = {
            configuration: math.exp(model.gauss(0, 0.05)) for configuration in self.space
        }

    def curve(self, precision: str, threads: int | None) -> Curve:
        """Return the times of a single worker on the quiet machine."""
        is_single = threads == 1
        share = (1.0 if is_single else self.parallel) * (self.half if precision == "bf16" else 1.0)
        times = {size: share * (self.first + self.each * size) for size in (1, 2, 4, 8, 16, 32)}
        points = [
            CurvePoint(
                batch_size=size,
                median_ms=ms,
                low_ms=0.97 * ms,
                high_ms=1.03 * ms,
                samples=20,
                cpu_ms=ms * (1 if is_single else CORES),
            )
            for size, ms in times.items()
        ]
        return Curve(precision=precision, threads=threads, points=points, spread=0.05)

    def truth(self, configuration: Configuration, offered: OfferedLoad) -> tuple[float, float]:
        """Return responses per second and p99 on the quiet machine.

        With more workers than cores, the tail of the latencies is longer.
        """
        curve = self.curve(configuration.precision, configuration.threads_per_worker(CORES))
        prediction, error = (
            predict(curve, configuration, offered, 0.5, CORES),
            self.errors.get(configuration, 1.0),
        )
        tail_factor = 1 + 0.12 * max(
            0.0, min(configuration.workers, offered.connections) / CORES - 1
        )
        return (
            prediction.throughput * error,
            prediction.p99_ms / error * tail_factor if math.isfinite(prediction.p99_ms) else 5000.0,
        )

    def best(self, configuration: Configuration) -> float:
        loads = [
            self.truth(configuration, OfferedLoad(connections=connections))
            for connections in (*range(1, 24), *range(24, 140, 4))
        ]
        return max((rate for rate, p99 in loads if p99 <= self.bound_ms), default=0.0)

    def share(self, configuration: Configuration) -> float:
        """Return the fraction of its cores that a server gets now.

        The kernel divides the cores among all ready threads.
        """
        ready = configuration.workers * configuration.threads_per_worker(CORES)
        used_cores, other_cores = min(ready, CORES), self.other_cores(self.now)
        return min(
            1.0, max(CORES - other_cores, CORES * ready / (ready + other_cores)) / used_cores
        )

    def passes(self, seconds: float, configuration: Configuration) -> list[float]:
        """Let time pass, and return the fraction of each step."""
        shares = []
        for _ in range(max(1, round(seconds / STEP))):
            shares.append(
                self.share(configuration)
                * (1 - self.drift * math.sin(self.now / 600 * math.pi) ** 2)
            )
            self.now += STEP
        return shares

    def load(
        self, configuration: Configuration, offered: OfferedLoad, seconds: float
    ) -> LoadMeasurement:
        self.log.append((self.now, configuration, offered))
        self.now += ROUND_OVERHEAD_S
        shares = self.passes(2 * seconds, configuration)
        rate, p99 = self.truth(configuration, offered)
        mean = sum(shares) / len(shares)
        if offered.mode == "closed" or rate > (offered.rate or 0.0):
            rate *= mean * math.exp(self.chance.gauss(0, 0.015))
        p99 *= math.exp(abs(self.chance.gauss(0, 0.06))) / sorted(shares)[len(shares) // 20]
        answers = max(20, round(rate * 2 * seconds))
        tail = max(1, round(0.015 * answers))
        latency = Latency(
            mean_ms=0.6 * p99,
            p50_ms=0.6 * p99,
            p90_ms=0.8 * p99,
            p95_ms=0.9 * p99,
            p99_ms=p99,
            p999_ms=p99,
            max_ms=p99,
        )
        histogram = [(0.6 * p99, answers - tail), (p99, tail)]
        measured_round = Round(
            seconds=2 * seconds,
            sent=answers,
            ok=answers,
            throughput=rate,
            latency=latency,
            histogram=histogram,
        )
        return LoadMeasurement(measured_round, Stages(), {}, [])

    def time_curve(
        self,
        archive: object,
        configuration: Configuration,
        sizes: Sequence[int],
        payloads: object,
        **budget: float,
    ) -> Curve:
        self.now += LOADING
        curve = self.curve(configuration.precision, configuration.threads)
        for point in list(curve.points):
            shares = sorted(self.passes(0.5 * budget["budget_seconds"] / len(sizes), configuration))
            slow = [
                point.median_ms / share * math.exp(self.chance.gauss(0, 0.02)) for share in shares
            ]
            point.median_ms = slow[len(slow) // 2]
            point.low_ms, point.high_ms = min(slow), max(slow)
            if point.median_ms > budget["most_ms"]:
                curve.points = [
                    entry for entry in curve.points if entry.batch_size <= point.batch_size
                ]
                break
        return curve


class RecordedMachine(SimulatedMachine):
    """The 72 measured configurations of docs/reference/bench/detector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        curves = json.loads((DETECTOR / "results.json").read_text())["curves"]
        self.curves = [Curve.model_validate(curve) for curve in curves]
        self.ratios: dict[Configuration, tuple[float, float]] = {}
        for row in json.loads((DETECTOR / "exhaustive.json").read_text())["rows"]:
            configuration = Configuration(
                **{name: row[name] for name in Configuration().as_json() if name in row}
            )
            if row["load"] is None:  # The limit of the recording was exceeded at every load.
                self.ratios[configuration] = 0.5, 2.0
                continue
            offered = OfferedLoad(connections=int(row["load"].split()[0]))
            prediction = predict(self._of(configuration), configuration, offered, 0.5, CORES)
            self.ratios[configuration] = (
                row["throughput"] / prediction.throughput,
                row["p99_ms"] / prediction.p99_ms,
            )

    def curve(self, precision: str, threads: int | None) -> Curve:
        curve = next(
            curve
            for curve in self.curves
            if curve.precision == precision and curve.threads == threads
        )
        return curve.model_copy(deep=True)

    def truth(self, configuration: Configuration, offered: OfferedLoad) -> tuple[float, float]:
        prediction = predict(self._of(configuration), configuration, offered, 0.5, CORES)
        rate, tail = self.ratios.get(configuration, (0.9, 1.5))
        return prediction.throughput * rate, prediction.p99_ms * tail

    def _of(self, configuration: Configuration) -> Curve:
        return self.curve(
            configuration.precision, 1 if configuration.threads_per_worker(CORES) == 1 else None
        )


class _Watch:
    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self.noise = Noise()

    def __enter__(self) -> _Watch:
        self._began = self._machine.now
        return self

    def __exit__(self, *error: object) -> None:
        """Sum the fractions of the configuration that was measured last."""
        machine, end = self._machine, self._machine.now
        configuration = machine.log[-1][1] if machine.log else Configuration()
        ready, steps, cores, other_core_sum, waiting = (
            configuration.workers * configuration.threads_per_worker(CORES),
            0,
            0.0,
            0.0,
            0.0,
        )
        machine.now = self._began
        while machine.now < end:
            server_cores = machine.share(configuration) * min(ready, CORES)
            cores, other_core_sum = (
                cores + server_cores,
                other_core_sum + min(machine.other_cores(machine.now), CORES - server_cores),
            )
            waiting += ready + machine.other_cores(machine.now) > CORES
            machine.now, steps = machine.now + STEP, steps + 1
        machine.now, steps = end, max(1, steps)
        self.noise = Noise(
            cores=cores / steps,
            others=other_core_sum / steps,
            busiest="stress",
            cpu_pressure=waiting / steps,
            probe=1.0,
        )


class _Candidate:
    start = None

    def __init__(self, machine: SimulatedMachine, configuration: Configuration) -> None:
        self.configuration, self._machine = configuration, machine

    def load(
        self, offered: OfferedLoad, on_progress: object = None, *, seconds: float
    ) -> LoadMeasurement:
        return self._machine.load(self.configuration, offered, seconds)


class _Servers:
    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def get(self, configuration: Configuration, *, keep_others: bool = False) -> _Candidate:
        if not keep_others:
            self._machine.running &= {configuration}
        if configuration not in self._machine.running:
            self._machine.now += STARTING
        self._machine.running.add(configuration)
        return _Candidate(self._machine, configuration)

    def __contains__(self, configuration: Configuration) -> bool:
        return configuration in self._machine.running

    def end(self, configuration: Configuration) -> None:
        self._machine.running.discard(configuration)

    def close(self) -> None:
        self._machine.running.clear()


class _Guard:
    note = None

    def learn(self, candidate: object) -> None:
        pass

    def compare(self, candidate: object) -> Accuracy:
        return Accuracy(same=True)


def search(machine: SimulatedMachine, seconds: float, directory: Path, **options: Any) -> Results:
    """Run `tsx bench` on a machine for `seconds` of simulated time."""
    directory.mkdir(parents=True, exist_ok=True)
    results = Results(
        started="now",
        model=ModelInfo(name="m"),
        slo=f"p99<{machine.bound_ms:g}ms",
        environment=Environment(fingerprint="f", cores=CORES),
        inputs=Inputs(source="a", count=1),
    )
    archive = SimpleNamespace(config=ModelConfig())
    target = cast(
        Any,
        SimpleNamespace(
            archive=archive,
            payloads=[],
            seconds=3.0,
            name="m",
            warm_up="auto",
            seed=0,
            takes_batches=True,
        ),
    )
    bench_options = replace(GRID, slo=f"p99<{machine.bound_ms:g}ms", **options)
    journal = Journal(directory, new=True)
    bench = Bench(
        bench_options,
        target,
        results,
        journal,
        Progress(math.inf, quiet=True),
        seconds,
        clock=lambda: machine.now,
    )
    bench.servers, bench.guard = cast(Any, _Servers(machine)), cast(Any, _Guard())
    bench.time_curve, bench.watch = machine.time_curve, cast(Any, lambda probes: _Watch(machine))
    try:
        bench.run()
    finally:
        journal.close()
    return results
