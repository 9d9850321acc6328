"""The microseconds of a request, layer by layer, in the real code of front end and worker.

    python benchmarks/layers.py [--batch 64] [--seconds 2] [--body 7] [--new-heads] [--routed
    weights] [--traced 0.01]

There are no sockets between the layers, so the kernel's time for them is missing;
`benchmarks/peers` measures the whole. The numbers depend on this machine's processor: compare them
only within one run, or side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import machine
import uvicorn
from uvicorn.server import ServerState

from tsx_runtime import wire
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.core.scheduling.channel import Channel
from tsx_runtime.core.scheduling.dispatcher import Bounds, Dispatcher
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.core.telemetry.tracing import Tracer
from tsx_runtime.core.traffic.routing import make_table
from tsx_runtime.core.traffic.splitter import Splitter
from tsx_runtime.features.tracing.otlp import Sender
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.asgi_lane.predictions import Predictions
from tsx_runtime.http.context import ServerContext
from tsx_runtime.http.fast_lane.connection import FastLane
from tsx_runtime.http.lanes import make_lane
from tsx_runtime.plugins import Plugins
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.traffic_policy import Traffic
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import ServedModel, answer_batch
from tsx_runtime.worker.execution.recovery import Ceiling
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import Coroutines, LoadedHandler
from tsx_runtime.worker.handler_api.metrics import Metrics

VERSIONS = ("1.0", "2.0")
SPLIT = {"1.0": 90, "2.0": 10}
TRAFFIC = {  # traffic policies of the model; most measurements have no policy
    "weights": Traffic(weights=SPLIT),
    "header": Traffic(weights=SPLIT, sticky="header:host"),
    "field": Traffic(weights=SPLIT, sticky="field:user"),
}
HEAD = b"POST /predictions/ok HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nContent-Length: %d\r\n%b\r\n"


class Wire(asyncio.Transport):
    """A transport that stores the written bytes, in the place of a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []

    def write(self, data: Any) -> None:
        self.written.append(data)

    def writelines(self, list_of_data: Any) -> None:
        self.written.extend(list_of_data)

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Layers:
    """A connection for each request, a dispatcher, a channel and a worker's code, step by step."""

    def __init__(
        self,
        batch: int,
        body: bytes,
        new_heads: bool,
        routed: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.layer_seconds = dict.fromkeys(
            ("read and submit", "assign and send", "worker", "receive and answer"), 0.0
        )
        self.requests = 0
        self.other_threads_s = 0.0  # processor seconds of other threads (the tracer's)
        self.dispatcher = Dispatcher("ok", BatchLimits(batch), Bounds(10 * batch))
        self.dispatcher.accept(True)
        route = _route(self.dispatcher, TRAFFIC.get(routed or ""))
        hidden_headers = SimpleNamespace(for_model=lambda name: frozenset())
        registry: Any = SimpleNamespace(
            route=lambda name, version, headers: route.route_for_headers(headers),
            models={},
            on_change=[],
            hidden_headers=hidden_headers,
            plugins=Plugins(),
            bytes_in_flight=ByteBudget(1 << 40),
            tracer=tracer,
        )
        app = ServerApp(ServerContext(Settings(), registry))
        app.lane_of = cache(partial(make_lane, app))
        app.predictions = Predictions(registry, 1 << 30, None, app.counts, lambda name: {})
        config = uvicorn.Config(app, lifespan="off", access_log=False, log_config=None)
        state = ServerState()
        state.default_headers = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")]
        self.connections = [FastLane(config, state, {}) for _ in range(batch)]
        for connection in self.connections:
            connection.connection_made(Wire())
        self.channel_wire = Wire()
        self.channel = Channel(self.dispatcher)
        self.channel.connection_made(self.channel_wire)
        self.dispatcher.add(self.channel)
        context = Context("ok", ".", {}, batch, None, "0", True, Metrics("ok"), {})
        entry = LoadedHandler(lambda data, context: ["OK"] * len(data), "ok", None)
        self.model = ServedModel(entry, context, Coroutines(), True, 1 << 30, Ceiling(), Metrics())
        self.body = body
        self.new_heads = new_heads

    def round(self) -> None:
        times = [time.thread_time()]
        for number, connection in enumerate(self.connections):
            extra = b"X-Trace: %d\r\n" % (self.requests + number) if self.new_heads else b""
            connection.data_received(HEAD % (len(self.body), extra) + self.body)
        times.append(time.thread_time())
        self.dispatcher._flush()
        times.append(time.thread_time())
        frame = b"".join(self.channel_wire.written)
        self.channel_wire.written.clear()
        start = time.thread_time()
        decoded = wire.decode(wire.decode_header(frame), memoryview(frame)[wire.HEADER.size :])
        start_time = time.monotonic()
        outcome = answer_batch(self.model, decoded.items, lambda *_: None, started_at=start_time)
        reply = b"".join(
            wire.encode(
                wire.Kind.REPLY,
                decoded.batch,
                outcome.answers,
                step_times.encode_times(start_time, time.monotonic(), []),
            )
        )
        times.append(times[-1] + time.thread_time() - start)
        start = time.thread_time()
        for offset in range(0, len(reply), 65536):
            chunk = reply[offset : offset + 65536]
            self.channel.get_buffer(-1)[: len(chunk)] = chunk
            self.channel.buffer_updated(len(chunk))
        times.append(times[-1] + time.thread_time() - start)
        for connection in self.connections:
            connection.transport.written.clear()  # type: ignore[attr-defined]
        self.requests += len(self.connections)
        for name, begin, end in zip(self.layer_seconds, times, times[1:], strict=False):
            self.layer_seconds[name] += end - begin


def _route(dispatcher: Dispatcher, traffic: Traffic | None) -> Any:
    """Return a version, or with a traffic policy a split of two versions that share a queue."""
    plan = SimpleNamespace(strategy=SimpleNamespace(sequences=None))
    versions: dict[str, Any] = {
        number: SimpleNamespace(
            name="ok",
            version=number,
            submit=dispatcher.submit,
            client_timeout=0.0,
            plan=plan,
            stats=dispatcher.stats,
        )
        for number in VERSIONS
    }
    if traffic is not None:
        split = Splitter("ok")
        split.set(make_table("ok", traffic, VERSIONS, VERSIONS, "1.0"), versions)
        return split
    version = versions["1.0"]
    version.route_for_headers = lambda headers: version
    return version


async def measure(options: argparse.Namespace, tracer: Tracer | None = None) -> Layers:
    layers = Layers(options.batch, _body(options), options.new_heads, options.routed, tracer)
    layers.round()
    layers.requests, layers.layer_seconds = 0, dict.fromkeys(layers.layer_seconds, 0.0)
    layers.other_threads_s = time.thread_time() - time.process_time()
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        layers.round()
        await asyncio.sleep(0)  # This lets the callbacks of `call_soon` run.
    layers.other_threads_s += time.process_time() - time.thread_time()
    return layers


def measure_traced(options: argparse.Namespace) -> Layers:
    """Measure with spans, which go to a collector in another process that discards them."""
    answers, port = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_collect, args=(port,), daemon=True
    )
    process.start()
    sender = Sender(f"http://127.0.0.1:{answers.recv()}/v1/traces")
    try:
        return asyncio.run(measure(options, Tracer(options.traced, sender.emit)))
    finally:
        sender.close()
        process.terminate()


def _collect(port: Any) -> None:
    class Thrower(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Thrower)
    port.send(server.server_port)
    server.serve_forever()


def _body(options: argparse.Namespace) -> bytes:
    body = b"x" * int(options.body)
    return b'{"user": "ann", "rest": "%b"}' % body if options.routed == "field" else body


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64, help="requests that arrive together")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--body", type=int, default=7, help="bytes of a body")
    parser.add_argument(
        "--new-heads",
        action="store_true",
        help="each request has a header of its own, so that no head is known",
    )
    parser.add_argument(
        "--routed",
        choices=TRAFFIC,
        help="how requests are split between two versions; without it there is one version",
    )
    parser.add_argument(
        "--traced",
        type=float,
        default=0.0,
        help="share of the requests that are traced; needs the extra otel",
    )
    options = parser.parse_args()
    layers = measure_traced(options) if options.traced else asyncio.run(measure(options))
    print(
        f"{machine.describe()}; batches of {options.batch}, bodies of {options.body} bytes,"
        f" {layers.requests:,} requests"
    )
    for name, seconds in layers.layer_seconds.items():
        print(f"{name:20} {1e6 * seconds / layers.requests:6.2f} us a request")
    print(
        f"{'all':20} {1e6 * sum(layers.layer_seconds.values()) / layers.requests:6.2f} us a request"
    )
    if options.traced:
        print(
            f"{'beside it':20} {1e6 * layers.other_threads_s / layers.requests:6.2f} us a request, of the"
            " thread that sends"
        )


if __name__ == "__main__":
    main()
