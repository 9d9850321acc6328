"""The speed of `tsx serve`, relative to a runtime that runs the same graph: ResNet-18 in int8.

    python benchmarks/forms_served.py [openvino-int8] [onnx-int8] [--seconds 4] [--rounds 5]
    [--batch 8] [--threads 1] [--connections 32]

The bare loop is a process that runs the form's graph with the library's API on one array in memory,
with batches of the same size and as many threads. The server gets each image as an HTTP request
with raw bytes. Both run in turns. `wall` is the server's requests/s divided by the bare loop's.
With only two cores, the front end and the load generator take time from the model. `cpu` is free of
this effect: it is the processor time per request of the bare loop divided by the worker's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
import servers
from handler_efficiency import Round, served

MODELS = Path(__file__).with_name("models")
FORMS = ("openvino-int8", "onnx-int8")
CALIBRATION_ROWS = (1, 4, 8, 8)  # numbers of rows in the calibration batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("forms", nargs="*", metavar="|".join(FORMS))
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare_loop(options.bare, options)
        return
    print(machine.describe())
    print(
        f"{'form':16}{'bare/s':>10}{'served/s':>10}{'wall':>8}{'bare us':>10}{'worker us':>10}"
        f"{'cpu':>8}{'batch':>8}"
    )
    noise = machine.Noise()
    for form in options.forms or FORMS:
        with tempfile.TemporaryDirectory() as name:
            rounds = measure(form, Path(name), options, noise)
        rate = [statistics.median(pair[index].rate for pair in rounds) for index in (0, 1)]
        cpu = [statistics.median(pair[index].cpu for pair in rounds) * 1e6 for index in (0, 1)]
        wall = statistics.median(served.rate / bare.rate for bare, served in rounds)
        processor = statistics.median(bare.cpu / served.cpu for bare, served in rounds)
        batch = statistics.median(served.batch for _, served in rounds)
        print(
            f"{form:16}{rate[0]:10.0f}{rate[1]:10.0f}{wall:8.1%}{cpu[0]:10.1f}{cpu[1]:10.1f}"
            f"{processor:8.1%}{batch:8.1f}",
            flush=True,
        )
    print(noise)


def measure(
    form: str, directory: Path, options: argparse.Namespace, noise: machine.Noise
) -> list[tuple[Round, Round]]:
    files = make_model(form, directory, options)
    body, script = directory / "body", directory / "post.lua"
    body.write_bytes(pixels(1).tobytes())
    script.write_text(
        'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/octet-stream"\nwrk.body ='
        f' io.open("{body}", "rb"):read("*a")\n'
    )
    command = [
        sys.executable,
        __file__,
        "--bare",
        files,
        "--batch",
        options.batch,
        "--seconds",
        options.seconds,
        "--threads",
        options.threads,
    ]
    rounds = []
    metrics = f"http://127.0.0.1:{servers.free_ports(1)[0]}"
    with servers.tsx(
        directory, directory / "resnet", job_queue_size=1000, metrics_address=metrics
    ) as server:
        servers.first_answer(server, "/predictions/resnet", body.read_bytes())
        served(server, metrics, "resnet", script, options)  # a warm-up
        if "is not used" in (log := (directory / "tsx.log").read_text()):
            raise RuntimeError(f"the form was not served:\n{log}")
        for _ in range(options.rounds):
            noise.sample()
            bare = Round(
                **json.loads(
                    subprocess.run(
                        list(map(str, command)), check=True, capture_output=True, text=True
                    ).stdout
                )
            )
            rounds.append((bare, served(server, metrics, "resnet", script, options)))
    return rounds


def make_model(form: str, parent: Path, options: argparse.Namespace) -> Path:
    """Make an archive's directory `resnet` that serves this form; return the form's directory."""
    import torch

    sys.path.insert(0, str(MODELS))
    from resnet_bytes import model as make

    from tsx_archiver.metadata.forms import FORMS_DIRECTORY, FORMS_FILE, FormIndex, FormRecord
    from tsx_runtime.worker.forms.bound import describe_bound
    from tsx_runtime.worker.forms.form import Subject
    from tsx_runtime.worker.forms.kinds import known_forms
    from tsx_runtime.worker.forms.signature import ModelCall, Signature

    config = {"batchSize": options.batch, "threads": options.threads, "forms": [form]}
    archive = servers.archive(
        parent,
        "resnet",
        "--handler",
        MODELS / "resnet_bytes.py",
        "--extra-files",
        MODELS / "resnet18.py",
        config=config,
    )
    directory, device = parent / "resnet", torch.device("cpu")
    subprocess.run(
        [servers.TSX, "archive", "unpack", archive, directory],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    model, index = make(), known_forms()[form]
    calls = [ModelCall((torch.from_numpy(pixels(rows)),), {}, rows) for rows in CALIBRATION_ROWS]
    signature = Signature.of(model, calls)
    files = directory / FORMS_DIRECTORY / form
    files.mkdir(parents=True)
    with torch.no_grad():
        settings = index.build(Subject(model, calls, signature, "", device), files)
    record = FormRecord(form, describe_bound(index, device), settings, signature.as_json())
    (directory / FORMS_FILE).write_bytes(FormIndex((record,)).content())
    return files


def pixels(rows: int) -> Any:
    return np.random.default_rng(rows).integers(0, 256, (rows, 3, 224, 224), dtype=np.uint8)


def bare_loop(files: Path, options: argparse.Namespace) -> None:
    """Print a `Round` of the bare loop as JSON."""
    run = (
        openvino_loop(files, options.threads)
        if (files / "model.xml").exists()
        else onnx_loop(files, options.threads)
    )
    batch = pixels(options.batch)
    for _ in range(3):
        run(batch)
    requests, start, cpu = 0, time.perf_counter(), time.process_time()
    while (elapsed_s := time.perf_counter() - start) < options.seconds:
        run(batch)
        requests += options.batch
    print(
        json.dumps(
            Round(
                requests / elapsed_s, (time.process_time() - cpu) / requests, options.batch
            )._asdict()
        ),
        flush=True,
    )
    os._exit(0)  # This exit does not wait for threads of the library.


def openvino_loop(files: Path, threads: int) -> Callable[[Any], Any]:
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # It sends no events.
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16",
    }
    request = openvino.compile_model(files / "model.xml", "CPU", settings).create_infer_request()
    return lambda batch: request.infer([batch], share_inputs=True)[0]


def onnx_loop(files: Path, threads: int) -> Callable[[Any], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        str(files / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    (entry,) = session.get_inputs()
    return lambda batch: session.run(None, {entry.name: batch})[0]


if __name__ == "__main__":
    main()
