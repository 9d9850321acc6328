"""The effect of `tsx serve --replace` on clients: failed requests, and the longest wait.

    python benchmarks/replacement.py [--replacements 3] [--connections 32] [--rate 500]

Two loads run at once, each by the generator of `tsx bench`: busy keep-alive connections, and an
open loop at a steady rate. Meanwhile one server after the other takes over the addresses from
its predecessor. The exit code is 1 if any request is refused, fails or has no response.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import machine
import servers

from tsx_cli.bench.load.generator import measure
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.results import Round

HANDLER = Path(__file__).parent / "models" / "ok.py"
REPLACEMENT_S = 8.0  # duration of the load per replacement, mostly during the new server's start
BODY = b"x" * 7


@contextmanager
def serving(
    directory: Path, addresses: dict[str, str], *arguments: str | Path
) -> Iterator[servers.Server]:
    environment = servers.clean_environment() | addresses
    environment |= {
        "TSX_ENABLE_GRPC": "false",
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_STATE_DIR": str(directory / "state"),
    }
    with servers.running(
        [servers.TSX, "serve", *arguments], directory, environment, "tsx"
    ) as process:
        yield servers.Server(
            "tsx", process, addresses["TSX_INFERENCE_ADDRESS"], addresses["TSX_MANAGEMENT_ADDRESS"]
        )


def measure_replacements(
    directory: Path, options: argparse.Namespace
) -> tuple[list[Round], list[float]]:
    """Return the rounds of both loads, and the seconds of each replacement."""
    packed = servers.archive(
        directory, "ok", "--handler", HANDLER, config={"batchSize": 64, "jobQueueSize": 1000}
    )
    names = ("TSX_INFERENCE_ADDRESS", "TSX_MANAGEMENT_ADDRESS", "TSX_METRICS_ADDRESS")
    addresses = {
        name: f"http://127.0.0.1:{port}"
        for name, port in zip(names, servers.free_ports(3), strict=True)
    }
    url = f"{addresses[names[0]]}/predictions/ok"
    payloads = [Payload(BODY, "application/octet-stream")]
    seconds = REPLACEMENT_S * options.replacements
    closed_plan = LoadPlan(
        url, "", payloads, "post", connections=options.connections, seconds=seconds, warm_up=0.0
    )
    paced_plan = LoadPlan(
        url,
        "",
        payloads,
        "post",
        mode="open",
        rate=options.rate,
        connections=256,
        seconds=seconds,
        warm_up=0.0,
    )
    with ExitStack() as stack:
        old_server = stack.enter_context(serving(directory, addresses, packed))
        servers.first_answer(old_server, "/predictions/ok", BODY)
        durations, load_start = [], time.monotonic()
        pool = stack.enter_context(ThreadPoolExecutor(2))
        loads = [pool.submit(measure, plan) for plan in (closed_plan, paced_plan)]
        for _ in range(options.replacements):
            start = time.monotonic()
            new = stack.enter_context(serving(directory, addresses, packed, "--replace"))
            old_server.process.wait()
            durations.append(time.monotonic() - start)
            old_server = new
        assert time.monotonic() - load_start < seconds, (
            f"{options.replacements} replacements took longer than the load: {durations}"
        )
        return [load.result() for load in loads], durations


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replacements", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32, help="that ask without a pause")
    parser.add_argument("--rate", type=float, default=500, help="of the open loop")
    options = parser.parse_args()
    print(machine.describe())
    with tempfile.TemporaryDirectory() as name:
        rounds, durations = measure_replacements(Path(name), options)
    print(
        f"{options.replacements} replacements, in"
        f" {', '.join(f'{duration:.1f}' for duration in durations)} s each\n"
    )
    print(
        "| load | requests | answered | refused | errors | not answered | p50 ms | p99 ms | longest"
        " ms |\n" + "|---" * 9 + "|"
    )
    for load, result in zip(
        (f"{options.connections} connections", f"{options.rate:g}/s"), rounds, strict=True
    ):
        failed = ", ".join(f"{count} {error}" for error, count in result.errors.items()) or "0"
        cells = (
            f"{load} | {result.sent:,} | {result.ok:,} | {result.refused} | {failed} |"
            f" {result.unanswered}"
        )
        print(
            f"| {cells} | {result.latency.p50_ms:.2f} | {result.latency.p99_ms:.1f} |"
            f" {result.latency.max_ms:.0f} |"
        )
    sys.exit(
        any(
            result.refused or result.errors or result.unanswered or result.ok != result.sent
            for result in rounds
        )
    )


if __name__ == "__main__":
    main()
