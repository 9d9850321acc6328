"""The cost of metrics, on a server that switches counting on and off every few milliseconds.

    python -m benchmarks.cost_of_metrics [--loads ok:1,ok:16,ok:64,mlp:16] [--servers 8] [--blocks
    24] [--turn 0.015]

`blind.py` lists the code that a server skips when it does not count: in the front end the counters
of requests and the records of batches, in the worker the times. `ok` is a handler that only answers
`OK`, so that the relative cost is as large as possible; `mlp` is a small model. Each block of turns
(see `turns.py`) gives two ratios: of a request's time (1 / throughput), and of the processor time
of front end and worker. The results are medians over the blocks of all servers, which run one after
the other, with 95 % intervals, and whether they are below the allowed 3 %. The benchmark needs
Linux and `wrk`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import machine, servers, turns
from benchmarks.peers.measure import bare_round
from benchmarks.turns import Cost, Effect, effect

MODELS = Path(__file__).parent / "models"
MAX_PERCENT = 3.0
BLIND = Path(__file__).with_name("blind.py")
COLUMNS = (
    "handler, connections",
    "requests/s",
    "blind",
    "us of processor a request (front end + worker)",
    "blind",
    "time a request takes",
    "processor time of a request",
)


@contextmanager
def serving(directory: Path, model: Path) -> Iterator[servers.Server]:
    """Start a server that counts until a signal changes it."""
    directory.mkdir()
    archive = servers.archive(
        directory,
        model.stem,
        "--handler",
        model,
        config={"minWorkers": 1, "maxWorkers": 1, "batchSize": 64},
    )
    # Python imports this file at its start.
    (directory / "sitecustomize.py").write_text(BLIND.read_text())
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{path}"
    with ExitStack() as stack:
        try:
            server = stack.enter_context(servers.tsx(directory, archive, job_queue_size=1000))
        finally:
            os.environ["PYTHONPATH"] = path
        yield server


def stored_requests(server: servers.Server) -> int:
    """Return how many slow requests the server has stored (up to 100); it stores them by counting."""
    return len(json.loads(server.call("/debug/slowest", management=True))["requests"])


class Load(NamedTuple):
    model: Path
    body: Path
    connections: list[int]


class CostPair(NamedTuple):
    """The costs of requests on one server with and without counting, block by block."""

    with_metrics: list[Cost]
    without_metrics: list[Cost]


def row(name: str, pairs: Sequence[CostPair]) -> tuple[str, Effect, Effect]:
    """Return a line of the table, and the effects of counting on time and processor time."""
    time_effect = effect(
        [
            [cost.time / base_cost.time for cost, base_cost in zip(*pair, strict=True)]
            for pair in pairs
        ]
    )
    processor_effect = effect(
        [
            [cost.processor / base_cost.processor for cost, base_cost in zip(*pair, strict=True)]
            for pair in pairs
        ]
    )
    costs_by_mode = [[cost for pair in pairs for cost in pair[index]] for index in (0, 1)]
    rates = [f"{1 / median(cost.time for cost in mode_costs):,.0f}" for mode_costs in costs_by_mode]
    parts = [
        f"{1e6 * median(cost.front for cost in mode_costs):.2f} +"
        f" {1e6 * median(cost.worker for cost in mode_costs):.2f}"
        for mode_costs in costs_by_mode
    ]
    return (
        f"| {' | '.join((name, *rates, *parts, str(time_effect), str(processor_effect)))} |",
        time_effect,
        processor_effect,
    )


def measure(load: Load, blocks: int, turn: float, directory: Path) -> list[CostPair]:
    """Measure each number of connections, on a new server."""
    pairs = []
    path = f"/predictions/{load.model.stem}"
    with serving(directory, load.model) as server:
        servers.first_answer(server, path, load.body.read_bytes())
        switch = turns.Switch(server.process.pid)
        for count in load.connections:
            running = turns.Load(server.inference + path, count, load.body, server.process.pid)
            try:
                pairs.append(CostPair(*turns.run(running, switch, blocks, turn)))
            finally:
                running.kill()
    return pairs


def parse_loads(text: str) -> dict[str, list[int]]:
    """Return the connections of each handler in a text such as `ok:1,ok:16,mlp:16`."""
    connections_by_handler: dict[str, list[int]] = {}
    for load in text.split(","):
        name, _, connections = load.partition(":")
        connections_by_handler.setdefault(name, []).append(int(connections))
    return connections_by_handler


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--loads",
        type=parse_loads,
        default=parse_loads("ok:1,ok:16,ok:64,mlp:16"),
        help="handlers, each with its connections",
    )
    parser.add_argument(
        "--servers", type=int, default=8, help="one after the other, for each handler"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=24,
        help=f"of {len(turns.ORDER)} turns each, for each load and server",
    )
    parser.add_argument("--turn", type=float, default=0.015, help="seconds")
    options = parser.parse_args()
    amount_text = f"{options.blocks} blocks of {len(turns.ORDER)} turns of {options.turn:g} s"
    print(f"{machine.describe()}; {options.servers} servers, {amount_text} with each\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    verdicts: list[str] = []
    for name, connections in options.loads.items():
        with tempfile.TemporaryDirectory() as root:
            load = Load(MODELS / f"{name}.py", Path(root) / "body", connections)
            # This writes the model's sample into the body's file.
            bare_round(load.model, load.body, 0)
            pairs_by_server = [
                measure(load, options.blocks, options.turn, Path(root) / str(number))
                for number in range(options.servers)
            ]
        for count, pairs in zip(connections, zip(*pairs_by_server, strict=True), strict=True):
            line, time_effect, processor_effect = row(f"{name}, {count}", pairs)
            print(line, flush=True)
            verdicts.append(
                f"- {name}, {count}: time {time_effect.verdict(MAX_PERCENT)}; processor"
                f" {processor_effect.verdict(MAX_PERCENT)}"
            )
    print("\n" + "\n".join(verdicts))


if __name__ == "__main__":
    main()
