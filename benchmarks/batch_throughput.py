"""How many rows/s `tsx batch` answers, beside the bare loop of the same handler and the server at
its best: an image and a transformer.

    python benchmarks/batch_throughput.py [image] [tokens] [--rows N] [--rounds 5] [--batch 32]
    [--seconds 5] [--json FILE]

All three have one copy of the model with one thread, and batches of the same size; `tsx batch` may
find its own with --batch 0.

bare    the handler called on batches of all rows, which are in memory before; what it returns is thrown away. No process of tsx.
batch   `tsx batch`: rows from files, answers to JSON lines, by its own summary: from the first row read to the last one on the disk.
online  `tsx serve` under `wrk`, at the number of connections that was best in a first pass over all
of CONNECTIONS.

They run in turns, in another order each round; the ratios are those of each round, and what counts
is their median.
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
KINDS = 64  # different inputs; the rows are these again and again
ROWS = {"image": 4000, "tokens": 40_000}  # some ten seconds
WIDTHS = (16, 16, 16, 32, 32, 64, 64, 128, 128)  # a quarter of those of ResNet-18
PROMISED = 0.95


class Rows(NamedTuple):
    archive: Path
    bodies: list[bytes]
    inputs: Path  # as `tsx batch` gets them
    words: tuple[str, ...]  # and how it reads them


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
        with tempfile.TemporaryDirectory() as place:
            results[name] = measure(name, Path(place), options, noise)
        show(name, results[name])
    print(noise)
    for words in noise.disturbed():
        print(f"NOT QUIET: {words}")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": machine.describe(), "noise": noise.samples, "models": results}, indent=1
            )
        )


def measure(
    name: str, place: Path, options: argparse.Namespace, noise: machine.Noise
) -> dict[str, Any]:
    rows = (make_image if name == "image" else make_tokens)(
        place, options.rows or ROWS[name], options.batch or 32
    )
    directory, bodies = place / "unpacked", place / "bodies"
    subprocess.run(
        [servers.TSX, "archive", "unpack", rows.archive, directory],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    bodies.mkdir()
    for number, body in enumerate(rows.bodies):
        (bodies / str(number)).write_bytes(body)
    count = options.rows or ROWS[name]
    with servers.tsx(place, rows.archive, job_queue_size=1000) as server:
        servers.first_answer(server, f"/predictions/{name}", rows.bodies[0])
        url = f"{server.inference}/predictions/{name}"

        def online(connections: int) -> float:
            return wrk.load(url, connections, options.seconds, bodies / "0").rate

        def tried(connections: int) -> float:
            try:
                return online(connections)
            except wrk.NotAnswered:  # more than it answers in that time
                return 0.0

        best = max(CONNECTIONS, key=tried)
        ways: dict[str, Callable[[], float]] = {
            "bare": lambda: bare(directory, bodies, options.batch, count),
            "batch": lambda: batch(rows, place, options.batch),
            "online": lambda: online(best),
        }
        turns: list[dict[str, float]] = []
        for number in range(options.rounds):
            noise.sample()
            order = [*ways][number % 3 :] + [*ways][: number % 3]
            turns.append({way: ways[way]() for way in order})
    return {
        "rows": count,
        "batch_size": options.batch,
        "connections": best,
        "rounds": turns,
        "ratios": ratios(turns),
    }


def ratios(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the rounds."""
    return {
        way: machine.median([turn["batch"] / turn[way] for turn in turns])
        for way in ("bare", "online")
    }


def show(name: str, found: dict[str, Any]) -> None:
    rates = {
        way: machine.median([turn[way] for turn in found["rounds"]])
        for way in ("bare", "batch", "online")
    }
    text = ", ".join(f"{way} {rate:,.0f} rows/s" for way, rate in rates.items())
    verdict = "holds" if found["ratios"]["bare"] >= PROMISED else "DOES NOT HOLD"
    print(f"{name}: {text} (at {found['connections']} connections)")
    print(
        f"  batch is {found['ratios']['bare']:.1%} of bare, {found['ratios']['online']:.1%} of"
        f" online; {PROMISED:.0%} of bare {verdict}",
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


def batch(rows: Rows, place: Path, batch_size: int) -> float:
    size = ("--batch-size", batch_size) if batch_size else ()
    command = [
        servers.TSX,
        "batch",
        rows.archive,
        rows.inputs,
        "-o",
        place / "out.jsonl",
        "--workers",
        1,
        *size,
        *rows.words,
    ]
    environment = {**servers.clean_environment(), "TSX_CACHE_DIR": str(place / "cache")}
    command += ["--restart", "--json"]
    found = json.loads(
        subprocess.run(
            list(map(str, command)), check=True, capture_output=True, text=True, env=environment
        ).stdout
    )
    if found["errors"]:
        raise RuntimeError(f"{found['errors']} rows failed")
    return float(found["rows_per_second"])


def bare_loop(directory: Path, bodies: Path, batch_size: int, count: int) -> None:
    """Prints rows/s."""
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
    started = time.perf_counter()
    for begin in range(0, count, batch_size):
        answer(begin)
    print(count / (time.perf_counter() - started), flush=True)
    os._exit(0)  # no thread of a library is waited for


def make_image(place: Path, count: int, batch_size: int) -> Rows:
    import numpy as np
    import torch
    from PIL import Image

    sys.path.insert(0, str(handler_efficiency.MODELS))
    from resnet18 import ResNet18

    torch.manual_seed(0)
    net = ResNet18(widths=WIDTHS).eval()
    torch.jit.save(torch.jit.trace(net, torch.zeros(1, 3, 224, 224)), place / "net.pt")  # type: ignore[no-untyped-call]  # torch's
    config = {"batchSize": batch_size, "threads": handler_efficiency.THREADS}
    archive = servers.archive(
        place,
        "image",
        "--serialized-file",
        place / "net.pt",
        "--handler",
        "image_classifier",
        config=config,
    )
    files = place / "rows"
    files.mkdir()
    random, bodies = np.random.default_rng(0), list[bytes]()
    for number in range(count):
        file = files / f"{number:06}.jpg"
        if number < KINDS:
            small = Image.fromarray(random.integers(0, 256, (14, 16, 3), dtype=np.uint8))
            small.resize((320, 280), Image.Resampling.BICUBIC).save(file, quality=90)
            bodies.append(file.read_bytes())
        else:
            file.write_bytes(bodies[number % KINDS])
    return Rows(archive, bodies, files, ())


def make_tokens(place: Path, count: int, batch_size: int) -> Rows:
    import numpy as np
    import pyarrow
    import pyarrow.parquet

    archive = handler_efficiency.make_tokens(place, place / "body", batch_size)
    random = np.random.default_rng(0)
    bodies = [
        random.integers(0, 1000, 64, dtype=np.int64).tobytes() for _ in range(min(KINDS, count))
    ]
    inputs = place / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"tokens": [bodies[number % len(bodies)] for number in range(count)]}), inputs
    )
    return Rows(archive, bodies, inputs, ("--field", "tokens"))


if __name__ == "__main__":
    main()
