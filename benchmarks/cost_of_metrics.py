"""What times, histograms and counters cost: a server as it is, and one that counts nothing, in turns.

    python -m benchmarks.cost_of_metrics [--rounds 9] [--seconds 1] [--connections 1,16,64,256]

The other server is the same but for three functions, which `BLIND` puts out of action in its front end and its workers: the one that
counts a batch, and the two by which a worker takes and tells times. Both serve a handler that answers `OK` and does nothing else, so
that the share is as large as it can be. Each round gives a ratio, of two runs that follow each other; told is
the median of the ratios, and between which of them half of the rounds lie. Processor time (front end and worker together) is steadier
than throughput. It needs `wrk`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import psutil

from benchmarks import machine, servers, wrk

HANDLER = Path(__file__).parent / "models" / "ok.py"
BLIND = """
from tsx_runtime.core import stats
from tsx_runtime.worker import stages

stats.Stats.add_batch = lambda self, newest, jobs, items: None
stages.begin = lambda laps=None: []
NOTHING = stages.TIMES.pack(*[stages.NAN] * 5)
stages.times = lambda began, laps: NOTHING
"""


class Measured(NamedTuple):
    rate: float  # requests/s
    front: float  # microseconds of processor time a request
    worker: float


@contextmanager
def serving(directory: Path, *, blind: bool) -> Iterator[servers.Server]:
    directory.mkdir()
    archive = servers.archive(directory, "ok", "--handler", HANDLER, config={"minWorkers": 1, "maxWorkers": 1, "batchSize": 64})
    path = os.environ.get("PYTHONPATH", "")
    if blind:
        (directory / "sitecustomize.py").write_text(BLIND)  # which Python imports when it starts
        os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{path}"
    try:
        with servers.tsx(directory, archive, job_queue_size=1000) as server:
            servers.first_answer(server, "/predictions/ok", b"x")
            yield server
    finally:
        os.environ["PYTHONPATH"] = path


def is_blind(server: servers.Server) -> bool:
    """Whether it remembers nothing of what it has answered."""
    return not json.loads(server.call("/debug/slowest", management=True))["requests"]


def measure(server: servers.Server, connections: int, seconds: float, body: Path) -> Measured:
    front = psutil.Process(server.process.pid)
    before = _spent([front]), _spent(front.children(recursive=True))
    done = wrk.load(f"{server.inference}/predictions/ok", connections, seconds, body)
    after = _spent([front]), _spent(front.children(recursive=True))
    of_front, of_worker = (1e6 * (now - then) / done.requests for now, then in zip(after, before, strict=True))
    return Measured(done.rate, of_front, of_worker)


def _spent(processes: Sequence[psutil.Process]) -> float:
    return sum(spent.user + spent.system for spent in (process.cpu_times() for process in processes))


def told(seeing: Sequence[Measured], blind: Sequence[Measured]) -> str:
    """Medians, and what seeing adds: to the processor time, and to that which a request takes (1 / throughput)."""
    cells = [f"{median(run.rate for run in runs):,.0f}" for runs in (seeing, blind)]
    cells += [f"{median(run.front + run.worker for run in runs):.2f}" for runs in (seeing, blind)]
    pairs = list(zip(seeing, blind, strict=True))
    cells.append(_spread([(one.front + one.worker) / (other.front + other.worker) for one, other in pairs]))
    cells.append(_spread([other.rate / one.rate for one, other in pairs]))
    return " | ".join(cells)


def _spread(ratios: Sequence[float]) -> str:
    low, middle, high = (100 * (each - 1) for each in (quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3))
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1, help="of load for one server in one round")
    parser.add_argument("--connections", default="1,16,64,256")
    options = parser.parse_args()
    print(machine.describe())
    print("| connections | requests/s | blind | us of processor a request | blind | processor time | time a request |\n|" + "---|" * 7)
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        place = Path(root)
        both = [stack.enter_context(serving(place / name, blind=name == "blind")) for name in ("seeing", "blind")]
        assert [is_blind(server) for server in both] == [False, True]
        (place / "body").write_bytes(b'{"x":1}')
        for connections in map(int, options.connections.split(",")):
            runs: tuple[list[Measured], list[Measured]] = ([], [])
            for turn in range(options.rounds + 1):
                for which in (0, 1) if turn % 2 else (1, 0):
                    runs[which].append(measure(both[which], connections, options.seconds, place / "body"))
            print(f"| {connections} | {told(runs[0][1:], runs[1][1:])} |", flush=True)  # the first round only warms up


if __name__ == "__main__":
    main()
