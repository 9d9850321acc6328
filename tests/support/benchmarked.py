"""Handmade results of benchmarks for the tests of reports."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.histogram import Histogram
from tsx_cli.bench.load.results import (
    Accuracy,
    ColdStart,
    Curve,
    CurvePoint,
    Environment,
    GeneratorSide,
    Inputs,
    ModelInfo,
    OfferedLoad,
    Point,
    Prediction,
    Results,
    Round,
    SizeClass,
    Stages,
    Trial,
    Usage,
)
from tsx_cli.bench.load.statistics import latency, percentile_figure, throughput


def one_round(
    rate: float,
    middle_ms: float,
    seed: int,
    *,
    errors: int = 0,
    limited: str | None = None,
) -> Round:
    """Make a round of ten seconds with latencies around `middle_ms` and a tail."""
    random_source = random.Random(seed)
    rate *= 1 + random_source.gauss(0, 0.01)
    times = Histogram()
    times.add([middle_ms / 1000 * math.exp(random_source.gauss(0, 0.35)) for _ in range(1000)])
    latency_figures = times.latency()
    answered = int(10 * rate)
    return Round(
        seconds=10,
        sent=answered + errors,
        ok=answered,
        errors={"500": errors} if errors else {},
        throughput=rate,
        latency=latency_figures,
        histogram=times.coarse(),
        over_time=[
            (
                0.5 * step,
                int(rate / 2),
                middle_ms,
                latency_figures.p99_ms * random_source.uniform(0.7, 1.1),
            )
            for step in range(-3, 21)
        ],
        by_size=[
            SizeClass(
                smallest=low,
                largest=high,
                ok=answered // 2,
                p50_ms=slow * middle_ms,
                p99_ms=slow * latency_figures.p99_ms,
            )
            for low, high, slow in (
                (8122, 9003, random_source.uniform(0.8, 0.9)),
                (9150, 12044, random_source.uniform(1.1, 1.2)),
            )
        ],
        generator=GeneratorSide(cpu=0.2, limited=limited),
    )


def point(
    connections: int, rounds: Sequence[Round], *, bound: float = math.inf, rate: float | None = None
) -> Point:
    p99_figure = percentile_figure(rounds)
    offered = (
        OfferedLoad(connections=connections)
        if rate is None
        else OfferedLoad(mode="open", connections=512, rate=rate, arrivals="poisson")
    )
    failed = sum(sum(run.errors.values()) for run in rounds) / sum(run.sent for run in rounds)
    holds = p99_figure.value <= bound and not failed
    return Point(
        offered=offered,
        throughput=throughput(rounds),
        latency=latency(rounds),
        p99_ms=p99_figure,
        error_rate=failed,
        holds=holds,
        rounds=list(rounds),
    )


def trial(
    configuration: Configuration,
    capacity: float,
    floor_ms: float,
    *,
    bound: float = 100.0,
    seed: int = 0,
    loads: Sequence[int] = (1, 2, 4, 8, 16),
) -> Trial:
    """Make a trial whose throughput approaches `capacity` as connections and latency grow."""
    points = []
    for number, connections in enumerate(loads):
        rate = capacity * connections / (connections + capacity * floor_ms / 1000)
        rounds = [
            one_round(rate, 1000 * connections / rate, seed + 10 * number + repeat)
            for repeat in range(3)
        ]
        points.append(point(connections, rounds, bound=bound))
    holding = [index for index, load_point in enumerate(points) if load_point.holds]
    best = max(holding, key=lambda index: points[index].throughput.value, default=None)
    mean = points[best or 0].latency.mean_ms
    return Trial(
        configuration=configuration.as_json(),
        points=points,
        best=best,
        stages=Stages(
            queue_ms=0.3 * mean,
            preprocess_ms=0.1 * mean,
            inference_ms=0.5 * mean,
            postprocess_ms=0.02 * mean,
            transport_ms=0.08 * mean,
        ),
        batch_sizes={size: 10 * size for size in range(1, configuration.batch_size + 1)},
        usage=[
            Usage(at_seconds=0.5 * step, cpu=1.6 + 0.2 * math.sin(step), memory_mib=800 + 4 * step)
            for step in range(21)
        ],
        starts=[
            ColdStart(ready_seconds=2.3 + 0.1 * number, first_answer_ms=3 * floor_ms)
            for number in range(2)
        ],
        accuracy=Accuracy(same=True, compared=8),
    )


def a_run(**fields: Any) -> Results:
    """Make the results of a run without trials; `fields` are those of `Results`."""
    defaults = {
        "started": "2026-11-21T10:00:00+00:00",
        "model": ModelInfo(name="m"),
        "environment": Environment(fingerprint="f"),
        "inputs": Inputs(source="a.png", count=1),
    }
    return Results(**defaults | fields)


def with_trials(results: Results, *trials: Trial, **changes: Any) -> Results:
    """Replace the trials of results by others, none of which is the winner or the baseline."""
    update = {"trials": list(trials), "winner": None, "baseline": None, **changes}
    return results.model_copy(update=update)


def results(
    *,
    slo: str | None = "p99<100ms",
    speed: float = 1.0,
    seed: int = 0,
    loads: tuple[int, ...] = (1, 2, 4, 8, 16),
) -> Results:
    """Make results of two cores: a baseline, better configurations, a failed and a predicted one."""
    return _made_results(speed, seed, loads).model_copy(deep=True, update={"slo": slo})


@cache
def _made_results(speed: float, seed: int, loads: tuple[int, ...]) -> Results:
    trials = [
        trial(Configuration(), 62 * speed, 16, seed=seed, loads=loads),
        trial(Configuration(batch_size=4), 78 * speed, 17, seed=seed + 100, loads=loads),
        trial(Configuration(workers=2, threads=1), 90 * speed, 21, seed=seed + 200, loads=loads),
        trial(
            Configuration(workers=2, threads=1, batch_size=4),
            118 * speed,
            22,
            seed=seed + 300,
            loads=loads,
        ),
        trial(
            Configuration(precision="bf16", workers=2, threads=1, batch_size=4),
            131 * speed,
            20,
            seed=seed + 400,
            loads=loads,
        ),
        trial(
            Configuration(workers=2, threads=1, batch_size=8),
            121 * speed,
            26,
            seed=seed + 500,
            loads=loads,
        ),
        Trial(
            configuration=Configuration(workers=16).as_json(),
            state="failed",
            reason="a worker died: out of memory",
        ),
        Trial(
            configuration=Configuration(workers=8).as_json(),
            state="predicted",
            reason="it could not win",
            predicted=Prediction(throughput=88, p99_ms=210),
        ),
    ]
    trials[4].accuracy = Accuracy(
        same=False,
        compared=8,
        different=3,
        worst="the answer's boxes[0] is 12.0 alone and 12.5 in bf16",
    )
    sizes = (1, 2, 4, 8, 16, 32)
    times = [6 + 9.5 * size**0.92 for size in sizes]
    curve = [
        CurvePoint(
            batch_size=size, median_ms=time, low_ms=0.97 * time, high_ms=1.04 * time, samples=20
        )
        for size, time in zip(sizes, times, strict=True)
    ]
    return Results(
        started="2026-11-21T15:00:00+00:00",
        ended="2026-11-21T15:09:41+00:00",
        command="tsx bench detector.mar --slo 'p99<100ms' --batch-sizes 1..32 --workers 1..16 --precision fp32,bf16",
        model=ModelInfo(
            name="detector", version="1.0", archive="detector.mar", sha256="9f" * 32, size_mib=3.4
        ),
        slo=None,
        environment=Environment(
            fingerprint="abc",
            cpu="AMD EPYC 7B13",
            cores=2,
            memory_mib=7956,
            system="Linux 6.1",
            python="3.11.7",
            torch="2.6.0",
            tsx="0.1.0",
            noise=0.021,
        ),
        inputs=Inputs(
            source="samples of the archive",
            count=8,
            content_types={"image/png": 8},
            smallest=8122,
            median=9003,
            largest=12044,
        ),
        curves=[
            Curve(points=curve),
            Curve(
                precision="bf16",
                points=[
                    point.model_copy(update={"median_ms": point.median_ms * 0.8}) for point in curve
                ],
            ),
        ],
        trials=trials,
        winner=3,
        baseline=0,
        why="2 workers with batches of 4 answer the most within p99<100ms; batches of 8 are no faster, and bf16 changes the answers.",
        notes=["the machine was noisy: a fixed computation varied by 2.1%"],
    )
