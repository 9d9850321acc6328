"""What a quiet model's clients notice while others attack the server: goodput, latency, and how much the front end grows.

    python benchmarks/attacks.py [--seconds 12] [--only NAME ...] [--tsx COMMAND]

The server runs on one core and the clients, good and bad, on another, so that the server has the same processor with and without an
attack. The good client asks a quiet model at a fixed rate and is content with answers within a second. `--tsx` measures the command of
another environment, such as that of an older version. Attacks are in `attackers.py`; only 127.0.0.1 is attacked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

import machine
import openloop
import psutil
import servers
from attackers import ATTACKS

RATE = 45.0  # requests/s of the good client
LIMIT_MS = 1000.0
MIB = 1 << 20
HANDLER = """
import time

def handle(data, context):
    if data is None:
        return None
    return [answer(bytes(row.get("body") or row.get("data") or b"")) for row in data]

def answer(body):
    if body == b"slow":
        time.sleep(0.05)
    return b"x" * (int(body) if body.isdigit() else 1)
"""
ROW = "{:<22} {:>8} {:>8} {:>9} {:>9} {:>9} {:>11}  {}"


class Watched:
    """The most memory that a process had meanwhile."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.first = self.most = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            try:
                self.most = max(self.most, self._process.memory_info().rss)
            except psutil.Error:
                return

    def growth(self) -> float:
        self._over.set()
        self._thread.join()
        return (self.most - self.first) / MIB


def measure(directory: Path, archives: list[Path], name: str | None, seconds: float, body: Path) -> None:
    with servers.tsx(directory, *archives) as server:
        for model in ("quiet", "busy"):
            servers.first_answer(server, f"/predictions/{model}", b"1")
        for process in [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]:
            process.cpu_affinity([0])
        watched = Watched(server.process.pid)
        attacker = None
        if name is not None:
            url = server.management if ATTACKS[name].role == "management" else server.inference
            command = [sys.executable, str(Path(__file__).with_name("attackers.py")), name, urlsplit(url).netloc, str(seconds)]
            attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        result = openloop.run(f"{server.inference}/predictions/quiet", RATE, seconds, 32, body, limit_ms=LIMIT_MS)
        did = attacker.communicate(timeout=seconds + 60)[0].strip() if attacker is not None else ""
        share = result.goodput / RATE
        print(
            ROW.format(
                *(name or "(none)", f"{result.goodput:.1f}", f"{share:.0%}", f"{result.p50:.1f}", f"{result.p99:.1f}"),
                *(f"{result.most:.0f}", f"{watched.growth():+.0f}", did),
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--tsx", type=Path, help="the command that is measured; that of this environment if not set")
    options = parser.parse_args()
    if options.tsx is not None:
        servers.TSX = options.tsx.absolute()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"{machine.describe()}; {options.seconds:g} s each; good client: {RATE:g} requests/s, content within {LIMIT_MS:g} ms\n")
    print(ROW.format("attack", "goodput", "of all", "p50 ms", "p99 ms", "most ms", "growth MiB", "the attacker sent"))
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "handler.py").write_text(HANDLER)
        (directory / "body").write_bytes(b"1")
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 8, "jobQueueSize": 50}
        archives = [servers.archive(directory, name, "--handler", directory / "handler.py", config=config) for name in ("quiet", "busy")]
        for name in (None, *options.only):
            measure(directory, archives, name, options.seconds, directory / "body")
    print(f"\n{json.dumps({name: ATTACKS[name].does for name in options.only}, indent=1)}")


if __name__ == "__main__":
    main()
