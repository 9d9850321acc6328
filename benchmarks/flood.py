"""Measure the goodput of a quiet model alone and under floods of refused requests.

    python benchmarks/flood.py [--seconds 10] [--rounds 3] [--server-cores 0,1] [--attacker-cores
    2,3]

Each case runs with the limits per client off and then on. The quiet model takes 20 ms for a batch
and gets 45 requests a second; a response later than `--limit-ms` is useless. The attacker repeats
the same request on 64 connections, each time as soon as the previous response arrives. If cores are
given, the server has the same cores in every round, even without an attacker; otherwise server and
attacker share all cores. The goal is that the quiet model keeps 80 % of its goodput.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import machine
import openloop
import psutil
import servers

HANDLER = Path(__file__).parent / "models" / "slow.py"
TOKEN = "quiet-and-right"
ATTACKER_HOST = "127.0.0.2"  # differs from the quiet client's 127.0.0.1; macOS lacks this address
# limits per client, which the attacker exceeds
LIMITS = {
    "max_connections_per_client": 64,
    "max_requests_per_client": 1000,
    "max_failed_tokens": 10,
}


class Flood(NamedTuple):
    name: str
    path: str
    token: str = TOKEN


FLOODS = (
    Flood("unknown model", "/predictions/nobody"),
    Flood("unknown path", "/nowhere"),
    Flood("wrong token", "/predictions/quiet", "wrong"),
    Flood("full queue", "/predictions/busy"),
)


class Row(NamedTuple):
    limits: str
    flood: str
    goodput: float
    p99: float
    refused: float  # the attacker's refusals per second


def attack(
    host: str, port: int, request: bytes, connections: int, cores: Sequence[int], pipe: Connection
) -> None:
    """Attack until the pipe has a message.

    Then send back the numbers of responses and of connections that the server closed.
    """
    pin(os.getpid(), cores)
    selector = selectors.DefaultSelector()
    responses = closed_connections = 0

    def connect() -> None:
        sock = socket.create_connection((host, port), source_address=(ATTACKER_HOST, 0))
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            sock.send(request)

    for _ in range(connections):
        connect()
    while not pipe.poll():
        for key, _ in selector.select(0.1):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                data = sock.recv(65536)
                if data:
                    responses += 1
                    sock.send(request)
                    continue
            except OSError:
                pass
            closed_connections += 1
            selector.unregister(sock)
            sock.close()
            connect()
    pipe.send((responses, closed_connections))


@contextlib.contextmanager
def flooding(
    server: servers.Server, flood: Flood | None, connections: int, cores: Sequence[int]
) -> Iterator[list[int]]:
    """Attack during the `with` block; afterwards the list has the number of attacker's responses."""
    response_counts: list[int] = []
    if flood is None:
        yield response_counts
        return
    address = urlsplit(server.inference)
    request = (
        f"POST {flood.path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer"
        f" {flood.token}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    )
    parent_pipe, child_pipe = multiprocessing.Pipe()
    arguments = (address.hostname, address.port, request, connections, cores, child_pipe)
    process = multiprocessing.get_context("spawn").Process(
        target=attack, args=arguments, daemon=True
    )
    process.start()
    try:
        time.sleep(1)  # This gives the attacker time to open its connections.
        yield response_counts
    finally:
        parent_pipe.send("stop")
        if parent_pipe.poll(30):
            response_counts.append(parent_pipe.recv()[0])
        process.join(5)
        process.kill()


def pin(pid: int, cores: Sequence[int]) -> None:
    if cores:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            process.cpu_affinity(list(cores))


def measure(
    server: servers.Server,
    body: Path,
    flood: Flood | None,
    limits: str,
    options: argparse.Namespace,
) -> Row:
    goodputs, p99s, rates = [], [], []
    headers = (f"Authorization: Bearer {TOKEN}",)
    for _ in range(options.rounds):
        start = time.monotonic()
        with flooding(
            server, flood, options.connections, options.attacker_cores
        ) as response_counts:
            url = f"{server.inference}/predictions/quiet"
            result = openloop.run(
                url,
                options.rate,
                options.seconds,
                16,
                body,
                headers=headers,
                limit_ms=options.limit_ms,
            )
        goodputs.append(result.goodput)
        p99s.append(result.p99)
        rates.append(sum(response_counts) / (time.monotonic() - start))
    return Row(
        limits,
        flood.name if flood else "alone",
        *(machine.median(column) for column in (goodputs, p99s, rates)),
    )


def table(rows: list[Row]) -> str:
    undisturbed_goodput = {row.limits: row.goodput for row in rows if row.flood == "alone"}
    lines = ["| limits | flood | goodput/s | of alone | p99 ms | refusals/s |", "|---" * 6 + "|"]
    lines += [
        f"| {row.limits} | {row.flood} | {row.goodput:.1f} | {row.goodput / undisturbed_goodput[row.limits]:.0%}"
        f" | {row.p99:.1f} | {row.refused:,.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def cores(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10, help="length of a round")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds per case; the medians are printed"
    )
    parser.add_argument(
        "--rate", type=float, default=45, help="requests a second for the quiet model"
    )
    parser.add_argument(
        "--limit-ms", type=float, default=200, help="after which a response is useless"
    )
    parser.add_argument("--connections", type=int, default=64, help="connections of the attacker")
    parser.add_argument("--server-cores", type=cores, default=[], help="such as 0,1")
    parser.add_argument("--attacker-cores", type=cores, default=[], help="such as 2,3")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        body = directory / "body"
        body.write_bytes(b'{"x":1}')
        config: dict[str, object] = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 8}
        quiet_archive = servers.archive(directory, "quiet", "--handler", HANDLER, config=config)
        busy_archive = servers.archive(
            directory, "busy", "--handler", HANDLER, config=config | {"jobQueueSize": 4}
        )
        for limits, values in (("off", {}), ("on", LIMITS)):
            settings = {**values, "inference_token": TOKEN}
            with servers.tsx(directory, quiet_archive, busy_archive, **settings) as server:
                wait_until_loaded(server)
                pin(server.process.pid, options.server_cores)
                rows += [measure(server, body, flood, limits, options) for flood in (None, *FLOODS)]
    print(
        f"{machine.describe()}; medians of {options.rounds} rounds of {options.seconds:g} s at"
        f" {options.rate:g} requests/s\n\n{table(rows)}"
    )


def wait_until_loaded(server: servers.Server) -> None:
    """Wait until both models are loaded."""
    deadline = time.monotonic() + servers.START_TIMEOUT_S
    while True:
        try:
            for name in ("quiet", "busy"):
                server.call(f"/models/{name}", management=True)
            return
        except OSError:
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    main()
