"""The speed of a handler in tsx, relative to its speed in a bare loop.

    python benchmarks/handler_efficiency.py [image] [tokens] [--seconds 2] [--rounds 3] [--batch 32]
    [--connections 128]

The handlers are `image_classifier` on a JPEG, and a transformer. The bare loop runs the handler of
the same archive in its own process, on batches of the same size, also with one thread of torch.
Both run in turns. `wall` is the server's requests/s divided by the bare loop's. With busy cores, or
only two, the front end and the load take time from the model. `cpu` is free of this effect: it is
the processor time per request of the bare loop divided by the worker's. The difference to 100 % is
the worker's time outside the handler.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import machine
import psutil
import servers

if TYPE_CHECKING:
    from tsx_runtime.worker.model_loading import ServedModel

MODELS = Path(__file__).with_name("models")
THREADS = 1


class Round(NamedTuple):
    rate: float  # requests/s
    cpu: float  # processor seconds per request
    batch: float  # requests per call of the handler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="image|tokens")
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--connections", type=int, default=128)
    parser.add_argument(
        "--bare", nargs=2, type=Path, metavar=("DIRECTORY", "BODY"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.bare:
        bare_loop(*options.bare, options.batch, options.seconds)
        return
    print(machine.describe())
    print(
        f"{'model':8}{'bare/s':>10}{'served/s':>10}{'wall':>8}{'bare us':>10}{'worker us':>10}"
        f"{'cpu':>8}{'batch':>8}"
    )
    noise = machine.Noise()
    for name in options.models or ("image", "tokens"):
        with tempfile.TemporaryDirectory() as temporary:
            rounds = measure(name, Path(temporary), options, noise)
        bare, served = (
            [contender_rounds[number] for contender_rounds in rounds] for number in (0, 1)
        )
        rate = [
            statistics.median(round_.rate for round_ in contender_rounds)
            for contender_rounds in (bare, served)
        ]
        cpu = [
            statistics.median(round_.cpu for round_ in contender_rounds) * 1e6
            for contender_rounds in (bare, served)
        ]
        batch = statistics.median(round_.batch for round_ in served)
        print(
            f"{name:8}{rate[0]:10.0f}{rate[1]:10.0f}{rate[1] / rate[0]:8.1%}{cpu[0]:10.1f}"
            f"{cpu[1]:10.1f}{cpu[0] / cpu[1]:8.1%}{batch:8.1f}",
            flush=True,
        )
    print(noise)


def measure(
    name: str, parent: Path, options: argparse.Namespace, noise: machine.Noise
) -> list[tuple[Round, Round]]:
    body = parent / "body"
    archive = (
        make_image(parent, body, options.batch)
        if name == "image"
        else make_tokens(parent, body, options.batch)
    )
    directory = parent / "unpacked"
    subprocess.run(
        [servers.TSX, "archive", "unpack", archive, directory],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    script = parent / "post.lua"
    script.write_text(
        'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/octet-stream"\nwrk.body ='
        f' io.open("{body}", "rb"):read("*a")\n'
    )
    command = [
        sys.executable,
        __file__,
        "--bare",
        directory,
        body,
        "--batch",
        str(options.batch),
        "--seconds",
        str(options.seconds),
    ]
    rounds = []
    metrics = f"http://127.0.0.1:{servers.free_ports(1)[0]}"
    with servers.tsx(parent, archive, job_queue_size=1000, metrics_address=metrics) as server:
        servers.first_answer(server, f"/predictions/{name}", body.read_bytes())
        served(server, metrics, name, script, options)  # a warm-up
        for _ in range(options.rounds):
            noise.sample()
            bare = Round(
                **json.loads(
                    subprocess.run(
                        list(map(str, command)), check=True, capture_output=True, text=True
                    ).stdout
                )
            )
            rounds.append((bare, served(server, metrics, name, script, options)))
    return rounds


def served(
    server: servers.Server, metrics: str, name: str, script: Path, options: argparse.Namespace
) -> Round:
    (worker,) = json.loads(server.call(f"/models/{name}", management=True))[0]["workers"]
    process = psutil.Process(worker["pid"])
    start_counts, cpu_before = batches(metrics), process.cpu_times()
    load = [
        "wrk",
        "-t1",
        f"-c{options.connections}",
        f"-d{options.seconds}s",
        "-s",
        str(script),
        f"{server.inference}/predictions/{name}",
    ]
    output = subprocess.run(load, capture_output=True, text=True, check=True).stdout
    cpu_after, end_counts = process.cpu_times(), batches(metrics)
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"not all requests were answered:\n{output}")
    (rate,) = re.findall(r"Requests/sec:\s+([\d.]+)", output)
    requests = end_counts[1] - start_counts[1]
    seconds = cpu_after.user + cpu_after.system - cpu_before.user - cpu_before.system
    return Round(float(rate), seconds / requests, requests / (end_counts[0] - start_counts[0]))


def batches(metrics: str) -> tuple[float, float]:
    """Return how many batches the worker has answered, and how many requests were in them."""
    with urllib.request.urlopen(f"{metrics}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    matches = [
        re.search(rf"^tsx_batch_size_{part}\{{.*\}} (\S+)$", text, re.MULTILINE)
        for part in ("count", "sum")
    ]
    return tuple(float(match[1]) if match else 0.0 for match in matches)  # type: ignore[return-value]  # two of them


def make_image(directory: Path, body: Path, batch: int) -> Path:
    import torch
    from PIL import Image

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for start_counts, end_counts in ((3, 16), (16, 32), (32, 64)):
        layers += [
            torch.nn.Conv2d(start_counts, end_counts, 3, stride=2, padding=1),
            torch.nn.ReLU(),
        ]
    net = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    ).eval()
    torch.jit.save(torch.jit.trace(net, torch.zeros(1, 3, 224, 224)), directory / "net.pt")  # type: ignore[no-untyped-call]  # torch's
    file = io.BytesIO()
    Image.effect_noise((32, 32), 80).convert("RGB").resize((320, 280)).save(
        file, "JPEG", quality=90
    )
    body.write_bytes(file.getvalue())
    return servers.archive(
        directory,
        "image",
        "--serialized-file",
        directory / "net.pt",
        "--handler",
        "image_classifier",
        config={"batchSize": batch, "threads": THREADS},
    )


def make_tokens(directory: Path, body: Path, batch: int) -> Path:
    import numpy as np

    body.write_bytes(np.random.default_rng(0).integers(0, 1000, 64, dtype=np.int64).tobytes())
    files = ("--handler", MODELS / "tokens.py", "--extra-files", MODELS / "encoder.py")
    return servers.archive(
        directory, "tokens", *files, config={"batchSize": batch, "threads": THREADS}
    )


def load(directory: Path, batch: int) -> ServedModel:
    """Load the handler as a worker does."""
    from tsx_runtime.wire import LoadOrder
    from tsx_runtime.worker.model_loading import load_model

    manifest = json.loads((directory / "MAR-INF" / "MANIFEST.json").read_text())
    return load_model(
        LoadOrder(
            model_name="bare",
            model_version="1.0",
            model_dir=str(directory),
            manifest=manifest,
            model_config=(directory / "model-config.yaml").read_text(),
            handler=manifest["model"]["handler"],
            worker="bare",
            gpu_id=None,
            batch_size=batch,
            max_batch_cost=0,
            response_timeout=120,
            threads=THREADS,
            shares_cores=False,
            cores=None,
            variables={},
            ranks=1,
            gpus=0,
            limit_max_image_pixels=True,
            properties={},
            decode_input_request=True,
            max_response_size=1 << 30,
            envelope="",
            server_version="0",
            output="",
            model_metrics=[],
            mode="batch",
            stateful=False,
            json_nan="null",
            guess_content_type=False,
            handler_error_status=500,
        )
    )


def bare_loop(directory: Path, body: Path, batch: int, seconds: int) -> None:
    """Call the handler repeatedly; print a `Round` as JSON."""
    model, content = load(directory, batch), body.read_bytes()
    model.context.begin([f"id-{number}\r\n\r\n" for number in range(batch)])
    rows = [{"body": bytearray(content)} for _ in range(batch)]
    for _ in range(3):
        model.entry.call(list(rows), model.context)
    requests, start, cpu = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < seconds:
        model.entry.call(list(rows), model.context)
        requests += batch
    print(
        json.dumps(
            Round(requests / elapsed, (time.process_time() - cpu) / requests, batch)._asdict()
        ),
        flush=True,
    )
    os._exit(0)  # This exit does not wait for threads of the library.


if __name__ == "__main__":
    main()
