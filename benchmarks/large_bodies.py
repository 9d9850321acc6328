"""The cost of large bodies: throughput, processor time, and memory for each byte in flight.

    python benchmarks/large_bodies.py [--sizes 128K 1M 10M 100M] [--connections 4] [--seconds 3]
    python benchmarks/large_bodies.py --transport

Each size is sent to a new `tsx serve`, whose handler returns the length of the body. Memory is the
peak growth of a process during the load, divided by the bytes of all bodies in flight (connections
x size). `--transport` moves bodies between two processes through a socket pair, as tsx does, and
through shared memory, in turns. It needs Linux.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import machine
import psutil
import servers

from tsx_runtime.worker.channel import send_buffers
from tsx_runtime.worker.diagnostics.memory import keep_freed_memory

HANDLER = Path(__file__).parent / "models" / "length.py"
UNITS = {"K": 1 << 10, "M": 1 << 20}
PIECE_BYTES = 64 << 10  # the size of a single read of the event loop
MOVED_BYTES = 512 << 20  # bytes that are moved in a round of `--transport`
SECONDS_FORMAT = struct.Struct("<d")


class Cost(NamedTuple):
    rate: float  # requests/s
    cpu: list[float]  # processor seconds per request: front end, worker
    memory: list[float]  # bytes per byte in flight: front end, worker


# Served


def measure(size: int, connections: int, seconds: float) -> Cost:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": connections}
        archive = servers.archive(directory, "length", "--handler", HANDLER, config=config)
        # The handler needs no torch, so no worker is preloaded.
        with servers.tsx(
            directory, archive, max_request_size=2 * size, worker_preload=False
        ) as server:
            servers.first_answer(server, "/predictions/length", b"x")
            (worker,) = json.loads(server.call("/models/length", management=True))[0]["workers"]
            processes = [psutil.Process(server.process.pid), psutil.Process(worker["pid"])]
            idle_bytes = [process.memory_info().rss for process in processes]
            for process in processes:
                forget_peak(process.pid)
            load(server, size, connections, min(1.0, seconds / 3))
            start_cpu_s = [cpu_seconds(process) for process in processes]
            start = time.perf_counter()
            requests = load(server, size, connections, seconds)
            rate = requests / (time.perf_counter() - start)
            cpu = [
                (cpu_seconds(process) - earlier_s) / requests
                for process, earlier_s in zip(processes, start_cpu_s, strict=True)
            ]
            memory = [
                (peak(process.pid) - idle) / (connections * size)
                for process, idle in zip(processes, idle_bytes, strict=True)
            ]
    return Cost(rate, cpu, memory)


def load(server: servers.Server, size: int, connections: int, seconds: float) -> int:
    """Send requests, wait for all of them, and return their number."""
    body = os.urandom(size)
    counts = [0] * connections
    failures: list[BaseException] = []
    end = time.perf_counter() + seconds

    def ask(number: int) -> None:
        connection = HTTPConnection(urlsplit(server.inference).netloc, timeout=60)
        try:
            while time.perf_counter() < end:
                connection.request("POST", "/predictions/length", body)
                answer = connection.getresponse()
                content = answer.read()
                assert (answer.status, content) == (200, str(size).encode()), (
                    answer.status,
                    content[:500],
                )
                counts[number] += 1
        # This is the boundary of a thread; the error is raised again below.
        except Exception as error:
            failures.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(counts)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak(pid: int) -> int:
    """Return the peak of the resident bytes since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def served(sizes: list[int], connections: int, seconds: float) -> None:
    print(
        "| body | requests/s | MB/s | front end CPU ms | worker CPU ms | front end memory | worker"
        " memory |"
    )
    print("|---" * 7 + "|")
    for size in sizes:
        cost = measure(size, connections, seconds)
        cpu = " | ".join(f"{1000 * value:.2f}" for value in cost.cpu)
        memory = " | ".join(f"{value:.2f}" for value in cost.memory)
        print(
            f"| {in_words(size)} | {cost.rate:,.0f} | {cost.rate * size / 1e6:,.0f} | {cpu} |"
            f" {memory} |",
            flush=True,
        )


# Between two processes


class Sender:
    """The sending end of a connection to a child process, which discards the bytes."""

    def __init__(self, size: int, memory: mmap.mmap, sock: socket.socket) -> None:
        self.pieces = [memoryview(os.urandom(min(PIECE_BYTES, size)))] * (
            size // min(PIECE_BYTES, size)
        )
        self.memory = memory
        self.sock = sock

    def by_socket(self) -> None:
        send_buffers(self.sock, list(self.pieces))

    def by_memory(self) -> None:
        position = 0
        for piece in self.pieces:
            self.memory[position : position + len(piece)] = piece
            position += len(piece)
        self.sock.send(b".")

    def move(self, use_memory: bool, count: int) -> float:
        """Return the processor seconds of both processes for one body."""
        self.sock.sendall(struct.pack("<?I", use_memory, count))
        start = time.process_time()
        for _ in range(count):
            if use_memory:
                self.by_memory()
            else:
                self.by_socket()
            self.sock.recv(1)
        parent_s = time.process_time() - start
        (child_s,) = SECONDS_FORMAT.unpack(self.sock.recv(SECONDS_FORMAT.size, socket.MSG_WAITALL))
        return (parent_s + float(child_s)) / count


def receive(size: int, memory: mmap.mmap, sock: socket.socket) -> None:
    """Receive bodies in the child, which copies them into its own bytes like a worker."""
    keep_freed_memory()
    while order := sock.recv(5, socket.MSG_WAITALL):
        use_memory, count = struct.unpack("<?I", order)
        start = time.process_time()
        for _ in range(count):
            body = bytearray(memory) if use_memory and sock.recv(1) else bytearray(size)
            view = memoryview(body)
            while not use_memory and view:
                view = view[sock.recv_into(view) :]
            sock.send(b".")
        sock.sendall(SECONDS_FORMAT.pack(time.process_time() - start))


@contextmanager
def pair(size: int) -> Iterator[Sender]:
    memory = mmap.mmap(-1, size)  # anonymous, and shared with the child
    parent_sock, child_sock = socket.socketpair()
    child = os.fork()
    if child == 0:
        parent_sock.close()
        try:
            receive(size, memory, child_sock)
        finally:
            os._exit(0)
    child_sock.close()
    with parent_sock:
        yield Sender(size, memory, parent_sock)
    os.waitpid(child, 0)


def transport(sizes: list[int], rounds: int) -> None:
    print("| body | socket pair, CPU ms | shared memory, CPU ms |")
    print("|---" * 3 + "|")
    for size in sizes:
        with pair(size) as sender:
            count = max(4, MOVED_BYTES // size)
            results = [(sender.move(False, count), sender.move(True, count)) for _ in range(rounds)]
        columns = (f"{1000 * machine.median(column):.3f}" for column in zip(*results, strict=True))
        print(f"| {in_words(size)} | {' | '.join(columns)} |", flush=True)


def in_bytes(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]]


def in_words(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=in_bytes,
        default=[in_bytes(text) for text in ("128K", "1M", "10M", "100M")],
    )
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument(
        "--seconds",
        type=float,
        default=3,
        help="of load for each size, after a third of it, or a second, as warm-up",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of --transport; the medians are printed"
    )
    parser.add_argument(
        "--transport",
        action="store_true",
        help="between two processes only: a socket pair beside shared memory",
    )
    options = parser.parse_args()
    noise = machine.Noise()
    noise.sample()
    setup = (
        f"medians of {options.rounds} rounds"
        if options.transport
        else f"{options.connections} connections, one worker"
    )
    print(f"{machine.describe()}; {setup}\n")
    if options.transport:
        transport(options.sizes, options.rounds)
    else:
        served(options.sizes, options.connections, options.seconds)
    noise.sample()
    print(f"\n{noise}")


if __name__ == "__main__":
    main()
