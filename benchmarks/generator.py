"""The load generator of `tsx bench`, compared with wrk: its speed, and its measurements.

    python benchmarks/generator.py [--seconds 5] [--rounds 5] [--connections 64]

With the fastest server here, tsx with a handler that answers OK, the generator must reach 60 % of
wrk's rate. With a server that is slower than both (batches of 8 in 20 ms), throughput and p99 must
agree within 5 %. The two take turns; the medians of the rounds are compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import machine
import servers
import wrk

from tsx_cli.bench.load.generator import measure
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan

MODELS = Path(__file__).parent / "models"
BODY = b'{"x":1}'
MIN_SHARE = 0.6
MAX_DIFFERENCE = 0.05
WARM_UP_S = 1.0


class Figures(NamedTuple):
    rate: float  # requests/s
    p50: float  # ms
    p99: float  # ms


class Case(NamedTuple):
    model: str
    text: str
    config: dict[str, object]


CASES = (
    Case("ok", "a handler that answers OK", {"minWorkers": 1, "maxWorkers": 1, "batchSize": 64}),
    Case(
        "slow",
        "a handler that takes 20 ms for 8 requests",
        {"minWorkers": 1, "maxWorkers": 1, "batchSize": 8},
    ),
)


def measure_tsx(
    url: str, model: str, connections: int, seconds: float
) -> tuple[Figures, str | None]:
    """Measure with tsx bench; return the figures, and a reason if the generator limited them."""
    plan = LoadPlan(
        url,
        model,
        (Payload(BODY, "application/json"),),
        connections=connections,
        seconds=seconds,
        warm_up=WARM_UP_S,
    )
    report = measure(plan)
    assert report.ok == report.sent, report
    return (
        Figures(report.throughput, report.latency.p50_ms, report.latency.p99_ms),
        report.generator.limited,
    )


def measure_wrk(url: str, model: str, connections: int, seconds: float, body: Path) -> Figures:
    load = wrk.load(f"{url}/predictions/{model}", connections, seconds, body)
    return Figures(load.rate, load.p50, load.p99)


def median(rounds: Sequence[Figures]) -> Figures:
    return Figures(*(machine.median(column) for column in zip(*rounds, strict=True)))


def compare(case: Case, directory: Path, options: argparse.Namespace) -> tuple[Figures, Figures]:
    """Return the medians of wrk and of tsx bench."""
    body = directory / "body"
    body.write_bytes(BODY)
    packed_archive = servers.archive(
        directory, case.model, "--handler", MODELS / f"{case.model}.py", config=case.config
    )
    rounds: list[tuple[Figures, Figures]] = []
    with servers.tsx(directory, packed_archive) as server:
        servers.first_answer(server, f"/predictions/{case.model}", BODY)
        for number in range(options.rounds):
            figures_by_tool = {}
            for tool in ("wrk", "tsx") if number % 2 else ("tsx", "wrk"):
                if tool == "wrk":
                    figures_by_tool[tool] = measure_wrk(
                        server.inference, case.model, options.connections, options.seconds, body
                    )
                else:
                    figures_by_tool[tool], limit_reason = measure_tsx(
                        server.inference, case.model, options.connections, options.seconds
                    )
                    if limit_reason:
                        print(f"({limit_reason})")
            rounds.append((figures_by_tool["wrk"], figures_by_tool["tsx"]))
            text = ", ".join(
                f"{tool} {figures.rate:,.0f}/s p50 {figures.p50:.2f} p99 {figures.p99:.2f} ms"
                for tool, figures in figures_by_tool.items()
            )
            print(f"{case.model}, round {number + 1}: {text}", flush=True)
    return median([first for first, _ in rounds]), median([second for _, second in rounds])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=64)
    options = parser.parse_args()
    print(
        f"{machine.describe()}; {options.connections} connections, medians of {options.rounds}"
        f" rounds of {options.seconds:g} s"
    )
    disturbance = machine.busy_before()
    if disturbance:
        print(f"not quiet: {disturbance}")
    os.environ["BENCHMARK_BATCH_SECONDS"] = "0.02"  # The slow handler reads this setting.
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            rows.append((case, *compare(case, Path(name), options)))
    print(
        "\n| server | wrk requests/s | tsx bench | ratio | wrk p99 ms | tsx bench | ratio |\n"
        + "|---" * 7
        + "|"
    )
    for case, first, second in rows:
        cells = (
            f"{first.rate:,.0f} | {second.rate:,.0f} | {second.rate / first.rate:.2f} |"
            f" {first.p99:.2f} | {second.p99:.2f}"
        )
        print(f"| {case.text} | {cells} | {second.p99 / first.p99:.2f} |")
    (_, wrk_quick, tsx_quick), (_, wrk_slow, tsx_slow) = rows
    difference = max(abs(tsx_slow.rate / wrk_slow.rate - 1), abs(tsx_slow.p99 / wrk_slow.p99 - 1))
    rate_ratio = tsx_quick.rate / wrk_quick.rate
    print(
        f"\ndrives {rate_ratio:.0%} of what wrk drives ({'kept' if rate_ratio >= MIN_SHARE else 'broken'}:"
        f" {MIN_SHARE:.0%})"
    )
    print(
        f"agrees with wrk within {difference:.1%} on the slower server"
        f" ({'kept' if difference <= MAX_DIFFERENCE else 'broken'}: {MAX_DIFFERENCE:.0%})"
    )


if __name__ == "__main__":
    main()
