"""What monitoring costs a server: processor time at a fixed rate, and requests/s at full load.

    python -m benchmarks.monitoring [--share 5] [--servers 3] [--blocks 4] [--seconds 4] [--rate 5000]

Each block has four rounds: without monitoring, with it twice, and without it. At a fixed rate, its
ratio is that of the processor time of front end and worker, which is what the server loses where
the monitor process has a core of its own. At full load (`wrk`), the ratio is that of the time of a
request, and the monitor process, the load and the server share the cores. Monitoring also routes
requests through the model's splitter, so this is a part of the cost. The model is a handler without
computations, so that the relative cost is as large as possible. The benchmark needs Linux and
`wrk`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
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


def blocks_of(
    server: servers.Server, share: float, blocks: int, measure: Callable[[bool], float]
) -> list[float]:
    """Return what is measured with monitoring, relative to that without, for each block."""
    result = []
    for _ in range(blocks):
        values: dict[bool, list[float]] = {False: [], True: []}
        for is_on in ORDER:
            switch(server, share, is_on=is_on)
            values[is_on].append(measure(is_on))
        result.append(sum(values[True]) / sum(values[False]))
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
    parser.add_argument("--blocks", type=int, default=4, help="of four rounds, for each server")
    parser.add_argument("--seconds", type=int, default=4, help="of a round")
    parser.add_argument("--rate", type=float, default=5000, help="requests/s of the open loop")
    options = parser.parse_args()
    print(f"{machine.describe()}; {options.servers} servers, {options.share:g} % of the requests\n")
    paced: list[list[float]] = []
    full: list[list[float]] = []
    costs: dict[bool, list[Seconds]] = {False: [], True: []}
    dropped: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as root:
        body = Path(root) / "body"
        body.write_text(json.dumps(BODY))
        for number in range(options.servers):
            with serving(Path(root) / str(number)) as server:

                def at_fixed_rate(is_on: bool, server: servers.Server = server) -> float:
                    cost = at_rate(server, body, options.rate, options.seconds)
                    costs[is_on].append(cost)
                    return cost.front + cost.worker

                def at_full_load(is_on: bool, server: servers.Server = server) -> float:
                    url = server.inference + PATH
                    return 1 / wrk.load(url, CONNECTIONS, options.seconds, body, JSON).rate

                paced.append(blocks_of(server, options.share, options.blocks, at_fixed_rate))
                full.append(blocks_of(server, options.share, options.blocks, at_full_load))
                dropped.append(json.loads(server.call(MONITOR, management=True))["dropped"])
    print(f"| processor time at {options.rate:g} requests/s | front end | worker | monitor |")
    print("|---|---|---|---|")
    for is_on, name in ((False, "not monitored"), (True, "monitored")):
        medians = (median(seconds) for seconds in zip(*costs[is_on], strict=True))
        print(f"| {name} | {' | '.join(f'{100 * value:.1f} %' for value in medians)} |")
    effect = turns.effect(paced)
    print(f"\nFront end and worker at this rate: {effect}, {effect.verdict(MAX_PERCENT)}")
    print(f"Time of a request at full load: {turns.effect(full)}")
    print(f"Samples that were dropped, by server: {dropped}")


if __name__ == "__main__":
    main()
