"""What monitoring costs a server: its throughput, and processor time at a fixed rate.

    python -m benchmarks.monitoring [--share 5] [--servers 3] [--blocks 8] [--turn 2] [--rate 5000]

Each block has four rounds at full load (`wrk`): without monitoring, with it twice, and without it.
Its ratio is that of the requests per second. Turning monitoring on also routes requests through the
model's splitter, so this is a part of the cost. Then an open loop sends `--rate` requests a second,
with and without monitoring, and the table shows the processor time of each process. The model is a small table model without computations, so that the relative
cost is as large as possible. The benchmark needs Linux and `wrk`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from benchmarks import machine, openloop, servers, turns, wrk

HANDLER = """
def handle(data, context):
    if data is None:
        return None
    return [{"yes": 0.7, "no": 0.3} if row["body"]["f0"] < 3 else {"yes": 0.2, "no": 0.8} for row in data]
"""
BODY = {f"f{number}": 1.5 * number for number in range(8)} | {"country": "de", "sex": "f"}
JSON = "application/json"
PATH = "/predictions/table"
MONITOR = "/models/table/monitor"
CONNECTIONS = 32
ORDER = (False, True, True, False)  # whether each round of a block is monitored
MAX_PERCENT = 1.0
MIN_ANSWERED = 0.9  # of the requests; a busy machine sends some too late


class Seconds(NamedTuple):
    """Processor seconds of a server's processes, per second of the load."""

    front: float
    worker: float
    monitor: float


@contextmanager
def serving(directory: Path) -> Iterator[servers.Server]:
    directory.mkdir()
    handler = directory / "handler.py"
    handler.write_text(HANDLER)
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 64}
    archive = servers.archive(directory, "table", "--handler", handler, config=config)
    settings = {"state_dir": directory / "state", "job_queue_size": 1000}
    with servers.tsx(directory, archive, **settings) as server:
        servers.first_answer(server, PATH, json.dumps(BODY).encode(), JSON)
        yield server


def switch(server: servers.Server, share: float, *, is_on: bool) -> None:
    """Turn monitoring on or off; the report is answered once the process has read everything."""
    if not is_on:
        server.call(MONITOR, management=True, method="DELETE")
        return
    config = json.dumps({"share": share, "groups": ["sex"]}).encode()
    server.call(MONITOR, config, management=True, method="PUT", content_type=JSON)
    server.call(MONITOR, management=True)


def ratios(
    server: servers.Server, body: Path, share: float, blocks: int, seconds: float
) -> list[float]:
    """Return the time of a request with monitoring, relative to that without, for each block."""
    result = []
    for _ in range(blocks):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for is_on in ORDER:
            switch(server, share, is_on=is_on)
            rates[is_on].append(
                wrk.load(server.inference + PATH, CONNECTIONS, seconds, body, JSON).rate
            )
        result.append(sum(rates[False]) / sum(rates[True]))
    return result


def processor(server: servers.Server) -> Seconds:
    front, worker, monitor = 0.0, 0.0, 0.0
    root = psutil.Process(server.process.pid)
    for process in [root, *root.children(recursive=True)]:
        seconds = sum(process.cpu_times()[:2])
        if process == root:
            front += seconds
        elif "monitor.process.main" in " ".join(process.cmdline()):
            monitor += seconds
        else:
            worker += seconds
    return Seconds(front, worker, monitor)


def at_rate(server: servers.Server, body: Path, rate: float, seconds: float) -> Seconds:
    """Return the processor time of each process at a rate of requests.

    Raises:
        RuntimeError: The machine is too slow for the rate.
    """
    before = processor(server)
    url = server.inference + PATH
    result = openloop.run(url, rate, seconds, CONNECTIONS, body, headers=[f"Content-Type: {JSON}"])
    if result.accepted < MIN_ANSWERED * result.planned:
        raise RuntimeError(f"{result.accepted} of {result.planned} requests were answered")
    return Seconds(
        *(
            (end - start) * rate / result.accepted
            for start, end in zip(before, processor(server), strict=True)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=5, help="of the requests, in percent")
    parser.add_argument("--servers", type=int, default=3, help="one after the other")
    parser.add_argument("--blocks", type=int, default=8, help="of four rounds, for each server")
    parser.add_argument("--turn", type=float, default=2, help="seconds of a round")
    parser.add_argument("--rate", type=float, default=5000, help="requests/s of the open loop")
    parser.add_argument("--seconds", type=float, default=30, help="of each open loop")
    options = parser.parse_args()
    print(f"{machine.describe()}; {options.servers} servers, {options.share:g} % of the requests\n")
    blocks: list[list[float]] = []
    costs: dict[bool, list[Seconds]] = {False: [], True: []}
    dropped: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as root:
        body = Path(root) / "body"
        body.write_text(json.dumps(BODY))
        for number in range(options.servers):
            with serving(Path(root) / str(number)) as server:
                blocks.append(ratios(server, body, options.share, options.blocks, options.turn))
                for is_on in (False, True):
                    switch(server, options.share, is_on=is_on)
                    costs[is_on].append(at_rate(server, body, options.rate, options.seconds))
                dropped.append(json.loads(server.call(MONITOR, management=True))["dropped"])
    effect = turns.effect(blocks)
    print(f"Time of a request at full load: {effect}, {effect.verdict(MAX_PERCENT)}\n")
    print(f"| processor time at {options.rate:g} requests/s | front end | worker | monitor |")
    print("|---|---|---|---|")
    for is_on, name in ((False, "not monitored"), (True, "monitored")):
        medians = (median(seconds) for seconds in zip(*costs[is_on], strict=True))
        print(f"| {name} | {' | '.join(f'{100 * value:.1f} %' for value in medians)} |")
    print(f"\nSamples that were dropped, by server: {dropped}")


if __name__ == "__main__":
    main()
