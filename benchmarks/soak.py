"""The growth of a server under long load, in memory, file descriptors and threads.

    python benchmarks/soak.py [--minutes 30]

Two models get requests of all kinds: small and large ones, streams, errors, a connection for each
request, clients that leave before their response, readers of metrics. The exit code is 1 if a
process grows, ends or begins, or if a request has a wrong response. The benchmark needs Linux.
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
SAMPLES = 120  # number of samples over the whole time
WARM_UP_SHARE = 0.2  # fraction of the time in which buffers and caches fill
ROW = "{:<30} {:>8} {:>8} {:>12} {:>6} {:>6} {:>8} {:>8}  {}"

Sample = dict[str, Usage]  # the usage of each process


class ReconnectingClient(Client):
    """A client with a connection for each request."""

    async def ask(self, order: str = "") -> Answer | None:
        answer = await super().ask(order)
        await self.close()
        return answer


class LeavingClient(Client):
    """A client that leaves before the response; its requests are not counted."""

    async def ask(self, order: str = "") -> Answer | None:
        _, writer = await self.connect()
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 4\r\n\r\ngone"
            % self.path.encode()
        )
        await writer.drain()
        self.drop()
        return None


class MetricsReader(Client):
    """A reader of metrics and descriptions, like a monitoring system."""

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
    all_clients: list[Client] = [MetricsReader(server)]
    for model, tally in tallies.items():
        all_clients += [Client(port, model, tally) for _ in range(8)]
        all_clients += [
            Client(port, model, tally, f"pad {'x' * (200 << 10)}"),
            ReconnectingClient(port, model, tally),
            LeavingClient(port, model, tally),
        ]
    # Streams and failures go to different models, because a failure ends the streams in its batch.
    streaming_model, failing_model = MODELS
    all_clients += [
        Client(port, streaming_model, tallies[streaming_model], "parts 5"),
        Client(port, failing_model, tallies[failing_model], "fail"),
    ]
    return all_clients


async def soak(directory: Path, minutes: float) -> tuple[list[Sample], dict[str, Tally]]:
    config = json.dumps({"minWorkers": 2, "maxWorkers": 2, "batchSize": 8})
    server = await servers.start(
        directory, [pack(directory, model, config) for model in MODELS], {}
    )
    tallies = {model: Tally() for model in MODELS}
    samples: list[Sample] = []
    try:
        load = Load(clients(server, tallies), interval=0.1)
        try:
            await load.during(_take_samples(server, minutes * 60, samples))
        finally:
            await load.stop()
        await server.stop()
    finally:
        await server.kill()
    return samples, tallies


async def _take_samples(server: Server, seconds: float, samples: list[Sample]) -> None:
    start = time.monotonic()
    for number in range(1, SAMPLES + 1):
        await asyncio.sleep(start + seconds * number / SAMPLES - time.monotonic())
        samples.append(await server.usage(MODELS))


def table(samples: Sequence[Sample]) -> bool:
    """Print a row for each process; return whether no process grows."""
    print(
        ROW.format(
            "process", "MiB", "at end", "MiB an hour", "files", "at end", "threads", "at end", ""
        )
    )
    warm_samples = samples[int(WARM_UP_SHARE * len(samples)) :]
    flat_processes = [
        _row(name, [sample[name] for sample in warm_samples if name in sample], len(warm_samples))
        for name in sorted({name for sample in warm_samples for name in sample})
    ]
    return all(flat_processes)


def _row(name: str, usages: Sequence[Usage], sample_count: int) -> bool:
    if len(usages) < sample_count:
        print(f"{name:<30} NOT FLAT: it was there at {len(usages)} of {sample_count} looks")
        return False
    first, last, rising_names = usages[0], usages[-1], rising(usages)
    verdict = f"NOT FLAT: {', '.join(rising_names)}" if rising_names else "flat"
    memory = f"{first.memory / MIB:.1f}", f"{last.memory / MIB:.1f}", f"{mib_per_hour(usages):+.1f}"
    print(ROW.format(name, *memory, first.files, last.files, first.threads, last.threads, verdict))
    return not rising_names


def problems(tallies: dict[str, Tally]) -> list[str]:
    texts = []
    for model, tally in tallies.items():
        texts += [f"{model}: {problem}" for problem in [*tally.lost, *tally.wrong][:5]]
        if tally.sent != tally.answered:
            texts.append(f"{model}: {tally.sent} sent, {tally.answered} answered")
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        samples, tallies = asyncio.run(soak(Path(name), options.minutes))
    print(
        f"{machine.describe()}; {options.minutes:g} minutes, of which the first {WARM_UP_SHARE:.0%}"
        " are not looked at\n"
    )
    flat_processes = table(samples)
    sent = sum(tally.sent for tally in tallies.values())
    errors = sum((tally.statuses for tally in tallies.values()), start=Tally().statuses)
    print(f"\n{sent:,} requests; answers by status: {dict(sorted(errors.items()))}")
    texts = problems(tallies)
    print("\n".join(texts) or "each was answered once, and as it should be")
    return 0 if flat_processes and not texts else 1


if __name__ == "__main__":
    sys.exit(main())
