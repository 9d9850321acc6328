"""Goodput and latency at loads of 50 to 200 % of a model's capacity, in an open loop.

    python benchmarks/overload.py [--seconds 4] [--rounds 3] [--slo 'p99<50ms']

The handler sleeps 20 ms for a batch of any size, so that its capacity is far below that of the
front end and the generator. Capacity is measured first, by more requests than the handler can
process. Then each load is offered by clients that wait for ever, and by clients that state their
timeout (`x-tsx-timeout-ms`); for the latter, only responses within the timeout count. The goal at
200 % is a goodput within 10 % of its peak, and a bounded p99.

With --slo, a latency target is compared with fixed batch sizes and queues of tsx, TorchServe and
Mosec in turn. Arrivals step up, rise or come in bursts, from 50 to 200 % of the capacity. Capacity
is that of batches that take half the target's time. Each request adds --request-ms to its batch.
The peers have their own environments, as in `benchmarks/peers`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import machine
import openloop
import servers

from tsx_archiver.metadata.slo import latency_target
from tsx_cli.bench.load.generator import measure as generate
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan

sys.path.append(str(Path(__file__).parents[1]))  # the directory of the package `benchmarks`
from benchmarks.peers import environments

LOADS = (50, 80, 100, 150, 200)  # percent of the capacity
HANDLER = Path(__file__).parent / "models" / "slow.py"


class Case(NamedTuple):
    name: str
    headers: tuple[str, ...]
    limit_ms: float | None  # the longest useful latency


class Row(NamedTuple):
    load: int
    offered: float
    goodput: float
    refused: float
    p50: float
    p99: float
    refused_p99: float
    limited: str | None


def offer(
    server: servers.Server, body: Path, rate: float, seconds: float, case: Case
) -> openloop.Result:
    """Offer a load on more connections than the queue has places, so that the queue can fill."""
    url = f"{server.inference}/predictions/slow"
    return openloop.run(
        url, rate, seconds, 512, body, headers=case.headers, limit_ms=case.limit_ms, poisson=True
    )


def measure(
    server: servers.Server, body: Path, capacity: float, case: Case, rounds: int, seconds: float
) -> list[Row]:
    rows = []
    for load in LOADS:
        results = [offer(server, body, capacity * load / 100, seconds, case) for _ in range(rounds)]
        for result in results:
            assert not result.errors, result.errors
            assert not result.unanswered, f"{result.unanswered} requests were never answered"
        columns = [
            (
                result.planned / seconds,
                result.goodput,
                result.refused / seconds,
                result.p50,
                result.p99,
                result.refused_p99,
            )
            for result in results
        ]
        medians = [machine.median(column) for column in zip(*columns, strict=True)]
        rows.append(
            Row(
                load, *medians, next((result.limited for result in results if result.limited), None)
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    peak = max(row.goodput for row in rows)
    lines = [
        (
            "| load | offered/s | goodput/s | of its peak | refused/s | p50 ms | p99 ms | refusals"
            " p99 ms |"
        ),
        "|---" * 8 + "|",
    ]
    for row in rows:
        cells = (
            f"{row.load} % | {row.offered:,.0f} | {row.goodput:,.0f} | {row.goodput / peak:.1%} |"
            f" {row.refused:,.0f}"
        )
        lines.append(f"| {cells} | {row.p50:.1f} | {row.p99:.1f} | {row.refused_p99:.1f} |")
        if row.limited:
            lines.append(
                f"(at {row.load} % the numbers say nothing about the server: {row.limited})"
            )
    return "\n".join(lines)


# The offered fraction of the capacity, by the fraction of the elapsed time.
SHAPES: dict[str, Callable[[float], float]] = {
    "step": lambda time_s: 0.5 if time_s < 0.3 else 1.5,
    "ramp": lambda time_s: 0.5 + 1.5 * time_s,
    "bursts": lambda time_s: 2.0 if time_s * 10 % 2 < 0.8 else 0.5,
}


def arrivals(shape: Callable[[float], float], capacity: float, seconds: float) -> list[float]:
    """Return random arrival times at a changing rate: those of the highest rate, some dropped."""
    random_source, time_s, times = random.Random(22), 0.0, []
    while (time_s := time_s + random_source.expovariate(2 * capacity)) < seconds:
        if random_source.random() < shape(time_s / seconds) / 2:
            times.append(time_s)
    return times


class Setting(NamedTuple):
    """A server with settings of its batches and queue."""

    server: str
    config: dict[str, object]

    def __str__(self) -> str:
        return ", ".join([self.server, *(f"{key} {value}" for key, value in self.config.items())])


def settings_of(target: str, half_batch: int) -> list[Setting]:
    """Return the settings to compare: of tsx with the target, of tsx without it, and of peers."""
    sizes = ((1, 100), (half_batch, half_batch), (half_batch, 100), (2 * half_batch, half_batch))
    fixed_settings = [{"batchSize": size, "jobQueueSize": queue} for size, queue in sizes]
    peers = [
        Setting(peer, config) for peer in ("TorchServe", "Mosec") for config in fixed_settings[1:3]
    ]
    return [
        Setting("tsx", {"slo": target}),
        *(Setting("tsx", config) for config in fixed_settings),
        *peers,
    ]


@contextmanager
def serving(setting: Setting, directory: Path) -> Iterator[tuple[servers.Server, str]]:
    """Start a server; yield it and the path of its model.

    Raises:
        Missing: The peer cannot be installed.
    """
    config = {"minWorkers": 1, "maxWorkers": 1} | setting.config
    environments_directory = environments.default_directory()
    if setting.server == "Mosec":
        environment = environments.environment_of("Mosec", environments_directory)
        port = servers.free_ports(1)[0]
        command: list[str | Path] = [
            environment / "bin" / "python",
            Path(__file__).parent / "peers" / "mosec_server.py",
        ]
        command += [
            "--address",
            "127.0.0.1",
            "--port",
            str(port),
            "--log-level",
            "error",
            "--capacity",
            str(config["jobQueueSize"]),
        ]
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        variables = {
            "PATH": path,
            "BENCHMARK_MODEL": str(HANDLER),
            "BENCHMARK_BATCH": str(config["batchSize"]),
            "TMPDIR": str(directory),
        }
        with servers.running(
            command, directory, servers.foreign_environment() | variables, "mosec", grace_s=5
        ) as process:
            yield servers.Server("Mosec", process, f"http://127.0.0.1:{port}", ""), "/inference"
        return
    if setting.server == "TorchServe":
        environments.program("java", "openjdk-17-jre-headless")
        packed_archive = servers.archive(
            directory, "slow", "--handler", HANDLER, config=config | {"maxBatchDelay": 1}
        )
        with servers.torchserve(
            directory,
            packed_archive,
            environments.environment_of("TorchServe", environments_directory),
        ) as server:
            yield server, "/predictions/slow"
        return
    with servers.tsx(
        directory, servers.archive(directory, "slow", "--handler", HANDLER, config=config)
    ) as server:
        yield server, "/predictions/slow"


def compare_with_target(body: bytes, options: argparse.Namespace) -> None:
    """Compare one server at a time, after a warm-up at half of the capacity.

    In the warm-up, tsx learns the curve for its target, and Java compiles.
    """
    target = latency_target(options.slo)
    batch_s, request_s = options.batch_ms / 1000, options.request_ms / 1000
    half_batch = max(1, int((target.seconds / 2 - batch_s) / request_s))
    capacity = half_batch / (batch_s + request_s * half_batch)
    print(
        f"{machine.describe()}; a batch of n takes {options.batch_ms:g} + {options.request_ms:g} n"
        f" ms; 100 %: {capacity:,.0f}/s\n"
    )
    print(
        "| server | arrivals | offered/s | of all within the target | of the accepted | goodput/s |"
        " refused/s | p99 ms |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for setting in settings_of(options.slo, half_batch):
        if setting.server not in options.servers.split(","):
            continue
        try:
            with (
                tempfile.TemporaryDirectory() as name,
                serving(setting, Path(name)) as (server, path),
            ):
                servers.first_answer(server, path, body)
                offer_shape(
                    "warm-up", server.inference + path, body, capacity, target.seconds, options
                )
                for shape in options.arrivals.split(","):
                    cells = offer_shape(
                        shape, server.inference + path, body, capacity, target.seconds, options
                    )
                    print(f"| {setting} | {cells} |", flush=True)
        except environments.Missing as missing:
            print(f"{setting} is left out: {missing}", flush=True)


def offer_shape(
    shape: str, url: str, body: bytes, capacity: float, limit_s: float, options: argparse.Namespace
) -> str:
    arrival_times = arrivals(SHAPES.get(shape, lambda time_s: 0.5), capacity, options.seconds)
    payloads = [
        Payload(body, "application/octet-stream", (), at=time_s) for time_s in arrival_times
    ]
    plan = LoadPlan(
        url,
        "",
        payloads,
        "post",
        mode="open",
        connections=512,
        arrivals="recorded",
        seconds=options.seconds,
        warm_up=0.0,
    )
    result = openloop.row(plan, generate(plan), limit_s * 1000)
    failed = (
        f" ({', '.join(f'{count} times {error}' for error, count in result.errors.items())})"
        if result.errors
        else ""
    )
    good_count = result.goodput * result.seconds
    cells = (
        f"{shape} | {len(arrival_times) / options.seconds:,.0f} | {good_count / len(arrival_times):.1%} |"
        f" {good_count / max(1, result.accepted):.1%} | {result.goodput:,.0f}"
    )
    return f"{cells} | {result.refused / options.seconds:,.0f}{failed} | {result.p99:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4, help="of load in each round")
    parser.add_argument(
        "--rounds", type=int, default=3, help="at each load; the medians are printed"
    )
    parser.add_argument("--batch", type=int, default=8, help="requests of one batch")
    parser.add_argument("--batch-ms", type=float, default=20, help="that a batch takes")
    parser.add_argument("--queue", type=int, default=100, help="requests that may wait")
    parser.add_argument(
        "--timeout-ms", type=int, default=150, help="that the client with a deadline waits"
    )
    parser.add_argument(
        "--slo", help="compare this latency target, such as p99<50ms, with fixed settings"
    )
    parser.add_argument(
        "--request-ms",
        type=float,
        default=0.5,
        help="with --slo, that each request adds to its batch",
    )
    parser.add_argument(
        "--servers", default="tsx,TorchServe,Mosec", help="with --slo: those that take part"
    )
    parser.add_argument(
        "--arrivals", default=",".join(SHAPES), help="with --slo: how requests arrive"
    )
    options = parser.parse_args()
    cases = [
        Case("clients wait for ever", (), None),
        Case(
            f"clients wait {options.timeout_ms} ms",
            (f"x-tsx-timeout-ms: {options.timeout_ms}",),
            options.timeout_ms,
        ),
    ]
    # The handler reads this setting.
    os.environ["BENCHMARK_BATCH_SECONDS"] = str(options.batch_ms / 1000)
    if options.slo:
        os.environ["BENCHMARK_REQUEST_SECONDS"] = str(options.request_ms / 1000)
        compare_with_target(b'{"x":1}', options)
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        body = directory / "body"
        body.write_bytes(b'{"x":1}')
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": options.batch}
        packed_archive = servers.archive(*(directory, "slow", "--handler", HANDLER), config=config)
        with servers.tsx(directory, packed_archive, job_queue_size=options.queue) as server:
            servers.first_answer(server, "/predictions/slow", body.read_bytes())
            excess_rate = 1500 * options.batch / options.batch_ms  # requests/s
            goodputs = [
                offer(server, body, excess_rate, options.seconds, cases[0]).goodput
                for _ in range(options.rounds)
            ]
            capacity = machine.median(goodputs)
            print(
                f"{machine.describe()}; medians of {options.rounds} rounds of {options.seconds:g}"
                " s, Poisson arrivals"
            )
            setup = (
                f"one worker, batches of {options.batch} in {options.batch_ms:g} ms, a queue of"
                f" {options.queue}"
            )
            print(f"{setup}: {capacity:,.0f} requests/s\n")
            for case in cases:
                rows = measure(server, body, capacity, case, options.rounds, options.seconds)
                print(f"{case.name}\n\n{table(rows)}\n", flush=True)


if __name__ == "__main__":
    main()
