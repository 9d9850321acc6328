"""Requests/s of a handler that answers `OK`: one worker, batches up to 64, beside TorchServe 0.12 in the same run.

    TSX_PEER_TORCHSERVE=/path/of/its/environment python benchmarks/fastapi_lane.py [--seconds 5] [--rounds 3]

Without the variable only tsx is measured. Needs `wrk`, and Java 17 for TorchServe.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import machine
import servers
import wrk

CONNECTIONS = (1, 16, 64, 256)
BATCH = 64
BODY = b'{"x":1}'
HANDLER = Path(__file__).parent / "models" / "ok.py"


def start(stack: ExitStack, directory: Path) -> list[servers.Server]:
    packed = servers.archive(
        *(directory, "ok", "--handler", HANDLER),
        config={"minWorkers": 1, "maxWorkers": 1, "batchSize": BATCH, "maxBatchDelay": 1},
    )
    started = [stack.enter_context(servers.tsx(directory, packed, job_queue_size=1000))]
    peer = os.environ.get("TSX_PEER_TORCHSERVE")
    if peer:
        started.append(stack.enter_context(servers.torchserve(directory, packed, Path(peer))))
    else:
        print("TSX_PEER_TORCHSERVE names no environment with TorchServe: only tsx is measured", file=sys.stderr)
    for server in started:
        answer = servers.first_answer(server, "/predictions/ok", BODY)
        assert answer == b"OK", f"{server.name} answered {answer!r}"
    return started


def measure(started: list[servers.Server], rounds: int, seconds: float, noise: machine.Noise) -> dict[tuple[str, int], list[wrk.Round]]:
    """Each server in turn, so that what slows the machine down slows down both."""
    results: dict[tuple[str, int], list[wrk.Round]] = {}
    for server in started:
        wrk.load(f"{server.inference}/predictions/ok", 16, 3)  # a JVM must warm up
    for connections in CONNECTIONS:
        for _ in range(rounds):
            for server in started:
                noise.sample()
                results.setdefault((server.name, connections), []).append(
                    wrk.load(f"{server.inference}/predictions/ok", connections, seconds)
                )
    return results


def table(started: list[servers.Server], results: dict[tuple[str, int], list[wrk.Round]]) -> str:
    names = [server.name for server in started]
    heads = [f"{name} {column}" for name in names for column in ("requests/s", "p50 ms", "p99 ms")] + ["ratio"] * (len(names) - 1)
    lines = ["| connections | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for connections in CONNECTIONS:
        medians = [[machine.median(column) for column in zip(*results[name, connections], strict=True)] for name in names]
        cells = [f"{rate:,.0f} | {p50:.2f} | {p99:.2f}" for rate, p50, p99 in medians]
        cells += [f"{medians[0][0] / other[0]:.2f}" for other in medians[1:]]
        lines.append(f"| {connections} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="of load in each round")
    parser.add_argument("--rounds", type=int, default=3, help="at each number of connections; the medians are printed")
    options = parser.parse_args()
    noise = machine.Noise()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        started = start(stack, Path(directory))
        results = measure(started, options.rounds, options.seconds, noise)
    print(f"{machine.describe()}; medians of {options.rounds} rounds of {options.seconds:g} s, wrk -t1 on the same machine\n")
    print(table(started, results))
    print(f"\n{noise}")


if __name__ == "__main__":
    main()
