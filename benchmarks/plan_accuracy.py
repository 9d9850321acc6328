"""Whether `tsx plan` tells the truth: p50 and p99 by simulation beside those of a real server under the same open-loop load.

    python benchmarks/plan_accuracy.py [--model steady] [--seconds 10] [--rounds 3] [--loads 0.3,0.5,0.7] [--json FILE]

The curve t(n) of a handler is measured in a worker of its own. Each configuration is served by the real runtime. A closed loop tells
what it does at most, and one request at a time on one worker what the server adds, as every `tsx bench` measures both. Then requests
come by chance (Poisson) at shares of the most, in rounds, medians of which are compared. What was promised: p50 and p99 agree within 15 %.

`steady` waits as long as its batch tells, so that what differs is the simulation's fault alone. `convolution` computes on the processor,
and its times follow whatever else the machine does: at 70 % of the most, a tenth more of work is a third more of latency. Short rounds
prove little: the p99 of a few hundred requests, in queues that come and go, is a matter of chance.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import machine
import servers
from models import convolution, steady

from tsx_archiver import open_archive
from tsx_cli.bench.configuration import Configuration
from tsx_cli.bench.curve import measure_curve
from tsx_cli.bench.payloads import Payload
from tsx_cli.bench.planning import REQUESTS, Replica, Seen, fitted, served
from tsx_cli.bench.predict import timing_of
from tsx_cli.bench.results import Curve, Offered, Round
from tsx_cli.bench.simulate import poisson
from tsx_cli.bench.trial import Sampled, Servers, Target
from tsx_runtime.core.devices import cpu_count
from tsx_runtime.core.queue import Limits

PROMISED = 0.15
LOADS = "0.3,0.5,0.7"  # of what the configuration can do
SIZES = (1, 2, 4, 8)
BUDGET = 10.0  # seconds for the curve
CONFIGURATIONS = tuple(Configuration(threads=1, workers=workers, batch_size=size) for workers, size in ((1, 1), (1, 8), (2, 4)))
MODELS = {"steady": steady, "convolution": convolution}


class Row(NamedTuple):
    configuration: str
    rate: float
    p50_ms: float
    p50_told_ms: float
    p99_ms: float
    p99_told_ms: float
    limited: str | None

    @property
    def errors(self) -> tuple[float, float]:
        return self.p50_told_ms / self.p50_ms - 1, self.p99_told_ms / self.p99_ms - 1


def rows_of(archive: Path, payloads: Sequence[Payload], options: argparse.Namespace, noise: machine.Noise) -> list[Row]:
    curve = measure_curve(archive, Configuration(threads=1), SIZES, payloads, budget_seconds=BUDGET)
    times = ", ".join(f"{point.batch_size}: {point.median_ms:.1f} ms" for point in curve.points)
    print(f"t(n): {times}, spread {curve.spread:.0%}")
    found = []
    with open_archive(archive) as opened:
        running = Servers(Target(opened, payloads, options.seconds))
        try:
            alone = running.get(CONFIGURATIONS[0]).load(Offered(connections=1))
            for configuration in CONFIGURATIONS:
                candidate = running.get(configuration)
                best = candidate.load(Offered(connections=(configuration.workers + 1) * configuration.batch_size))
                replica = calibrated(curve, configuration, best, alone)
                for load in map(float, options.loads.split(",")):
                    rate = load * best.round.throughput
                    offered = Offered(mode="open", rate=rate, arrivals="poisson")
                    found.append(row(replica, rate, [candidate.load(offered).round for _ in range(options.rounds)]))
                    noise.sample()
        finally:
            running.close()
    return found


def calibrated(curve: Curve, configuration: Configuration, best: Sampled, alone: Sampled) -> Replica:
    timing = timing_of(curve)
    assert timing is not None
    replica = Replica(timing, configuration, cpu_count(), Limits(max_items=configuration.batch_size))
    connections = (configuration.workers + 1) * configuration.batch_size
    found = fitted(replica, seen(connections, best.round), seen(1, alone.round), alone.stages.transport_ms)
    told = f"{configuration}: {best.round.throughput:.0f} requests/s by {connections} connections, {found.scale:.2f} times its curve; "
    told += f"{found.cold_ms:.1f} ms more on an idle worker, {found.overhead_ms:.1f} ms outside, spread {found.timing.spread:.0%}"
    print(told, file=sys.stderr)
    return found


def seen(connections: int, told: Round) -> Seen:
    return Seen(Offered(connections=connections), told.throughput, told.latency.p50_ms, told.latency.p99_ms)


def row(replica: Replica, rate: float, rounds: list[Round]) -> Row:
    told = served(replica, poisson(rate, REQUESTS, seed=1), seed=1)
    p50, p99 = (median(getattr(each.latency, name) for each in rounds) for name in ("p50_ms", "p99_ms"))
    limited = next((each.generator.limited for each in rounds if each.generator.limited), None)
    return Row(str(replica.configuration), rate, p50, told.p50_ms, p99, told.p99_ms, limited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="steady")
    parser.add_argument("--seconds", type=float, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default=LOADS, help="shares of what a configuration can do")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    print(machine.describe())
    if busy := machine.busy_before():
        print(busy)
    noise = machine.Noise()
    noise.sample()
    handler = Path(__file__).parent / "models" / f"{options.model}.py"
    with tempfile.TemporaryDirectory() as place:
        archive = servers.archive(Path(place), options.model, "--handler", handler, config={})
        rows = rows_of(archive, [Payload(MODELS[options.model].sample(), "application/octet-stream")], options, noise)
    print(noise)
    print(f"{'configuration':<32}{'rate':>7}{'p50':>9}{'told':>9}{'':>7}{'p99':>9}{'told':>9}")
    for each in rows:
        first, second = each.errors
        print(
            f"{each.configuration:<32}{each.rate:>7.0f}{each.p50_ms:>9.1f}{each.p50_told_ms:>9.1f}{first:>+7.0%}"
            f"{each.p99_ms:>9.1f}{each.p99_told_ms:>9.1f}{second:>+7.0%}{'  the generator: ' + each.limited if each.limited else ''}"
        )
    worst = [max(map(abs, each.errors)) for each in rows]
    print(f"{sum(error <= PROMISED for error in worst)} of {len(rows)} within {PROMISED:.0%} in both; the worst is {max(worst):.0%} off")
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in rows], indent=1))


if __name__ == "__main__":
    main()
