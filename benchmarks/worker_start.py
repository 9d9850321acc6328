"""The start time of a second worker without that of its model, and the memory of four workers.

    python benchmarks/worker_start.py [--rounds 3]

The model has 500 MB of weights in a .pth, on the CPU. The benchmark needs Linux, since it reads the
proportional set size from /proc.
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
    """Ask until each worker has read its weights; return the loading times by pid."""
    seconds: dict[int, float] = {}
    deadline = time.monotonic() + 120
    # The requests are simultaneous; otherwise the same idle worker would answer all.
    with ThreadPoolExecutor(workers) as clients:
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
    """Scale to `workers`; return the seconds until all are ready."""
    start = time.perf_counter()
    server.call(
        f"/models/large?min_worker={workers}&max_worker={workers}&synchronous=true",
        management=True,
        method="PUT",
    )
    return time.perf_counter() - start


def memory(server: servers.Server, workers: set[int]) -> tuple[int, int]:
    """Return the PSS of the workers, and of all processes of the server, in bytes."""
    memory_by_pid = server.proportional_memory()
    return sum(memory_by_pid[pid] for pid in workers), sum(memory_by_pid.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    noise = machine.Noise()
    starts, loads = [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with servers.tsx(directory, pack(directory), "--workers", "1") as server:
            servers.first_answer(server, "/predictions/large", b"1")
            single_memory = memory(server, set(ask_all(server, 1)))
            for _ in range(options.rounds):
                noise.sample()
                first_pids = set(ask_all(server, 1))
                starts.append(scale(server, 2))
                loads.append(
                    next(
                        seconds
                        for pid, seconds in ask_all(server, 2).items()
                        if pid not in first_pids
                    )
                )
                scale(server, 1)
            scale(server, WORKERS)
            scaled_memory = memory(server, set(ask_all(server, WORKERS)))
    start, load = machine.median(starts), machine.median(loads)
    print(f"{machine.describe()}; medians of {options.rounds} rounds\n")
    extra_s = start - load
    print(
        f"second worker ready after {start:.3f} s; loading the model took {load:.3f} s of it:"
        f" {extra_s:.3f} s beyond (at most 0.2)"
    )
    for label, single_bytes, scaled_bytes in (
        ("workers", single_memory[0], scaled_memory[0]),
        ("all processes", single_memory[1], scaled_memory[1]),
    ):
        ratio = f"ratio {scaled_bytes / single_bytes:.2f} (below 1.5)"
        print(
            f"{label}: {single_bytes / 1e6:,.0f} MB with one worker, {scaled_bytes / 1e6:,.0f} MB with"
            f" {WORKERS}: {ratio}"
        )
    print(f"\n{noise}")


if __name__ == "__main__":
    main()
