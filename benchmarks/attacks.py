"""The effect of attacks on a quiet model's clients: goodput, latency, and the front end's growth.

    python benchmarks/attacks.py [--seconds 12] [--only NAME ...] [--tsx COMMAND]
    python benchmarks/attacks.py --soak 30

The server runs on one core and all clients on another, so that the server has the same processor
with and without an attack. The good client asks a quiet model at a fixed rate and expects responses
within a second. `--tsx` measures the command of another environment, such as an older version.
Attacks are in `attackers.py`; they attack only 127.0.0.1.

With `--soak` the attackers take turns, two at a time, for the given minutes. The server has limits
per client, and the attackers' address differs from the good client's. The front end has one core.
The workers and the good client share the added_histogram, whose idle time is for the attackers. The
exit code is 1 if the good client's p99 is more than three times as long as in turns without
attackers, or if a process of the server grows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import machine
import openloop
import psutil
import servers
from attackers import ATTACKS
from chaos.flatness import Usage, mib_per_hour, rising
from flood import LIMITS

from tsx_cli.bench.load.generator import measure as measure_load
from tsx_cli.bench.load.histogram import Histogram

RATE = 45.0  # the good client's requests per second
LIMIT_MS = 1000.0
CLIENT_CORE = max(os.sched_getaffinity(0))
MIB = 1 << 20
HANDLER = """
import time

from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    return [answer(bytes(row.get("body") or row.get("data") or b""), index, context) for index, row in enumerate(data)]

def answer(body, index, context):
    if body == b"slow":
        time.sleep(0.05)
    if body == b"stream":
        for _ in range(100_000):
            send_intermediate_predict_response([b"x"], {index: context.get_request_id(index)}, "", 200, context)
    return b"x" * (int(body) if body.isdigit() else 1)
"""
GRPC_PORTS = servers.free_ports(2)
ROW = "{:<25} {:>8} {:>8} {:>9} {:>9} {:>9} {:>11}  {}"


class MemoryWatch:
    """A thread that watches the peak memory of a process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.first = self.peak = self._process.memory_info().rss
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop_event.wait(0.1):
            try:
                self.peak = max(self.peak, self._process.memory_info().rss)
            except psutil.Error:
                return

    def growth(self) -> float:
        self._stop_event.set()
        self._thread.join()
        return (self.peak - self.first) / MIB


@contextmanager
def serving(
    directory: Path, archives: list[Path], worker_core: int = 0, **settings: object
) -> Iterator[servers.Server]:
    """Start a server with its front end on the first core and both models loaded."""
    grpc = {
        "enable_grpc": "true",
        "grpc_inference_port": GRPC_PORTS[0],
        "grpc_management_port": GRPC_PORTS[1],
    }
    with servers.tsx(directory, *archives, **grpc, **settings) as server:
        for model in ("quiet", "busy"):
            servers.first_answer(server, f"/predictions/{model}", b"1")
        front_end, *workers = family(server)
        front_end.cpu_affinity([0])
        for process in workers:
            process.cpu_affinity([worker_core])
        yield server


def family(server: servers.Server) -> list[psutil.Process]:
    front_end = psutil.Process(server.process.pid)
    return [front_end, *front_end.children(recursive=True)]


def attack(server: servers.Server, name: str, seconds: float) -> subprocess.Popen[str]:
    urls = {
        "inference": server.inference,
        "management": server.management,
        "grpc": f"grpc://127.0.0.1:{GRPC_PORTS[0]}",
    }
    address = urlsplit(urls[ATTACKS[name].role]).netloc
    command = [
        sys.executable,
        str(Path(__file__).with_name("attackers.py")),
        name,
        address,
        str(seconds),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ask(server: servers.Server, seconds: float, body: Path) -> openloop.Result:
    return openloop.run(
        f"{server.inference}/predictions/quiet", RATE, seconds, 32, body, limit_ms=LIMIT_MS
    )


def measure(directory: Path, archives: list[Path], name: str | None, seconds: float) -> None:
    with serving(directory, archives) as server:
        memory_watch = MemoryWatch(server.process.pid)
        attacker = attack(server, name, seconds) if name is not None else None
        result = ask(server, seconds, directory / "body")
        attacker_report = (
            attacker.communicate(timeout=seconds + 60)[0].strip() if attacker is not None else ""
        )
        figures = (
            f"{result.goodput:.1f}",
            f"{result.goodput / RATE:.0%}",
            f"{result.p50:.1f}",
            f"{result.p99:.1f}",
            f"{result.most:.0f}",
        )
        print(
            ROW.format(
                name or "(none)", *figures, f"{memory_watch.growth():+.0f}", attacker_report
            ),
            flush=True,
        )


def soak(
    directory: Path, archives: list[Path], minutes: float, attacks: list[str], turn: float = 20.0
) -> bool:
    """Run attacks in turns; return whether the good client's p99 stays low and no process grows.

    Each round begins with a turn without attackers.
    """
    with serving(directory, archives, CLIENT_CORE, **LIMITS) as server:
        plan = openloop.planned(
            f"{server.inference}/predictions/quiet", RATE, turn, 32, directory / "body"
        )
        pairs: list[Sequence[str]] = [
            (),
            *(attacks[index : index + 2] for index in range(0, len(attacks), 2)),
        ]
        samples: dict[str, list[Usage]] = {}
        quiet_latencies, attack_latencies = Histogram(), Histogram()
        rounds, begin = 0, time.monotonic()
        while time.monotonic() - begin < minutes * 60:
            rounds += 1
            for names in pairs:
                attackers = [attack(server, name, turn) for name in names]
                result = measure_load(plan)
                merge(attack_latencies if names else quiet_latencies, result.histogram)
                for attacker in attackers:
                    attacker.communicate(timeout=60)
                row = openloop.row(plan, result, LIMIT_MS)
                figures = (
                    f"goodput {row.goodput:.1f}/s, p50 {row.p50:.1f} ms, p99 {row.p99:.1f} ms, most"
                    f" {row.most:.0f} ms"
                )
                print(f"{rounds} {' and '.join(names) or '(none)'}: {figures}", flush=True)
            for process in family(server):
                usage = process.memory_info().rss, process.num_fds(), process.num_threads()
                samples.setdefault(f"{process.name()} {process.pid}", []).append(
                    Usage(time.monotonic(), *usage)
                )
        return verdict(rounds, quiet_latencies, attack_latencies, samples)


def merge(histogram: Histogram, added_histogram: Histogram) -> None:
    histogram.counts.update(added_histogram.counts)
    histogram.total += added_histogram.total
    histogram.greatest = max(histogram.greatest, added_histogram.greatest)


def verdict(
    rounds: int,
    quiet_latencies: Histogram,
    attack_latencies: Histogram,
    samples: dict[str, list[Usage]],
) -> bool:
    """Print the result. The first fifth of the samples is ignored, while caches fill."""
    is_flat = True
    for name, usages in samples.items():
        warm_usages = usages[len(usages) // 5 :]
        if len(warm_usages) <= max(2, rounds // 2):
            continue
        is_flat = is_flat and not rising(warm_usages)
        first_mib = warm_usages[0].memory / MIB
        last_mib = warm_usages[-1].memory / MIB
        rate = mib_per_hour(warm_usages)
        print(
            f"{name}: {first_mib:.1f} -> {last_mib:.1f} MiB ({rate:+.1f} an hour)"
            f" {', '.join(rising(warm_usages)) or 'flat'}"
        )
    for name, of in (("alone", quiet_latencies), ("attacked", attack_latencies)):
        print(
            f"{name}: {len(of)} answers, "
            + ", ".join(
                f"p{100 * q:g} {1000 * of.quantile(q):.1f} ms" for q in (0.5, 0.9, 0.99, 0.999)
            )
        )
    ratio = attack_latencies.quantile(0.99) / quiet_latencies.quantile(0.99)
    print(f"p99 under attack is {ratio:.1f} times the undisturbed one (at most 3)")
    return is_flat and ratio <= 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument(
        "--tsx", type=Path, help="the command that is measured; that of this environment if not set"
    )
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="all attackers in turn for so long"
    )
    options = parser.parse_args()
    if options.tsx is not None:
        servers.TSX = options.tsx.absolute()
    os.sched_setaffinity(0, {CLIENT_CORE})
    print(
        f"{machine.describe()}; good client: {RATE:g} requests/s, content within {LIMIT_MS:g} ms\n"
    )
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        (directory / "handler.py").write_text(HANDLER)
        (directory / "body").write_bytes(b"1")
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 8, "jobQueueSize": 50}
        archives = [
            servers.archive(directory, name, "--handler", directory / "handler.py", config=config)
            for name in ("quiet", "busy")
        ]
        if options.soak:
            return 0 if soak(directory, archives, options.soak, options.only) else 1
        print(
            ROW.format(
                "attack",
                "goodput",
                "of all",
                "p50 ms",
                "p99 ms",
                "most ms",
                "growth MiB",
                "the attacker sent",
            )
        )
        for name in (None, *options.only):
            measure(directory, archives, name, options.seconds)
    print(f"\n{json.dumps({name: ATTACKS[name].does for name in options.only}, indent=1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
