"""What times, histograms and counters cost: a server as it is, and one that counts nothing, in turns of a tenth of a second.

    python -m benchmarks.cost_of_metrics [--loads ok:1,ok:16,ok:64,mlp:16] [--pairs 4] [--blocks 30] [--turn 0.1]

The other server is the same but for what `blind.py` takes out of its code: in the front end the counters of each request and all that is
kept of a batch, in the worker the times that it tells. `ok` is a handler that answers `OK` and does nothing else, so that the share is as
large as it can be; `mlp` is a small model. Each block of four turns (see `turns.py`) gives two ratios: of the time that a request takes
(1 / throughput), and of the processor's time that front end and worker spend on it, which is the steadier one. Told are the medians of
the blocks of all pairs of servers, between what they are with 95 % confidence, and whether that is under the 3 % that are allowed.
It needs Linux and `wrk`.
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
def serving(directory: Path, model: Path, *, blind: bool) -> Iterator[servers.Server]:
    directory.mkdir()
    archive = servers.archive(directory, model.stem, "--handler", model, config={"minWorkers": 1, "maxWorkers": 1, "batchSize": 64})
    path = os.environ.get("PYTHONPATH", "")
    if blind:
        (directory / "sitecustomize.py").write_text(BLIND.read_text())  # which Python imports when it starts
        os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{path}"
    with ExitStack() as stack:
        try:
            server = stack.enter_context(servers.tsx(directory, archive, job_queue_size=1000))
        finally:
            os.environ["PYTHONPATH"] = path  # the next server that starts is its own
        yield server


def is_blind(server: servers.Server) -> bool:
    """Whether it remembers nothing of what it has answered."""
    return not json.loads(server.call("/debug/slowest", management=True))["requests"]


class Load(NamedTuple):
    model: Path
    body: Path
    connections: list[int]


class Compared(NamedTuple):
    """What requests cost on both sides, of one pair of servers, block by block."""

    seeing: list[Cost]
    blind: list[Cost]


def row(name: str, pairs: Sequence[Compared]) -> tuple[str, Effect, Effect]:
    """A line of the table, and the two effects that are in it: on the time that a request takes, and on the processor's."""
    of_time = effect([[one.time / other.time for one, other in zip(*pair, strict=True)] for pair in pairs])
    of_processor = effect([[one.processor / other.processor for one, other in zip(*pair, strict=True)] for pair in pairs])
    sides = [[cost for pair in pairs for cost in pair[which]] for which in (0, 1)]
    rates = [f"{1 / median(cost.time for cost in side):,.0f}" for side in sides]
    parts = [f"{1e6 * median(cost.front for cost in side):.2f} + {1e6 * median(cost.worker for cost in side):.2f}" for side in sides]
    return f"| {' | '.join((name, *rates, *parts, str(of_time), str(of_processor)))} |", of_time, of_processor


def measure(load: Load, blocks: int, turn: float, place: Path, *, blind_first: bool) -> list[Compared]:
    """For each number of connections, on a new pair of servers."""
    model, body, connections = load
    found = []
    with ExitStack() as stack:
        order = (True, False) if blind_first else (False, True)
        made = {blind: stack.enter_context(serving(place / ("blind" if blind else "seeing"), model, blind=blind)) for blind in order}
        both = [made[False], made[True]]
        path = f"/predictions/{model.stem}"
        for server in both:
            servers.first_answer(server, path, body.read_bytes())
        assert [is_blind(server) for server in both] == [False, True]
        for count in connections:
            with turns.loads([server.inference + path for server in both], count, body, [server.process.pid for server in both]) as loads:
                found.append(Compared(*turns.run(*loads, blocks, turn)))
    return found


def wanted(text: str) -> dict[str, list[int]]:
    """`ok:1,ok:16,mlp:16`: the connections of each handler."""
    found: dict[str, list[int]] = {}
    for each in text.split(","):
        name, _, connections = each.partition(":")
        found.setdefault(name, []).append(int(connections))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=wanted, default=wanted("ok:1,ok:16,ok:64,mlp:16"), help="handlers, each with its connections")
    parser.add_argument("--pairs", type=int, default=4, help="of servers, one after the other, for each handler")
    parser.add_argument("--blocks", type=int, default=30, help="of four turns each, for each load and pair")
    parser.add_argument("--turn", type=float, default=0.1, help="seconds")
    options = parser.parse_args()
    print(
        f"{machine.describe()}; {options.pairs} pairs of servers, {options.blocks} blocks of four turns of {options.turn:g} s with each\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    verdicts: list[str] = []
    for name, connections in options.loads.items():
        with tempfile.TemporaryDirectory() as root:
            load = Load(MODELS / f"{name}.py", Path(root) / "body", connections)
            bare_round(load.model, load.body, 0)  # which writes the model's own sample
            pairs = []
            for number in range(options.pairs):
                place = Path(root) / str(number)
                place.mkdir()
                pairs.append(measure(load, options.blocks, options.turn, place, blind_first=number % 2 == 1))
        for count, compared in zip(connections, zip(*pairs, strict=True), strict=True):
            line, of_time, of_processor = row(f"{name}, {count}", compared)
            print(line, flush=True)
            verdicts.append(f"- {name}, {count}: time {of_time.verdict(MOST)}; processor {of_processor.verdict(MOST)}")
    print("\n" + "\n".join(verdicts))


if __name__ == "__main__":
    main()
