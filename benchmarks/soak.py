"""Whether a server that works for long stays as it was: memory, file descriptors and threads of
each of its processes.

    python benchmarks/soak.py [--minutes 30]

Two models are asked steadily in every way that clients have: small and large requests, streams,
errors, a connection for each request, clients that leave before their answer, readers of metrics.
Exits 1 when a process is not flat, is gone or is new, or when a request was not answered as it
should be. Needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import machine
from chaos.flatness import MIB, Usage, mib_per_hour, rising
from chaos.load import Answer, Client, Load, Tally
from chaos.server import Server
from chaos.trial import pack

from chaos import server as servers

MODELS = ("first", "second")
LOOKS = 120  # over the whole time
WARM_UP = 0.2  # of the time; buffers and caches fill
ROW = "{:<30} {:>8} {:>8} {:>12} {:>6} {:>6} {:>8} {:>8}  {}"

Look = dict[str, Usage]  # by process


class Fresh(Client):
    """A connection for each request."""

    async def ask(self, order: str = "") -> Answer | None:
        answer = await super().ask(order)
        await self.close()
        return answer


class Leaver(Client):
    """Asks, and is gone before the answer is there. Nobody counts that."""

    async def ask(self, order: str = "") -> Answer | None:
        _, writer = await self.connect()
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 4\r\n\r\ngone"
            % self.path.encode()
        )
        await writer.drain()
        self.drop()
        return None


class Reader(Client):
    """Reads metrics and descriptions, as what watches a server does."""

    def __init__(self, server: Server) -> None:
        super().__init__(0, "", Tally())
        self.server = server

    async def ask(self, order: str = "") -> Answer | None:
        await self.server.samples()
        for model in MODELS:
            await self.server.workers(model)
        return await self.server.call("GET", "/ping")


def clients(server: Server, tallies: dict[str, Tally]) -> list[Client]:
    port = server.ports["inference"]
    made: list[Client] = [Reader(server)]
    for model, tally in tallies.items():
        made += [Client(port, model, tally) for _ in range(8)]
        made += [
            Client(port, model, tally, f"pad {'x' * (200 << 10)}"),
            Fresh(port, model, tally),
            Leaver(port, model, tally),
        ]
    streaming, failing = (
        MODELS  # not the same: a failure in its batch breaks a stream off that has begun
    )
    made += [
        Client(port, streaming, tallies[streaming], "parts 5"),
        Client(port, failing, tallies[failing], "fail"),
    ]
    return made


async def soak(directory: Path, minutes: float) -> tuple[list[Look], dict[str, Tally]]:
    config = json.dumps({"minWorkers": 2, "maxWorkers": 2, "batchSize": 8})
    server = await servers.start(
        directory, [pack(directory, model, config) for model in MODELS], {}
    )
    tallies = {model: Tally() for model in MODELS}
    looks: list[Look] = []
    try:
        load = Load(clients(server, tallies), interval=0.1)
        try:
            await load.during(_look_on(server, minutes * 60, looks))
        finally:
            await load.stop()
        await server.stop()
    finally:
        await server.kill()
    return looks, tallies


async def _look_on(server: Server, seconds: float, looks: list[Look]) -> None:
    began = time.monotonic()
    for number in range(1, LOOKS + 1):
        await asyncio.sleep(began + seconds * number / LOOKS - time.monotonic())
        looks.append(await server.usage(MODELS))


def table(looks: Sequence[Look]) -> bool:
    """Print a row for each process; whether all are flat."""
    print(
        ROW.format(
            "process", "MiB", "at end", "MiB an hour", "files", "at end", "threads", "at end", ""
        )
    )
    kept = looks[int(WARM_UP * len(looks)) :]
    flat = [
        _row(name, [look[name] for look in kept if name in look], len(kept))
        for name in sorted({name for look in kept for name in look})
    ]
    return all(flat)


def _row(name: str, used: Sequence[Usage], looks: int) -> bool:
    if len(used) < looks:
        print(f"{name:<30} NOT FLAT: it was there at {len(used)} of {looks} looks")
        return False
    first, last, more = used[0], used[-1], rising(used)
    verdict = f"NOT FLAT: {', '.join(more)}" if more else "flat"
    memory = f"{first.memory / MIB:.1f}", f"{last.memory / MIB:.1f}", f"{mib_per_hour(used):+.1f}"
    print(ROW.format(name, *memory, first.files, last.files, first.threads, last.threads, verdict))
    return not more


def problems(tallies: dict[str, Tally]) -> list[str]:
    found = []
    for model, tally in tallies.items():
        found += [f"{model}: {problem}" for problem in [*tally.lost, *tally.wrong][:5]]
        if tally.sent != tally.answered:
            found.append(f"{model}: {tally.sent} sent, {tally.answered} answered")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        looks, tallies = asyncio.run(soak(Path(place), options.minutes))
    print(
        f"{machine.describe()}; {options.minutes:g} minutes, of which the first {WARM_UP:.0%} are"
        " not looked at\n"
    )
    flat = table(looks)
    sent = sum(tally.sent for tally in tallies.values())
    errors = sum((tally.statuses for tally in tallies.values()), start=Tally().statuses)
    print(f"\n{sent:,} requests; answers by status: {dict(sorted(errors.items()))}")
    found = problems(tallies)
    print("\n".join(found) or "each was answered once, and as it should be")
    return 0 if flat and not found else 1


if __name__ == "__main__":
    sys.exit(main())
