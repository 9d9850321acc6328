"""Open-loop load: requests leave at the times that a plan says, whatever the server does, and latency counts from the planned time.

    python benchmarks/openloop.py URL --rate 2000 --seconds 10 --connections 256 --body FILE [--poisson] [--json]

A closed loop (wrk) sends the next request when the last one was answered: a slow server is asked less often, and its queue does not
show. Here it shows. Every planned request ends as exactly one of: accepted (2xx), refused (429, 503), an error (by its status, or
`closed`), unanswered (no answer `--grace` seconds after the end), unsent (no connection was free for it until the end). A connection
carries one request at a time, so a server never has more than `--connections` at once: to fill a queue, give more connections than it
has places.

One process and one thread, on Linux. It reports how much of a core it used and how late it sent what it could have sent; where that
is what the numbers show, `limited` says so, and they say nothing about the server.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import select
import socket
import subprocess
import sys
import time
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

REFUSALS = ("429", "503")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
BUSY = 0.9  # of the time: beyond it the generator is the limit
LATE_MS = 1.0
LEAD = 0.05  # seconds before the first request
PATIENCE = 10  # seconds to wait for each of the first connections: a listener's queue may be short
COARSE = 0.004  # seconds; epoll waits for whole milliseconds: less is waited for by select()
CATCH_UP = 0.1  # seconds after the end in which what is due may still leave


class Result(NamedTuple):
    """Latencies in milliseconds from the planned time; those of accepted requests unless the name says otherwise."""

    rate: float
    seconds: float
    arrivals: str
    connections: int
    planned: int
    accepted: int
    refused: int
    errors: dict[str, int]
    unanswered: int
    unsent: int
    goodput: float  # accepted answers that came within the seconds, and within --limit-ms of their planned times, per second
    p50: float
    p90: float
    p99: float
    p999: float
    most: float
    refused_p99: float
    waited: int  # found no free connection when they were due
    late_p99: float  # of those that did: how late they left all the same
    generator_cpu: float  # of one core
    generator_starved: float  # share of the time in which it had work and got no core
    limited: str | None


def plan(rate: float, seconds: float, poisson: bool, seed: int = 0) -> array[float]:
    """When each request is due, in seconds from the start."""
    if not poisson:
        return array("d", (number / rate for number in range(int(rate * seconds))))
    chance = random.Random(seed)
    due, now = array("d"), chance.expovariate(rate)
    while now < seconds:
        due.append(now)
        now += chance.expovariate(rate)
    return due


def percentile(ordered: Sequence[float], which: float) -> float:
    """The smallest value that at least `which` per cent of all do not exceed; 0 where there is none."""
    if not ordered:
        return 0.0
    return ordered[max(0, -int(-len(ordered) * which // 100) - 1)]


def answer_length(data: bytes | bytearray) -> int | None:
    """Bytes of the whole answer that `data` begins with; None while that cannot be told."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    if length := LENGTH.search(data, 0, end):
        return end + 4 + int(length[1])
    if CHUNKED.search(data, 0, end):
        last = data.find(b"\r\n0\r\n\r\n", end + 2)
        return None if last < 0 else last + 7
    return end + 4


def limit(cpu: float, starved: float, late_p99: float, p99: float) -> str | None:
    """Why the numbers tell of the generator and not of the server."""
    if cpu + starved > BUSY:
        return f"the generator used {cpu:.0%} of a core and waited for one {starved:.0%} of the time"
    if late_p99 > LATE_MS and late_p99 > 0.2 * p99:
        return f"the generator itself was {late_p99:.1f} ms late (p99)"
    return None


def starvation() -> float:
    """Seconds that this process has been ready to run and waited for a core; 0 where the kernel does not count them."""
    counts = Path("/proc/self/schedstat")
    return int(counts.read_text().split()[1]) / 1e9 if counts.exists() else 0.0


class Load:
    """Connections, and what became of each request. What is indexed by file descriptor is a dict: one lookup per event."""

    def __init__(
        self, address: tuple[str, int], request: bytes, due: array[float], connections: int, limit_ms: float | None = None
    ) -> None:
        self.address, self.request, self.due = address, request, due
        self.limit = float("inf") if limit_ms is None else limit_ms / 1000
        self.epoll = select.epoll()  # opened first: its number stays below what select() can take
        self.sockets: dict[int, socket.socket] = {}
        self.planned: dict[int, float] = {}  # by connection in use: when its request was due
        self.rest: dict[int, bytes] = {}  # of a request that has left in part
        self.partial: dict[int, bytearray] = {}  # of an answer
        self.free: deque[int] = deque()
        self.accepted, self.refused, self.late = array("d"), array("d"), array("d")
        self.errors: Counter[str] = Counter()
        self.sent = self.waited = self.in_time = 0
        for _ in range(connections):
            self.connect(PATIENCE)

    def connect(self, patience: float = 1) -> None:
        connection = socket.create_connection(self.address, timeout=patience)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.sockets[connection.fileno()] = connection
        self.epoll.register(connection.fileno(), select.EPOLLIN)
        self.free.append(connection.fileno())

    def run(self, seconds: float, grace: float) -> None:
        self.start = start = time.perf_counter() + LEAD
        self.seconds, stop = seconds, seconds + CATCH_UP
        due, total, planned, free, clock = self.due, len(self.due), self.planned, self.free, time.perf_counter
        blocked = 0  # requests before this one found no free connection when they were due
        while True:
            now = clock() - start
            while free and self.sent < total and due[self.sent] <= now < stop:
                descriptor = free.popleft()
                planned[descriptor] = moment = due[self.sent]
                if self.sent < blocked:
                    self.waited += 1
                else:
                    self.late.append(now - moment)
                self.sent += 1
                self.send(descriptor, self.request)
                now = clock() - start
            if now >= stop or self.sent == total:
                if not planned or now > stop + grace:
                    return
                wait = stop + grace - now
            elif free:
                wait = due[self.sent] - now
            else:
                blocked = max(blocked, bisect_right(due, now, self.sent))
                wait = stop - now
            self.receive(wait)

    def send(self, descriptor: int, data: bytes) -> None:
        try:
            sent = os.write(descriptor, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.lost(descriptor)
            return
        if sent < len(data):
            self.rest[descriptor] = data[sent:]
            self.epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def receive(self, wait: float) -> None:
        """Take what has come, or the first to come within `wait` seconds."""
        if 0 < wait < COARSE:
            select.select([self.epoll], [], [], wait)
        events = self.epoll.poll(wait - COARSE / 2 if wait >= COARSE else 0)
        now = time.perf_counter() - self.start
        for descriptor, event in events:
            if event & select.EPOLLOUT:
                self.epoll.modify(descriptor, select.EPOLLIN)
                self.send(descriptor, self.rest.pop(descriptor))
            if event & ~select.EPOLLOUT and descriptor in self.sockets:
                try:
                    data: bytes | bytearray = os.read(descriptor, 262144)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    self.lost(descriptor)
                    continue
                if descriptor in self.partial:
                    data = self.partial.pop(descriptor) + data
                length = answer_length(data)
                if length is None or length > len(data):
                    self.partial[descriptor] = bytearray(data)
                else:
                    self.answered(descriptor, data[9:12], now)
                    if descriptor in self.rest or data.find(b": close\r\n", 0, length) > 0:
                        self.lost(descriptor)

    def answered(self, descriptor: int, status: bytes | bytearray, now: float) -> None:
        latency = now - self.planned.pop(descriptor)
        self.free.append(descriptor)
        if status[0] == 0x32:  # "2"
            self.accepted.append(latency)
            self.in_time += now < self.seconds and latency <= self.limit
        elif status.decode() in REFUSALS:
            self.refused.append(latency)
        else:
            self.errors[status.decode()] += 1

    def lost(self, descriptor: int) -> None:
        """A connection is of no more use: what it carried is an error, and another one takes its place."""
        if self.planned.pop(descriptor, None) is not None:
            self.errors["closed"] += 1
        else:
            self.free.remove(descriptor)
        self.rest.pop(descriptor, None)
        self.partial.pop(descriptor, None)
        self.sockets.pop(descriptor).close()
        with suppress(OSError):  # nothing listens any more: the requests that are left stay unsent
            self.connect()

    def close(self) -> None:
        for connection in self.sockets.values():
            connection.close()
        self.epoll.close()


def request_bytes(url: str, body: bytes, headers: Sequence[str], method: str = "POST") -> bytes:
    parts = urlsplit(url)
    lines = [f"{method} {parts.path or '/'}{'?' + parts.query if parts.query else ''} HTTP/1.1", f"Host: {parts.netloc}"]
    return "\r\n".join([*lines, *headers, f"Content-Length: {len(body)}", "", ""]).encode() + body


def run(
    url: str,
    rate: float,
    seconds: float,
    connections: int,
    body: bytes,
    *,
    poisson: bool = False,
    headers: Sequence[str] = (),
    grace: float = 5,
    limit_ms: float | None = None,
) -> Result:
    """In this process, which must have nothing else to do: `in_own_process` is for those that have."""
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    load = Load((parts.hostname, parts.port or 80), request_bytes(url, body, headers), plan(rate, seconds, poisson), connections, limit_ms)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: wake when it is time, not up to 50 us later
    gc.disable()
    used, starved, began = time.process_time(), starvation(), time.perf_counter()
    try:
        load.run(seconds, grace)
        took = time.perf_counter() - began
        cpu, starved = (time.process_time() - used) / took, (starvation() - starved) / took
    finally:
        gc.enable()
        load.close()
    return account(load, rate, seconds, connections, "Poisson" if poisson else "constant", cpu, starved)


def account(load: Load, rate: float, seconds: float, connections: int, arrivals: str, cpu: float, starved: float) -> Result:
    accepted, refused, late = (sorted(value * 1000 for value in values) for values in (load.accepted, load.refused, load.late))
    p50, p90, p99, p999 = (percentile(accepted, which) for which in (50, 90, 99, 99.9))
    late_p99 = percentile(late, 99)
    return Result(
        *(rate, seconds, arrivals, connections, len(load.due)),
        *(len(accepted), len(refused), dict(load.errors), len(load.planned), len(load.due) - load.sent),
        *(load.in_time / seconds, p50, p90, p99, p999, accepted[-1] if accepted else 0.0, percentile(refused, 99)),
        *(load.waited, late_p99, cpu, starved, limit(cpu, starved, late_p99, p99)),
    )


def in_own_process(
    url: str,
    rate: float,
    seconds: float,
    connections: int,
    body: Path,
    *,
    poisson: bool = False,
    headers: Sequence[str] = (),
    grace: float = 5,
    limit_ms: float | None = None,
) -> Result:
    command = [sys.executable, __file__, url, "--rate", str(rate), "--seconds", str(seconds), "--connections", str(connections)]
    command += ["--body", str(body), "--grace", str(grace), "--json", *(["--poisson"] if poisson else [])]
    command += [] if limit_ms is None else ["--limit-ms", str(limit_ms)]
    command += [word for header in headers for word in ("--header", header)]
    return Result(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def describe(it: Result) -> str:
    lines = [
        f"{it.rate:g}/s planned for {it.seconds:g} s, {it.arrivals} arrivals, {it.connections} connections: {it.planned} requests",
        f"goodput {it.goodput:,.0f}/s; accepted {it.accepted}, refused {it.refused}, errors {it.errors or 0}, "
        f"unanswered {it.unanswered}, unsent {it.unsent}",
        f"latency ms: p50 {it.p50:.2f}, p90 {it.p90:.2f}, p99 {it.p99:.2f}, p99.9 {it.p999:.2f}, most {it.most:.2f}; "
        f"refusals p99 {it.refused_p99:.2f}",
        f"generator: {it.generator_cpu:.0%} of a core ({it.generator_starved:.0%} without one), {it.late_p99:.2f} ms late (p99); "
        f"{it.waited} requests found no free connection",
    ]
    return "\n".join([*lines, *([f"these numbers say nothing about the server: {it.limited}"] if it.limited else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--body", type=Path, help="a file to post; nothing is posted without it")
    parser.add_argument("--header", action="append", default=[], help="for each request, as in 'Content-Type: application/json'")
    parser.add_argument("--poisson", action="store_true", help="random arrivals; without it they are evenly spaced")
    parser.add_argument("--grace", type=float, default=5, help="seconds to wait for answers after the last request")
    parser.add_argument("--limit-ms", type=float, help="an answer that comes later counts for nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    body = options.body.read_bytes() if options.body else b""
    result = run(
        *(options.url, options.rate, options.seconds, options.connections, body),
        **{"poisson": options.poisson, "headers": options.header, "grace": options.grace, "limit_ms": options.limit_ms},
    )
    print(json.dumps(result._asdict()) if options.json else describe(result))


if __name__ == "__main__":
    main()
