"""Whether `tsx plan` tells the truth: p50 and p99 by simulation beside those of a real server under the same open-loop load.

    python benchmarks/plan_accuracy.py [--model steady] [--seconds 6] [--rounds 3] [--loads 0.3,0.5,0.7,0.8] [--json FILE]

The curve t(n) of a handler is measured in a worker of its own. Each configuration is served by the real runtime. What `tsx plan` learns
from, as every `tsx bench` measures it, is a closed loop that tells what it does at most, one request at a time on one worker, and a few
requests that come by chance. Then requests come by chance (Poisson) at shares of the most. All of that goes on in turns, as a machine is
not as quick in one minute as in the next, and rounds of a load count together. What was promised: p50 and p99 agree within 15 %.

The simulation gets the very moments at which the real requests were due: the p99 of some hundred requests hangs on how those happened to
come, and a simulation of others differs from it by a third without being wrong. `by chance` says what the p99 of that many others would
be. `range` is what `tsx plan` says itself: the same if batches take as long as in the quickest and in the slowest round that it learned
from. `as it was` is the error that is left where batches take as long as the server says they did in these very rounds: the simulation's
own, without what the machine did meanwhile.

With `--bounds`, the highest rate under each bound is compared: what a plan promises, and the highest at which an open loop of the real
server keeps it in most rounds. What was promised: they agree within 10 %.

`steady` waits as long as its batch tells, so that what differs is the simulation's fault alone. `convolution` computes on the processor,
and its times follow whatever else the machine does. The exit code is 1 where a p50 or p99 is more than 15 % off and out of the range too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import machine
import servers
from models import convolution, mlp, steady, transformer

from tsx_archiver import open_archive
from tsx_cli.bench.capacity.planning import highest
from tsx_cli.bench.generator.plan import poisson as due
from tsx_cli.bench.measure.latency_curve import measure_curve
from tsx_cli.bench.measure.noise import Watch
from tsx_cli.bench.measure.trial import RunningCandidate, Servers, TrialTarget
from tsx_cli.bench.measure.variants import QUEUE
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.model.disturbance import judge
from tsx_cli.bench.model.predict import timing_of
from tsx_cli.bench.model.replica import TURNS, Replica, _in_a_row, fitted, served
from tsx_cli.bench.model.results import Curve, OfferedLoad, Round
from tsx_cli.bench.model.simulate import SimulationResult, poisson
from tsx_cli.bench.model.slo import parse_slo
from tsx_cli.bench.model.statistics import latency
from tsx_cli.bench.storage.archive_record import observation_of, quantiles_of, tells
from tsx_cli.bench.workload.payloads import Payload
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.shared.cores import cpu_count

PROMISED = 0.15
LOADS = "0.3,0.5,0.7,0.8"  # of what the configuration can do
CALM, BUSY = 0.3, 0.8  # of it: the loads that are learned from
APART = 10.0  # simulated seconds between rounds
OTHERS = 20  # times as many other arrivals
SIZES = (1, 2, 4, 8)
STRIDE = 1.2  # times the rate that is tried before, until one holds and one does not
APART_AT_MOST = 1.07  # the rates that the search ends with
BUDGET = 10.0  # seconds for the curve
CONFIGURATIONS = tuple(Configuration(threads=1, workers=workers, batch_size=size) for workers, size in ((1, 1), (1, 8), (2, 4)))
MODELS = {"steady": steady, "convolution": convolution, "mlp": mlp, "transformer": transformer}
DIGITS = Path(__file__).parents[1] / "examples" / "digits"
PROMISED_SIZES = (1, 2, 4, 8, 16, 32)


class Sent(NamedTuple):
    """One round of an open loop: when its requests were due, and what came of it."""

    due: Sequence[float]
    round: Round


class Row(NamedTuple):
    """Milliseconds; (p50, p99) each."""

    configuration: str
    load: float
    rate: float
    requests: int
    real: tuple[float, float]
    reported: tuple[float, float]
    low: tuple[float, float]
    high: tuple[float, float]
    as_it_was: tuple[float, float]
    by_chance: tuple[float, float]
    limited: str | None

    def errors(self, reported: tuple[float, float]) -> tuple[float, float]:
        return reported[0] / self.real[0] - 1, reported[1] / self.real[1] - 1

    def agrees(self, which: int) -> bool:
        return abs(self.errors(self.reported)[which]) <= PROMISED

    def ranges(self, which: int) -> bool:
        return self.low[which] * (1 - PROMISED / 3) <= self.real[which] <= self.high[which] * (1 + PROMISED / 3)


def rows_of(archive: Path, payloads: Sequence[Payload], options: argparse.Namespace, noise: machine.Noise) -> list[Row]:
    found = []
    with open_archive(archive) as opened:
        curve = measure_curve(opened, Configuration(threads=1), SIZES, payloads, budget_seconds=BUDGET)
        times = ", ".join(f"{point.batch_size}: {point.median_ms:.1f} ms" for point in curve.points)
        print(f"t(n): {times}, spread {curve.spread:.0%}")
        running = Servers(TrialTarget(opened, payloads, options.seconds, seed=options.seed, warm_up=0.0))
        try:
            for configuration in CONFIGURATIONS:
                found += in_turns(running, curve, configuration, options, noise)
        finally:
            running.close()
    return found


def in_turns(running: Servers, curve: Curve, configuration: Configuration, options: argparse.Namespace, noise: machine.Noise) -> list[Row]:
    loads = [float(each) for each in options.loads.split(",")]
    sent: dict[float, list[Sent]] = {load: [] for load in loads}

    def between(candidate: RunningCandidate, capacity: float) -> None:
        for load in loads:
            sent[load].append(open_loop(candidate, load * capacity))
            noise.sample()

    replica, capacity = learned_by(running, curve, configuration, options.rounds, between)
    return [row(replica, load, load * capacity, rounds) for load, rounds in sent.items()]


def learned_by(
    running: Servers, curve: Curve, configuration: Configuration, rounds: int, between: Callable[[RunningCandidate, float], None]
) -> tuple[Replica, float]:
    """What `tsx plan` learns, and the throughput of the closed loop; `between` is called in each turn."""
    candidate, single = running.get(configuration), running.get(CONFIGURATIONS[0], beside=True)
    most = OfferedLoad(connections=(configuration.workers + 1) * configuration.batch_size)
    candidate.load(most)  # the warm-up
    capacity = candidate.load(most).round.throughput
    single.load(OfferedLoad(connections=1))
    learned, alone, transports = [], [], []
    for _ in range(rounds):
        once = single.load(OfferedLoad(connections=1))
        alone.append(once.round)
        transports.append(once.stages.transport_ms)
        for offered in (most, at_random(CALM * capacity), at_random(BUSY * capacity)):
            found = undisturbed(candidate, offered)
            if tells(offered, found):
                learned.append(observation_of(configuration, offered, found))
        between(candidate, capacity)
    timing = timing_of(curve)
    assert timing is not None
    plain = Replica(timing, configuration, cpu_count(), BatchLimits(max_items=configuration.batch_size), QUEUE)
    replica = fitted(plain, learned, quantiles_of(alone), sum(transports) / len(transports))
    print(f"{configuration}: {learns(replica, capacity)}", file=sys.stderr)
    return replica, capacity


def undisturbed(candidate: RunningCandidate, offered: OfferedLoad) -> Round:
    """A round in which nothing else was at work, if one of two is such."""
    for _ in range(2):
        with Watch([]) as watch:
            found = candidate.load(offered).round
        if not (disturbed := judge(watch.noise, cpu_count())):
            break
        print(f"disturbed: {'; '.join(disturbed)}", file=sys.stderr)
    return found


class Promise(NamedTuple):
    """Requests per second under a bound."""

    configuration: str
    bound: str
    closed: float
    promised: float
    held: float  # the highest rate of the open loop at which the bound held

    @property
    def error(self) -> float:
        return self.promised / self.held - 1 if self.held else math.inf


def promises(
    running: Servers, curve: Curve, configuration: Configuration, options: argparse.Namespace, noise: machine.Noise
) -> list[Promise]:
    """A rate holds if its rounds together do. The search goes in strides until one holds and one does not, and then between them."""
    found = []
    replica, closed = learned_by(running, curve, configuration, options.rounds, lambda *_: None)
    candidate = running.get(configuration)
    rounds: dict[float, list[Round]] = {}
    for bound in options.bounds.split(","):
        slo = parse_slo(bound)
        promised = highest(replica, slo)
        held, broke, rate = 0.0, math.inf, 0.95 * promised
        while broke > APART_AT_MOST * held and 0.3 < rate / promised < 3:
            rate = float(f"{rate:.3g}")
            rounds[rate] = [undisturbed(candidate, at_random(rate)) for _ in range(options.rounds)]
            noise.sample()
            tails = ", ".join(f"{each.latency.p99_ms:.1f}" for each in rounds[rate])
            print(
                f"{bound} at {rate:,.0f}/s: p99 {tails} ms, {sum(each.refused for each in rounds[rate])} refused", end="", file=sys.stderr
            )
            print("; ".join(["", *{each.generator.limited for each in rounds[rate] if each.generator.limited}]), file=sys.stderr)
            refused = sum(each.refused for each in rounds[rate]) / sum(each.sent for each in rounds[rate])
            if slo.broken(latency(rounds[rate]).model_dump(), refused):
                broke = rate
            else:
                held = rate
            rate = math.sqrt(held * broke) if held and broke < math.inf else held * STRIDE or broke / STRIDE
        found.append(Promise(str(configuration), bound, closed, promised, held))
    return found


def at_random(rate: float) -> OfferedLoad:
    return OfferedLoad(mode="open", rate=rate, arrivals="poisson")


def open_loop(candidate: RunningCandidate, rate: float) -> Sent:
    seed = candidate.target.seed + candidate.rounds
    return Sent(due(rate, candidate.target.seconds, seed), candidate.load(at_random(rate)).round)


def learns(replica: Replica, capacity: float) -> str:
    low, high = (each.scale for each in replica.quickest_and_slowest)
    times = f"{replica.scale:.2f} times its curve ({low:.2f} to {high:.2f})"
    idle = f"{replica.cold_ms:.2f} ms more on a worker that has idled, {replica.wake_ms:.2f} ms on the way there"
    return f"{capacity:.0f} requests/s at most, {times}, crowded {replica.crowded:.2f}; {idle}, {replica.overhead_ms:.2f} ms outside"


def row(replica: Replica, load: float, rate: float, rounds: Sequence[Sent]) -> Row:
    span = max(each.due[-1] for each in rounds) + APART
    moments = [number * span + moment for number, each in enumerate(rounds) for moment in each.due]

    def reported(replica: Replica) -> SimulationResult:
        return served(replica, moments, seed=1, rate=rate, uncounted=0.0)

    ours = reported(replica)
    real = latency([each.round for each in rounds])
    others = served(replica, poisson(rate, OTHERS * len(moments), seed=1), seed=1)
    limited = next((each.round.generator.limited for each in rounds if each.round.generator.limited), None)
    low, high = map(reported, replica.quickest_and_slowest)
    was, loads = replica, [observation_of(replica.configuration, at_random(rate), each.round) for each in rounds]
    for _ in range(TURNS):  # with batches as long as they were, so that what is left is the simulation's own error
        was = _in_a_row(was, loads)
    return Row(
        *(str(replica.configuration), load, rate, len(moments), (real.p50_ms, real.p99_ms)),
        *(_both(each) for each in (ours, low, high, reported(was), others)),
        limited,
    )


def _both(reported: SimulationResult) -> tuple[float, float]:
    return reported.p50_ms, reported.p99_ms


def promises_of(archive: Path, payloads: Sequence[Payload], options: argparse.Namespace, noise: machine.Noise) -> list[Promise]:
    configuration = Configuration(threads=1, workers=options.workers, batch_size=PROMISED_SIZES[-1])
    with open_archive(archive) as opened:
        curve = measure_curve(opened, Configuration(threads=1), PROMISED_SIZES, payloads, budget_seconds=BUDGET / 2)
        print("t(n):", ", ".join(f"{point.batch_size}: {point.median_ms:.2f} ms" for point in curve.points), f"spread {curve.spread:.0%}")
        running = Servers(TrialTarget(opened, payloads, options.seconds, seed=options.seed, warm_up=0.0))
        try:
            return promises(running, curve, configuration, options, noise)
        finally:
            running.close()


def show_promises(found: Sequence[Promise]) -> None:
    print("| configuration | bound | closed loop/s | promised/s | held/s | |\n|---|---|---|---|---|---|")
    for each in found:
        print(f"| {each.configuration} | {each.bound} | {each.closed:,.0f} | {each.promised:,.0f} | {each.held:,.0f} | {each.error:+.0%} |")


def packed(place: Path, name: str) -> tuple[Path, Payload]:
    if name == "digits":
        files = ("--serialized-file", DIGITS / "digits.pth", "--model-file", DIGITS / "model.py", "--handler", DIGITS / "handler.py")
        image = min((DIGITS / "images").iterdir())
        more = ("--extra-files", DIGITS / "index_to_name.json")
        return servers.archive(place, name, *files, *more, config={}), Payload(image.read_bytes(), "image/png")
    handler = Path(__file__).parent / "models" / f"{name}.py"
    return servers.archive(place, name, "--handler", handler, config={}), Payload(MODELS[name].sample(), "application/octet-stream")


def show(rows: Sequence[Row]) -> bool:
    """Whether all are as promised, or within what the plan says of itself."""
    print(f"{'configuration':<24}{'load':>5}{'rate':>6}{'n':>6} |{'p50':>7}{'reported':>7}{'':>6}{'range':>14}{'as it was':>10}", end="")
    print(f" |{'p99':>7}{'reported':>7}{'':>6}{'range':>14}{'as it was':>10}{'by chance':>10}")
    for each in rows:
        print(f"{each.configuration:<24}{each.load:>5.0%}{each.rate:>6.0f}{each.requests:>6}", end="")
        for which in (0, 1):
            between = f"{each.low[which]:.1f}-{each.high[which]:.1f}"
            figures = f"{each.real[which]:>7.1f}{each.reported[which]:>7.1f}{each.errors(each.reported)[which]:>+6.0%}{between:>14}"
            print(f" |{figures}{each.errors(each.as_it_was)[which]:>+10.0%}", end="")
        print(f"{each.by_chance[1]:>10.1f}", f" the generator: {each.limited}" if each.limited else "")
    for which, name in enumerate(("p50", "p99")):
        agree = sum(each.agrees(which) for each in rows)
        else_reported = sum(each.ranges(which) and not each.agrees(which) for each in rows)
        own = sum(abs(each.errors(each.as_it_was)[which]) <= PROMISED for each in rows)
        worst = max(abs(each.errors(each.reported)[which]) for each in rows)
        print(f"{name}: {agree} of {len(rows)} within {PROMISED:.0%}, {else_reported} more within the range that the plan tells, ", end="")
        print(f"the worst {worst:.0%} off; {own} within {PROMISED:.0%} with the batches as they were")
    return all(each.agrees(which) or each.ranges(which) for each in rows for which in (0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*MODELS, "digits"), default="steady")
    parser.add_argument(
        "--bounds", help="compare the highest rate that a plan promises under each, such as p99<10ms,p99<50ms, with a real one"
    )
    parser.add_argument("--workers", type=int, default=1, help="with --bounds")
    parser.add_argument("--seconds", type=float, default=6, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default=LOADS, help="shares of what a configuration can do")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    print(machine.describe())
    if busy := machine.busy_before():
        print(busy)
    noise = machine.Noise()
    noise.sample()
    with tempfile.TemporaryDirectory() as place:
        archive, payload = packed(Path(place), options.model)
        if options.bounds:
            found = promises_of(archive, [payload], options, noise)
            print(noise)
            show_promises(found)
            return
        rows = rows_of(archive, [payload], options, noise)
    print(noise)
    good = show(rows)
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in rows], indent=1))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
