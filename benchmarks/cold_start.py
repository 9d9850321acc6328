"""The time until a user sees a result: of `tsx --help`, and of `tsx serve` until its first response.

    python benchmarks/cold_start.py [--rounds 5]

The times are compared with the time of importing torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import machine
import servers

DIGITS = Path(__file__).parents[1] / "examples" / "digits"
IMAGE = (DIGITS / "images" / "7.png").read_bytes()
HANDLER = ("--handler", DIGITS / "handler.py", "--extra-files", DIGITS / "index_to_name.json")
LOAD_EAGER = f"""
import sys, time, torch
sys.path.insert(0, {str(DIGITS)!r})
started = time.perf_counter()
from model import DigitNet
model = DigitNet()
model.load_state_dict(torch.load({str(DIGITS / "digits.pth")!r}, weights_only=True))
model.eval()
print(time.perf_counter() - started)
"""
LOAD_EXPORTED = f"""
import time, torch
started = time.perf_counter()
torch.export.load({str(DIGITS / "digits.pt2")!r}).module()
print(time.perf_counter() - started)
"""


def seconds(command: list[str | Path]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def program_seconds(program: str) -> float:
    return float(
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout
    )


def first_answer_seconds(*model: str | Path) -> float:
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        with servers.tsx(Path(directory), *model) as server:
            servers.first_answer(server, "/predictions/digits", IMAGE)
            return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    noise = machine.Noise()
    measures: dict[str, Callable[[], float]] = {
        "help": lambda: seconds([servers.TSX, "--help"]),
        "import torch": lambda: seconds([sys.executable, "-c", "import torch"]),
        "load digits.pth": lambda: program_seconds(LOAD_EAGER),
        "load digits.pt2": lambda: program_seconds(LOAD_EXPORTED),
        "serve digits.pth": lambda: first_answer_seconds(
            DIGITS / "digits.pth", "--model-file", DIGITS / "model.py", *HANDLER
        ),
        "serve digits.pt2": lambda: first_answer_seconds(DIGITS / "digits.pt2", *HANDLER),
    }
    times: dict[str, list[float]] = {name: [] for name in measures}
    for measure in measures.values():
        measure()  # After this run, all files are in memory.
    for _ in range(options.rounds):
        noise.sample()
        for name, measure in measures.items():
            times[name].append(measure())
    median = {name: machine.median(values) for name, values in times.items()}
    print(f"{machine.describe()}; medians of {options.rounds} rounds\n")
    print(
        f"tsx --help: {median['help']:.3f} s (at most 0.2); python -c 'import torch':"
        f" {median['import torch']:.3f} s"
    )
    for file in ("digits.pth", "digits.pt2"):
        max_s = 1.5 * median["import torch"] + median[f"load {file}"]
        needed_s = median[f"serve {file}"]
        print(
            f"tsx serve {file} to the first answer: {needed_s:.3f} s; allowed are 1.5 x"
            f" {median['import torch']:.3f} s + {median[f'load {file}']:.3f} s to load ="
            f" {max_s:.3f} s: ratio {needed_s / max_s:.2f} (at most 1)"
        )
    print(f"\n{noise}")


if __name__ == "__main__":
    main()
