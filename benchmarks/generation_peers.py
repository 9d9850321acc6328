"""Text generation by tsx and `transformers serve`: tokens per second, time to the first token.

    python benchmarks/generation_peers.py [--clients 1 8 32] [--seconds 6] [--rounds 3]
        [--starts 1] [--hidden 256 --layers 4] [--leave 1000] [--schema]
        [--device cuda --dtype bfloat16]

Both serve the same small Llama on all cores, or on the same GPU, with OpenAI's chat completions as
event streams, in turns. Prompts have 4 to 60 words, and responses 32 greedy tokens. Clients are
connections of one process, which reads the events and records their times. `transformers serve`
uses transformers' continuous batching. Figures are medians of the rounds. With --starts N, both
servers are started N times, and each start has all rounds, so that a slow start or a busy minute
counts less. The figures of each start go to stderr.

With --schema, responses of tsx follow a JSON schema of long lists of numbers; `transformers serve`
has no grammars. With --leave N, N clients of tsx then connect, read three tokens and leave, 50 at a
time. Afterwards the cache must be free again, and the worker must not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from benchmarks import machine
from benchmarks.servers import clean_environment, free_ports, running, tsx
from tests.support.language_models import tiny_llama

TOKENS = 32
LEAVING_AT_ONCE = 50
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 2 * TOKENS}
WORDS = [
    "the",
    "a",
    "model",
    "batch",
    "token",
    "server",
    "time",
    "python",
    "text",
    "wrap",
    "line",
    "string",
    "beautiful",
    "explicit",
    "flat",
]


class Answer(NamedTuple):
    """The times of a request in seconds, and its number of tokens."""

    first: float  # time to the first token
    took: float
    tokens: int


class Peer(NamedTuple):
    name: str
    url: str
    model: str
    has_schema: bool = False


def body_of(peer: Peer, number: int) -> bytes:
    random_source = random.Random(number)
    text = " ".join(random_source.choices(WORDS, k=random_source.randint(4, 60)))
    request = {
        "model": peer.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    if peer.has_schema:
        schema = {"name": "numbers", "schema": SCHEMA}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    return json.dumps(request | {"stream_options": {"include_usage": True}}).encode()


async def ask(peer: Peer, number: int, leave_after: int | None = None) -> Answer:
    """Send a request on its own connection.

    Raises:
        ValueError: The response is not a stream of tokens.
    """
    host = urlsplit(peer.url)
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    try:
        body = body_of(peer, number)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host.netloc}\r\ncontent-type:"
            " application/json\r\n"
        )
        writer.write(
            head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        first, events, usage = 0.0, 0, None
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                    raise ValueError(f"{peer.name}: {line!r} {(await reader.read(4096))!r}")
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"{peer.name}: {event}")
            usage = event.get("usage") or usage
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                first = first or time.perf_counter() - start
                events += 1
                if events == leave_after:
                    break
        duration = time.perf_counter() - start
        # A model may end its response without a token.
        return Answer(first or duration, duration, usage["completion_tokens"] if usage else events)
    finally:
        writer.close()


async def load(peer: Peer, clients: int, seconds: float) -> list[Answer]:
    """Run a closed loop: each client sends its next request after the response to the last."""
    end, numbers, answers = time.perf_counter() + seconds, count(), []

    async def client() -> None:
        while time.perf_counter() < end:
            answers.append(await ask(peer, next(numbers)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def measure(peer: Peer, clients: int, seconds: float) -> tuple[float, ...]:
    """Return tokens per second, the median and p99 of TTFT in ms, and answers per second."""
    start = time.perf_counter()
    answers = await load(peer, clients, seconds)
    elapsed_s = time.perf_counter() - start
    first_token_ms = sorted(1000 * answer.first for answer in answers)
    p99_ms = first_token_ms[min(len(first_token_ms) - 1, len(first_token_ms) * 99 // 100)]
    tokens = sum(answer.tokens for answer in answers) / elapsed_s
    return tokens, statistics.median(first_token_ms), p99_ms, len(answers) / elapsed_s


@contextmanager
def transformers_serve(model: Path, directory: Path, device: str) -> Iterator[Peer]:
    (port,) = free_ports(1)
    command = [
        Path(sys.executable).with_name("transformers"),
        "serve",
        model,
        "--continuous-batching",
        "--device",
        device,
        "--port",
        str(port),
    ]
    with running(
        [*command, "--host", "127.0.0.1"], directory, clean_environment(), "transformers serve"
    ):
        yield Peer("transformers serve", f"http://127.0.0.1:{port}", str(model))


async def ready(peer: Peer) -> None:
    """Wait until the peer answers, and warm it up."""
    for _ in range(240):
        try:
            await ask(peer, 0)
            break
        except (OSError, ValueError):
            await asyncio.sleep(0.5)
    await load(peer, 8, 2)


def generation_metrics(metrics: str) -> dict[str, float]:
    """Return the metrics of text generation by name."""
    text = urllib.request.urlopen(metrics + "/metrics", timeout=10).read().decode()
    lines = [
        line.rpartition(" ")
        for line in text.splitlines()
        if line.startswith("tsx_generation_") and "_bucket" not in line
    ]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


async def leaving(peer: Peer, client_count: int, process: psutil.Process, metrics: str) -> None:
    def memory() -> int:
        return max(child.memory_info().rss for child in process.children(recursive=True))

    async def batch(begin: int) -> None:
        await asyncio.gather(*(ask(peer, begin + number, 3) for number in range(LEAVING_AT_ONCE)))

    await batch(0)
    start_bytes = memory()
    for begin in range(0, client_count, LEAVING_AT_ONCE):
        await batch(begin)
    await asyncio.sleep(1.0)
    end_bytes = memory()
    await ask(peer, 0)
    sizes = f"worker {start_bytes / 2**20:.0f} -> {end_bytes / 2**20:.0f} MiB"
    print(
        f"\n{client_count} clients read three tokens and left: {sizes};"
        f" {generation_metrics(metrics)}"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="of both servers (1)")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument(
        "--device",
        default="cpu",
        help="of transformers serve; tsx takes the GPU where there is one (cpu)",
    )
    parser.add_argument("--dtype", default="float32", help="of the weights (float32)")
    parser.add_argument(
        "--leave", type=int, default=0, help="clients that leave after three tokens"
    )
    parser.add_argument("--schema", action="store_true", help="a JSON schema for tsx")
    options = parser.parse_args()
    print(machine.describe())
    noise = machine.Noise()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model_shape = {
            "hidden_size": options.hidden,
            "intermediate_size": 2 * options.hidden,
            "num_hidden_layers": options.layers,
        }
        model_shape |= {
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.heads // 2,
        }
        model = tiny_llama(directory / "llama", **model_shape, dtype=options.dtype)
        metrics = f"http://127.0.0.1:{free_ports(1)[0]}"
        settings = {"disable_token_authorization": True, "metrics_address": metrics}
        rounds: dict[tuple[int, str], list[tuple[float, ...]]] = defaultdict(list)
        for start in range(1, options.starts + 1):
            with (
                tsx(directory, model, **settings) as server,
                transformers_serve(model, directory, options.device) as transformers_peer,
            ):
                peers = [Peer("tsx", server.inference, "llama", options.schema), transformers_peer]
                for peer in peers:
                    await ready(peer)
                for clients in options.clients:
                    for _ in range(options.rounds):
                        noise.sample()
                        for peer in peers:
                            figures = await measure(peer, clients, options.seconds)
                            rounds[clients, peer.name].append(figures)
                    for peer in peers:
                        last = rounds[clients, peer.name][-options.rounds :]
                        tokens = statistics.median(tokens for tokens, *_ in last)
                        progress = f"start {start}, {clients} clients: {peer.name} {tokens:,.0f}"
                        print(progress, "tokens/s", file=sys.stderr, flush=True)
                if options.leave and start == options.starts:
                    process = psutil.Process(server.process.pid)
                    await leaving(peers[0], options.leave, process, metrics)
    print(
        "\n| clients | server | tokens/s | TTFT p50 ms | TTFT p99 ms | answers/s |\n"
        "|---|---|---|---|---|---|"
    )
    for (clients, name), figures in rounds.items():
        tokens, median_ms, p99_ms, rate = map(statistics.median, zip(*figures, strict=True))
        print(
            f"| {clients} | {name} | {tokens:,.0f} | {median_ms:.1f} | {p99_ms:.1f} | {rate:.1f} |"
        )
    print(f"\n{noise}")


if __name__ == "__main__":
    asyncio.run(main())
