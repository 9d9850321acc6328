"""What times, histograms and counters cost: a server as it is, and one that counts nothing, in turns of a tenth of a second.

    python -m benchmarks.cost_of_metrics [--loads ok:1,ok:16,ok:64,mlp:16] [--blocks 150] [--turn 0.1]

The other server is the same but for what `BLIND` takes out of its code: in the front end the counters of each request and all that is
kept of a batch, in the worker the times that it tells. `ok` is a handler that answers `OK` and does nothing else, so that the share is as
large as it can be; `mlp` is a small model. Each block of four turns (see `turns.py`) gives two ratios: of the time that a request takes
(1 / throughput), and of the processor's time that front end and worker spend on it, which is the steadier one. Told are the medians of
the blocks, between what they are with 95 % confidence, and whether that is under the 3 % that are allowed. It needs Linux and `wrk`.
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
    try:
        with servers.tsx(directory, archive, job_queue_size=1000) as server:
            yield server
    finally:
        os.environ["PYTHONPATH"] = path


def is_blind(server: servers.Server) -> bool:
    """Whether it remembers nothing of what it has answered."""
    return not json.loads(server.call("/debug/slowest", management=True))["requests"]


def row(name: str, seeing: Sequence[Cost], blind: Sequence[Cost]) -> tuple[str, Effect, Effect]:
    """A line of the table, and the two effects that are in it: on the time that a request takes, and on the processor's."""
    of_time = effect([one.time / other.time for one, other in zip(seeing, blind, strict=True)])
    of_processor = effect([one.processor / other.processor for one, other in zip(seeing, blind, strict=True)])
    rates = [f"{1 / median(cost.time for cost in side):,.0f}" for side in (seeing, blind)]
    parts = [
        f"{1e6 * median(cost.front for cost in side):.2f} + {1e6 * median(cost.worker for cost in side):.2f}" for side in (seeing, blind)
    ]
    return f"| {' | '.join((name, *rates, *parts, str(of_time), str(of_processor)))} |", of_time, of_processor


def measure(model: Path, connections: list[int], blocks: int, turn: float, place: Path) -> Iterator[tuple[str, list[Cost], list[Cost]]]:
    body = place / "body"
    bare_round(model, body, 0)  # which writes the model's own sample
    with ExitStack() as stack:
        both = [stack.enter_context(serving(place / name, model, blind=name == "blind")) for name in ("seeing", "blind")]
        path = f"/predictions/{model.stem}"
        for server in both:
            servers.first_answer(server, path, body.read_bytes())
        assert [is_blind(server) for server in both] == [False, True]
        for count in connections:
            with turns.loads([server.inference + path for server in both], count, body, [server.process.pid for server in both]) as loads:
                yield f"{model.stem}, {count}", *turns.run(*loads, blocks, turn)


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
    parser.add_argument("--blocks", type=int, default=150, help="of four turns each, for each load")
    parser.add_argument("--turn", type=float, default=0.1, help="seconds")
    options = parser.parse_args()
    print(f"{machine.describe()}; {options.blocks} blocks of four turns of {options.turn:g} s\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    verdicts: list[str] = []
    for name, connections in options.loads.items():
        with tempfile.TemporaryDirectory() as root:
            for load, seeing, blind in measure(MODELS / f"{name}.py", connections, options.blocks, options.turn, Path(root)):
                line, of_time, of_processor = row(load, seeing, blind)
                print(line, flush=True)
                verdicts.append(f"- {load}: time {of_time.verdict(MOST)}; processor {of_processor.verdict(MOST)}")
    print("\n" + "\n".join(verdicts))


if __name__ == "__main__":
    main()
