"""What times, histograms and counters cost: a server that is told in turns of a few milliseconds to
count, and not to.

    python -m benchmarks.cost_of_metrics [--loads ok:1,ok:16,ok:64,mlp:16] [--servers 8] [--blocks
    24] [--turn 0.015]

`blind.py` says what is left out when it does not: in the front end the counters of each request and
all that is kept of a batch, in the worker the times that it tells. `ok` is a handler that answers
`OK` and does nothing else, so that the share is as large as it can be; `mlp` is a small model. Each
block of turns (see `turns.py`) gives two ratios: of the time that a request takes (1 / throughput),
and of the processor's time that front end and worker spend on it. Told are the medians of the
blocks of all servers, which start one after the other, between what they are with 95 % confidence,
and whether that is under the 3 % that are allowed. It needs Linux and `wrk`.
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
MOST = 3.0  # percent
BLIND = Path(__file__).with_name("blind.py")  # what is taken out
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
    """A server that counts, until it is told otherwise."""
    directory.mkdir()
    archive = servers.archive(
        directory,
        model.stem,
        "--handler",
        model,
        config={"minWorkers": 1, "maxWorkers": 1, "batchSize": 64},
    )
    (directory / "sitecustomize.py").write_text(
        BLIND.read_text()
    )  # which Python imports when it starts
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{path}"
    with ExitStack() as stack:
        try:
            server = stack.enter_context(servers.tsx(directory, archive, job_queue_size=1000))
        finally:
            os.environ["PYTHONPATH"] = path
        yield server


def remembered(server: servers.Server) -> int:
    """How many requests of the slowest hundred it has: none where it has counted none."""
    return len(json.loads(server.call("/debug/slowest", management=True))["requests"])


class Load(NamedTuple):
    model: Path
    body: Path
    connections: list[int]


class Compared(NamedTuple):
    """What requests cost one server in both ways, block by block."""

    seeing: list[Cost]
    blind: list[Cost]


def row(name: str, found: Sequence[Compared]) -> tuple[str, Effect, Effect]:
    """A line of the table, and the two effects that are in it: on the time that a request takes,
    and on the processor's.
    """
    of_time = effect(
        [[one.time / other.time for one, other in zip(*each, strict=True)] for each in found]
    )
    of_processor = effect(
        [
            [one.processor / other.processor for one, other in zip(*each, strict=True)]
            for each in found
        ]
    )
    sides = [[cost for each in found for cost in each[which]] for which in (0, 1)]
    rates = [f"{1 / median(cost.time for cost in side):,.0f}" for side in sides]
    parts = [
        f"{1e6 * median(cost.front for cost in side):.2f} +"
        f" {1e6 * median(cost.worker for cost in side):.2f}"
        for side in sides
    ]
    return (
        f"| {' | '.join((name, *rates, *parts, str(of_time), str(of_processor)))} |",
        of_time,
        of_processor,
    )


def measure(load: Load, blocks: int, turn: float, place: Path) -> list[Compared]:
    """For each number of connections, on a new server."""
    found = []
    path = f"/predictions/{load.model.stem}"
    with serving(place, load.model) as server:
        servers.first_answer(server, path, load.body.read_bytes())
        switch = turns.Switch(server.process.pid)
        for count in load.connections:
            running = turns.Load(server.inference + path, count, load.body, server.process.pid)
            try:
                found.append(Compared(*turns.run(running, switch, blocks, turn)))
            finally:
                running.kill()
    return found


def wanted(text: str) -> dict[str, list[int]]:
    """`ok:1,ok:16,mlp:16`: the connections of each handler."""
    found: dict[str, list[int]] = {}
    for each in text.split(","):
        name, _, connections = each.partition(":")
        found.setdefault(name, []).append(int(connections))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--loads",
        type=wanted,
        default=wanted("ok:1,ok:16,ok:64,mlp:16"),
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
    each = f"{options.blocks} blocks of {len(turns.ORDER)} turns of {options.turn:g} s"
    print(f"{machine.describe()}; {options.servers} servers, {each} with each\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    verdicts: list[str] = []
    for name, connections in options.loads.items():
        with tempfile.TemporaryDirectory() as root:
            load = Load(MODELS / f"{name}.py", Path(root) / "body", connections)
            bare_round(load.model, load.body, 0)  # which writes the model's own sample
            found = [
                measure(load, options.blocks, options.turn, Path(root) / str(number))
                for number in range(options.servers)
            ]
        for count, compared in zip(connections, zip(*found, strict=True), strict=True):
            line, of_time, of_processor = row(f"{name}, {count}", compared)
            print(line, flush=True)
            verdicts.append(
                f"- {name}, {count}: time {of_time.verdict(MOST)}; processor"
                f" {of_processor.verdict(MOST)}"
            )
    print("\n" + "\n".join(verdicts))


if __name__ == "__main__":
    main()
