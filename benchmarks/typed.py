"""A typed Python file in tsx, FastAPI and LitServe, and what its validation costs.

    python -m benchmarks.typed [--connections 1,16,64] [--rounds 5] [--seconds 2] [--validation]

All servers import the same file, `models/sentiment.py`, with its pydantic models. FastAPI runs in
uvicorn with uvloop and httptools: in one process, and in as many as tsx has for the front end and
the workers. A server that cannot be installed is left out. The load (`wrk -t1`) goes to one server
at a time, in turns. The ratios are medians over the rounds.

The cost of validation is the difference of two handlers in the worker's own code, without sockets:
the typed file, and a TorchServe handler function that does the same with dicts
(`models/sentiment_handler.py`). They run in turns, on batches of each size. With `--validation`,
only this is measured.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import machine, servers, wrk
from benchmarks.peers import environments
from benchmarks.peers.field import Contender
from benchmarks.peers.measure import Point
from tsx_archiver.python_file import HANDLER, PythonFileFacts
from tsx_runtime.wire import Item
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import ServedModel, answer_batch
from tsx_runtime.worker.execution.recovery import Ceiling
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import Coroutines, load_entry
from tsx_runtime.worker.handler_api.metrics import Metrics
from tsx_runtime.worker.handler_api.modules import own_modules

MODELS = Path(__file__).with_name("models")
MODEL = MODELS / "sentiment.py"
PEERS = Path(__file__).with_name("peers")
JSON = "application/json"
BODY = json.dumps({"text": "What a good film, with a fine ending"}).encode()
META = (
    b"0b2c1d3e-0000-4000-8000-%012d\r\n\r\nhost: 127.0.0.1:8080\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n"
)
BATCHES = (1, 8, 32)
TURNS = 40
PROCESSES = 2  # tsx has a front end and a worker.
FACTORS = {"FastAPI": 3, "LitServe": 10}  # the promises at 16 and 64 connections
PROMISED = (16, 64)


class Validation(NamedTuple):
    """Microseconds of a request in a worker."""

    batch: int
    untyped: float
    typed: float
    difference: float  # the median of the differences between turns


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.typed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--connections", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of each turn (2)")
    parser.add_argument("--validation", action="store_true", help="measure no server")
    parser.add_argument(
        "--environments",
        type=Path,
        default=environments.default_directory(),
        help="where the peers' environments are kept",
    )
    options = parser.parse_args()
    print(machine.describe())
    noise = machine.Noise()
    for line in [] if options.validation else compare(options, noise):
        print(line, flush=True)
    print(f"{'batch':>6}{'untyped us':>12}{'typed us':>10}{'validation us a request':>25}")
    for batch in BATCHES:
        noise.sample()
        cost = validation_cost(batch, options.seconds)
        print(f"{batch:6}{cost.untyped:12.2f}{cost.typed:10.2f}{cost.difference:25.2f}")
    print(noise)


def compare(options: argparse.Namespace, noise: machine.Noise) -> Iterator[str]:
    """Measure the servers in turns; yield the lines of a table."""
    try:
        environments.program("wrk", "wrk")
    except environments.Missing as error:
        yield f"no server is measured: {error}"
        return
    with tempfile.TemporaryDirectory(prefix="tsx-typed-") as temporary, ExitStack() as stack:
        directory, contenders = Path(temporary), []
        for name in ("tsx", "FastAPI", "FastAPI, all processes", "LitServe"):
            try:
                contender = start(name, directory, options.environments)
                contenders.append(stack.enter_context(contender))
            except environments.Missing as error:
                yield f"left out: {name}: {error}"
        body = directory / "body"
        body.write_bytes(BODY)
        columns = f"{'requests/s':>11}{'p50 ms':>8}{'p99 ms':>8}{'cpu us':>8}"
        yield f"{'connections':>11}  {'server':24}{columns}  tsx"
        for connections in map(int, options.connections.split(",")):
            yield from compare_at(connections, contenders, body, options, noise)


def compare_at(
    connections: int,
    contenders: Sequence[Contender],
    body: Path,
    options: argparse.Namespace,
    noise: machine.Noise,
) -> Iterator[str]:
    turns = []
    for number in range(options.rounds + 1):  # The first one is a warm-up.
        noise.sample()
        rounds = {}
        # The order alternates, so that a drift of the machine favours nobody.
        for contender in contenders[:: -1 if number % 2 else 1]:
            with contender.turn():
                start_cpu_s = contender.cpu_seconds()
                load = wrk.load(contender.url, connections, options.seconds, body, JSON)
                cpu = (contender.cpu_seconds() - start_cpu_s) * 1e6 / load.requests
            rounds[contender.name] = Point(load.rate, load.p50, load.p99, cpu)
        turns.append(rounds)
    for contender in contenders:
        name = contender.name
        columns = zip(*(rounds[name] for rounds in turns[1:]), strict=True)
        rate, p50, p99, cpu = map(machine.median, columns)
        ratios = [rounds["tsx"].rate / rounds[name].rate for rounds in turns[1:]]
        factor = FACTORS.get(name) if connections in PROMISED else None
        promise = f", promised {factor}" if factor else ""
        spread = f"{machine.median(ratios):.1f} times ({min(ratios):.1f} to {max(ratios):.1f})"
        yield f"{connections:11}  {name:24}{rate:11,.0f}{p50:8.2f}{p99:8.2f}{cpu:8.0f}" + (
            f"  {spread}{promise}" if name != "tsx" else ""
        )


@contextmanager
def start(name: str, directory: Path, peer_environments: Path) -> Iterator[Contender]:
    """Start a server of the typed file, and check its answer.

    Raises:
        Missing: The server cannot be installed.
    """
    path = "/predictions/sentiment" if name == "tsx" else "/predict"
    with start_server(name, directory, peer_environments) as server:
        answer = json.loads(servers.first_answer(server, path, BODY, JSON))
        assert answer == {"label": "positive", "score": 0.25}, answer
        root = psutil.Process(server.process.pid)
        contender = Contender(name, server, path, [root, *root.children(recursive=True)])
        try:
            with contender.turn():
                pass
            yield contender
        finally:
            # A stopped process would not receive the signal to end.
            contender.signal(signal.SIGCONT)


def start_server(
    name: str, directory: Path, peer_environments: Path
) -> AbstractContextManager[servers.Server]:
    if name == "tsx":
        return servers.tsx(directory, MODEL, job_queue_size=1000)
    return start_peer(name, directory, peer_environments)


@contextmanager
def start_peer(name: str, directory: Path, peer_environments: Path) -> Iterator[servers.Server]:
    program = name.partition(",")[0]
    environment_name = "LitServe_typed" if program == "LitServe" else program
    binaries = environments.environment_of(environment_name, peer_environments) / "bin"
    port = servers.free_ports(1)[0]
    if program == "LitServe":
        command = [binaries / "python", PEERS / "litserve_typed.py", str(port)]
    else:
        count = "1" if name == program else str(PROCESSES)
        command = [binaries / "uvicorn", "fastapi_typed:app", "--app-dir", PEERS, "--workers"]
        command += [count, "--port", str(port), "--loop", "uvloop", "--http", "httptools"]
        command += ["--no-access-log", "--log-level", "error"]
    variables = servers.foreign_environment() | {"BENCHMARK_MODEL": str(MODEL)}
    with servers.running(command, directory, variables, name.lower(), grace_s=5) as process:
        yield servers.Server(name, process, f"http://127.0.0.1:{port}", "")


def validation_cost(batch: int, seconds: int) -> Validation:
    """Return the cost of validation in a worker, from turns that take `seconds` together."""
    manifest = PythonFileFacts(MODEL.name, "Sentiment", is_batched=True).as_manifest()
    models = [load("sentiment_handler.py", {}, batch), load(HANDLER, manifest, batch)]
    items: list[Item] = [(0, META % (number, len(BODY)), BODY) for number in range(batch)]
    answers = [json.loads(answer(model, items)[0][2]) for model in models]
    assert answers[0] == answers[1], answers
    start_time = time.perf_counter()
    for model in models:
        answer(model, items)
    calls = max(1, int(seconds / TURNS / (time.perf_counter() - start_time)))
    turns = []
    for number in range(TURNS):
        order = models[:: -1 if number % 2 else 1]
        times = [time_calls(model, items, calls) for model in order]
        turns.append(times[:: -1 if number % 2 else 1])
    untyped, typed = (machine.median(column) for column in zip(*turns, strict=True))
    differences = [typed_us - untyped_us for untyped_us, typed_us in turns]
    return Validation(batch, untyped, typed, machine.median(differences))


def load(handler: str, manifest: dict[str, Any], batch: int) -> ServedModel:
    """Load a handler of the models as a worker does."""
    metrics = Metrics("sentiment")
    context = Context("sentiment", str(MODELS), manifest, batch, None, "0", True, metrics)
    coroutines = Coroutines()
    own_modules.enter(MODELS)
    entry = load_entry(handler, MODELS, context, coroutines)
    has_steps = step_times.measure_steps(entry.instance)
    decode = not getattr(entry.instance, "takes_raw_bodies", False)
    return ServedModel(
        entry, context, coroutines, decode, 1 << 30, Ceiling(), metrics, has_steps=has_steps
    )


def answer(model: ServedModel, items: Sequence[Item]) -> list[Any]:
    laps = step_times.begin_next()
    start_time = time.monotonic()
    outcome = answer_batch(model, items, lambda *_: None, started_at=start_time)
    step_times.encode_times(start_time, time.monotonic(), laps)
    return outcome.answers


def time_calls(model: ServedModel, items: Sequence[Item], calls: int) -> float:
    """Return the microseconds of the processor for a request."""
    start_time = time.thread_time()
    for _ in range(calls):
        answer(model, items)
    return (time.thread_time() - start_time) * 1e6 / (calls * len(items))


if __name__ == "__main__":
    main()
