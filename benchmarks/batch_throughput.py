"""The rows/s of `tsx batch`, compared with a bare loop of the handler and with the server.

    python benchmarks/batch_throughput.py [image] [tokens] [--rows N] [--rounds 5] [--batch 32]
    [--seconds 5] [--json FILE]

The models are an image classifier and a transformer. All three contenders have one copy of the
model with one thread, and batches of the same size. With --batch 0, `tsx batch` chooses the size.

bare    a loop that calls the handler with batches of rows from memory, and discards the results.
        No process of tsx runs.
batch   `tsx batch`, which reads rows from files and writes JSON Lines. Its summary gives the time
        from the first row read to the last one on the disk.
online  `tsx serve` under `wrk`, with the best number of CONNECTIONS in a first pass.

They run in turns, in a different order each round. The results are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import handler_efficiency
import machine
import servers
import wrk

CONNECTIONS = (16, 64, 128, 256)
DISTINCT_INPUTS = 64  # The rows repeat these inputs.
ROWS = {"image": 4000, "tokens": 40_000}  # rows for about ten seconds
WIDTHS = (16, 16, 16, 32, 32, 64, 64, 128, 128)  # a quarter of the channels of ResNet-18
MIN_BARE_SHARE = 0.95


class Rows(NamedTuple):
    archive: Path
    bodies: list[bytes]
    inputs: Path  # the inputs of `tsx batch`
    options: tuple[str, ...]  # options of `tsx batch` for these inputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="image|tokens")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--bare", nargs=2, type=Path, metavar=("DIRECTORY", "BODIES"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.bare:
        bare_loop(*options.bare, options.batch or 32, options.rows)
        return
    print(machine.describe())
    if busy := machine.busy_before():
        print(f"NOT QUIET: {busy}")
    noise, results = machine.Noise(), {}
    for name in options.models or ROWS:
        with tempfile.TemporaryDirectory() as temporary:
            results[name] = measure(name, Path(temporary), options, noise)
        show(name, results[name])
    print(noise)
    for disturbance in noise.disturbed():
        print(f"NOT QUIET: {disturbance}")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": machine.describe(), "noise": noise.samples, "models": results}, indent=1
            )
        )


def measure(
    name: str, parent: Path, options: argparse.Namespace, noise: machine.Noise
) -> dict[str, Any]:
    rows = (make_image if name == "image" else make_tokens)(
        parent, options.rows or ROWS[name], options.batch or 32
    )
    directory, bodies = parent / "unpacked", parent / "bodies"
    subprocess.run(
        [servers.TSX, "archive", "unpack", rows.archive, directory],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    bodies.mkdir()
    for number, body in enumerate(rows.bodies):
        (bodies / str(number)).write_bytes(body)
    count = options.rows or ROWS[name]
    with servers.tsx(parent, rows.archive, job_queue_size=1000) as server:
        servers.first_answer(server, f"/predictions/{name}", rows.bodies[0])
        url = f"{server.inference}/predictions/{name}"

        def online(connections: int) -> float:
            return wrk.load(url, connections, options.seconds, bodies / "0").rate

        def measured_rate(connections: int) -> float:
            try:
                return online(connections)
            except wrk.NotAnswered:  # The server refused some of the connections.
                return 0.0

        best_connections = max(CONNECTIONS, key=measured_rate)
        contenders: dict[str, Callable[[], float]] = {
            "bare": lambda: bare(directory, bodies, options.batch, count),
            "batch": lambda: batch(rows, parent, options.batch),
            "online": lambda: online(best_connections),
        }
        rounds: list[dict[str, float]] = []
        for number in range(options.rounds):
            noise.sample()
            order = [*contenders][number % 3 :] + [*contenders][: number % 3]
            rounds.append({name: contenders[name]() for name in order})
    return {
        "rows": count,
        "batch_size": options.batch,
        "connections": best_connections,
        "rounds": rounds,
        "ratios": ratios(rounds),
    }


def ratios(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the rounds."""
    return {
        name: machine.median([turn["batch"] / turn[name] for turn in rounds])
        for name in ("bare", "online")
    }


def show(name: str, results: dict[str, Any]) -> None:
    rates = {
        name: machine.median([turn[name] for turn in results["rounds"]])
        for name in ("bare", "batch", "online")
    }
    text = ", ".join(f"{name} {rate:,.0f} rows/s" for name, rate in rates.items())
    verdict = "holds" if results["ratios"]["bare"] >= MIN_BARE_SHARE else "DOES NOT HOLD"
    print(f"{name}: {text} (at {results['connections']} connections)")
    print(
        f"  batch is {results['ratios']['bare']:.1%} of bare, {results['ratios']['online']:.1%} of"
        f" online; {MIN_BARE_SHARE:.0%} of bare {verdict}",
        flush=True,
    )


def bare(directory: Path, bodies: Path, batch_size: int, count: int) -> float:
    command = [
        sys.executable,
        __file__,
        "--bare",
        directory,
        bodies,
        "--batch",
        str(batch_size),
        "--rows",
        str(count),
    ]
    return float(
        subprocess.run(
            list(map(str, command)), check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
    )


def batch(rows: Rows, directory: Path, batch_size: int) -> float:
    size = ("--batch-size", batch_size) if batch_size else ()
    command = [
        servers.TSX,
        "batch",
        rows.archive,
        rows.inputs,
        "-o",
        directory / "out.jsonl",
        "--workers",
        1,
        *size,
        *rows.options,
    ]
    environment = {**servers.clean_environment(), "TSX_CACHE_DIR": str(directory / "cache")}
    command += ["--restart", "--json"]
    summary = json.loads(
        subprocess.run(
            list(map(str, command)), check=True, capture_output=True, text=True, env=environment
        ).stdout
    )
    if summary["errors"]:
        raise RuntimeError(f"{summary['errors']} rows failed")
    return float(summary["rows_per_second"])


def bare_loop(directory: Path, bodies: Path, batch_size: int, count: int) -> None:
    """Print the rows/s of the bare loop."""
    model = handler_efficiency.load(directory, batch_size)
    contents = [
        file.read_bytes() for file in sorted(bodies.iterdir(), key=lambda file: int(file.name))
    ]
    model.context.begin([f"id-{number}\r\n\r\n" for number in range(batch_size)])

    def answer(begin: int) -> None:
        model.entry.call(
            [
                {"body": bytearray(contents[row % len(contents)])}
                for row in range(begin, begin + batch_size)
            ],
            model.context,
        )

    for _ in range(3):
        answer(0)
    start = time.perf_counter()
    for begin in range(0, count, batch_size):
        answer(begin)
    print(count / (time.perf_counter() - start), flush=True)
    os._exit(0)  # This exit does not wait for threads of the library.


def make_image(directory: Path, count: int, batch_size: int) -> Rows:
    import numpy as np
    import torch
    from PIL import Image

    sys.path.insert(0, str(handler_efficiency.MODELS))
    from resnet18 import ResNet18

    torch.manual_seed(0)
    net = ResNet18(widths=WIDTHS).eval()
    torch.jit.save(torch.jit.trace(net, torch.zeros(1, 3, 224, 224)), directory / "net.pt")  # type: ignore[no-untyped-call]  # torch's
    config = {"batchSize": batch_size, "threads": handler_efficiency.THREADS}
    archive = servers.archive(
        directory,
        "image",
        "--serialized-file",
        directory / "net.pt",
        "--handler",
        "image_classifier",
        config=config,
    )
    files = directory / "rows"
    files.mkdir()
    random, bodies = np.random.default_rng(0), list[bytes]()
    for number in range(count):
        file = files / f"{number:06}.jpg"
        if number < DISTINCT_INPUTS:
            thumbnail = Image.fromarray(random.integers(0, 256, (14, 16, 3), dtype=np.uint8))
            thumbnail.resize((320, 280), Image.Resampling.BICUBIC).save(file, quality=90)
            bodies.append(file.read_bytes())
        else:
            file.write_bytes(bodies[number % DISTINCT_INPUTS])
    return Rows(archive, bodies, files, ())


def make_tokens(directory: Path, count: int, batch_size: int) -> Rows:
    import numpy as np
    import pyarrow
    import pyarrow.parquet

    archive = handler_efficiency.make_tokens(directory, directory / "body", batch_size)
    random = np.random.default_rng(0)
    bodies = [
        random.integers(0, 1000, 64, dtype=np.int64).tobytes()
        for _ in range(min(DISTINCT_INPUTS, count))
    ]
    inputs = directory / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"tokens": [bodies[number % len(bodies)] for number in range(count)]}), inputs
    )
    return Rows(archive, bodies, inputs, ("--field", "tokens"))


if __name__ == "__main__":
    main()
