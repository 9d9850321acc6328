"""How long a second worker of a loaded model takes beyond loading the model, and what four workers
weigh beside one.

    python benchmarks/worker_start.py [--rounds 3]

The model holds 500 MB of weights, in a .pth, on CPU. Needs Linux (the memory is the proportional
set size of /proc).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machine
import servers
import torch

MODELS = Path(__file__).parent / "models"
WORKERS = 4


def pack(directory: Path) -> Path:
    torch.manual_seed(0)
    torch.save({"weight": torch.rand(125_000, 1_000)}, directory / "large.pth")
    return servers.archive(
        *(
            directory,
            "large",
            "--serialized-file",
            directory / "large.pth",
            "--model-file",
            MODELS / "large.py",
        ),
        *("--handler", MODELS / "timed.py"),
        config={"deviceType": "cpu"},
    )


def ask_all(server: servers.Server, workers: int) -> dict[int, float]:
    """Ask until each worker has answered, so that each has read all its weights: the seconds that
    loading took, by pid.
    """
    seconds: dict[int, float] = {}
    deadline = time.monotonic() + 120
    with ThreadPoolExecutor(
        workers
    ) as clients:  # all at once, or one idle worker would answer every time
        while len(seconds) < workers:
            for answer in map(
                json.loads,
                clients.map(lambda _: server.call("/predictions/large", b"1"), range(2 * workers)),
            ):
                seconds[answer["pid"]] = answer["seconds"]
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"only {len(seconds)} of {workers} workers answered within two minutes"
                )
    return seconds


def scale(server: servers.Server, workers: int) -> float:
    """The seconds until so many workers are ready."""
    started = time.perf_counter()
    server.call(
        f"/models/large?min_worker={workers}&max_worker={workers}&synchronous=true",
        management=True,
        method="PUT",
    )
    return time.perf_counter() - started


def memory(server: servers.Server, workers: set[int]) -> tuple[int, int]:
    """PSS of the workers, and of the whole tree, in bytes."""
    each = server.proportional_memory()
    return sum(each[pid] for pid in workers), sum(each.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    noise = machine.Noise()
    starts, loads = [], []
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        with servers.tsx(directory, pack(directory), "--workers", "1") as server:
            servers.first_answer(server, "/predictions/large", b"1")
            one = memory(server, set(ask_all(server, 1)))
            for _ in range(options.rounds):
                noise.sample()
                first = set(ask_all(server, 1))
                starts.append(scale(server, 2))
                loads.append(
                    next(seconds for pid, seconds in ask_all(server, 2).items() if pid not in first)
                )
                scale(server, 1)
            scale(server, WORKERS)
            four = memory(server, set(ask_all(server, WORKERS)))
    start, load = machine.median(starts), machine.median(loads)
    print(f"{machine.describe()}; medians of {options.rounds} rounds\n")
    beyond = start - load
    print(
        f"second worker ready after {start:.3f} s; loading the model took {load:.3f} s of it:"
        f" {beyond:.3f} s beyond (at most 0.2)"
    )
    for what, single, several in (("workers", one[0], four[0]), ("all processes", one[1], four[1])):
        ratio = f"ratio {several / single:.2f} (below 1.5)"
        print(
            f"{what}: {single / 1e6:,.0f} MB with one worker, {several / 1e6:,.0f} MB with"
            f" {WORKERS}: {ratio}"
        )
    print(f"\n{noise}")


if __name__ == "__main__":
    main()
