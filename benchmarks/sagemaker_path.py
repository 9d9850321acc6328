"""SageMaker's path of tsx, compared with the toolkit's loop of one request at a time.

    python benchmarks/sagemaker_path.py [mlp] [encoder] [--connections 16,64] [--rounds 5]
    [--seconds 2]

Both serve the same directory in the toolkit's layout, with one process for the model and one thread
of torch. tsx is started by the entry point of its image, as in SageMaker, and answers at
`/invocations`; the loop is `toolkit_loop.py`. They run side by side and get load in turns. The
result is the ratio of each pair of turns, as its median and its range. Their responses are compared
first.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import machine
import numpy as np
import servers
import wrk

LOOP = Path(__file__).with_name("toolkit_loop.py")
ONE_THREAD = (
    "import torch\nfrom torch import nn\n\ntorch.set_num_threads(1)\ntorch.manual_seed(0)\n\n"
)
# Programs that use the toolkit's default input_fn, predict_fn and output_fn.
PROGRAMS = {
    "mlp": (
        """
def model_fn(model_dir):
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
"""
    ),
    "encoder": (
        """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 2)

    def forward(self, rows):
        return self.last(self.layers(rows).mean(dim=1))

def model_fn(model_dir):
    return Encoder()
"""
    ),
}
SHAPES = {"mlp": (1, 784), "encoder": (1, 32, 64)}
NPY = "application/x-npy"
TOLERANCE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="mlp|encoder")
    parser.add_argument("--connections", default="16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    if disturbance := machine.busy_before():
        print(disturbance)
    print(machine.describe())
    print(
        f"{'model':8}{'connections':>12}{'tsx/s':>10}{'loop/s':>10}{'tsx p50':>9}{'loop p50':>9}  "
        " times the requests/s"
    )
    noise = machine.Noise()
    for name in options.models or PROGRAMS:
        with tempfile.TemporaryDirectory() as temporary, serve_both(Path(temporary), name) as urls:
            script = lua(Path(temporary), name)
            for connections in map(int, options.connections.split(",")):
                print(compare(name, urls, script, connections, options, noise), flush=True)
    print(noise)


def compare(
    name: str,
    urls: list[str],
    script: Path,
    connections: int,
    options: argparse.Namespace,
    noise: machine.Noise,
) -> str:
    for url in urls:
        load(url, script, connections, 1)  # a warm-up
    turns = []
    for number in range(options.rounds):
        noise.sample()
        # The order alternates, so that a drift of the machine favours neither.
        order = urls if number % 2 == 0 else urls[::-1]
        results = {url: load(url, script, connections, options.seconds) for url in order}
        turns.append([results[url] for url in urls])
    tsx_rounds, loop_rounds = ([turn[index] for turn in turns] for index in (0, 1))
    ratios = [tsx_round.rate / loop_round.rate for tsx_round, loop_round in turns]
    rates = [
        machine.median([round_.rate for round_ in index]) for index in (tsx_rounds, loop_rounds)
    ]
    p50 = [machine.median([round_.p50 for round_ in index]) for index in (tsx_rounds, loop_rounds)]
    ratio_text = f"{machine.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return (
        f"{name:8}{connections:12}{rates[0]:10.0f}{rates[1]:10.0f}{p50[0]:9.2f}{p50[1]:9.2f}  "
        f" {ratio_text}"
    )


@contextmanager
def serve_both(directory: Path, name: str) -> Iterator[list[str]]:
    """Yield the addresses of both servers, after a comparison of their responses."""
    code = directory / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text(ONE_THREAD + PROGRAMS[name])
    (code.parent / "model-config.yaml").write_text("independentRows: true\n")
    ours, theirs = servers.free_ports(2)
    environment = servers.clean_environment()
    tsx_variables = {
        "SAGEMAKER_BASE_DIR": str(directory),
        "SAGEMAKER_BIND_TO_PORT": str(ours),
        "TSX_TARGET": "sagemaker",
        "TSX_JOB_QUEUE_SIZE": "1000",
    }
    entry = [sys.executable, "-m", "tsx_runtime.targets.entry", "serve"]
    loop = [sys.executable, LOOP, str(directory / "model"), str(theirs)]
    with (
        servers.running(
            entry,
            directory,
            {**environment, **tsx_variables, "TSX_CACHE_DIR": str(directory / "cache")},
            "tsx",
        ) as tsx,
        servers.running(loop, directory, environment, "loop") as loop_process,
    ):
        urls = [f"http://127.0.0.1:{port}" for port in (ours, theirs)]
        processes = (tsx, loop_process)
        answers = [
            first_answer(url, process, name) for url, process in zip(urls, processes, strict=True)
        ]
        np.testing.assert_allclose(*answers, rtol=TOLERANCE, atol=TOLERANCE)
        yield [f"{url}/invocations" for url in urls]


def first_answer(url: str, process: subprocess.Popen[bytes], name: str) -> list[list[float]]:
    server = servers.Server("", process, url, "")
    servers.first_answer(server, "/ping", None)
    request = urllib.request.Request(f"{url}/invocations", body_of(name), {"Content-Type": NPY})
    with urllib.request.urlopen(request, timeout=servers.START_TIMEOUT_S) as answer:
        prediction: list[list[float]] = json.loads(answer.read())
        return prediction


def body_of(name: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).random(SHAPES[name], dtype=np.float32))
    return file.getvalue()


def lua(directory: Path, name: str) -> Path:
    (directory / "body").write_bytes(body_of(name))
    script = directory / "post.lua"
    lua_body = f'wrk.body = io.open("{directory / "body"}", "rb"):read("*a")'
    script.write_text(f'wrk.method = "POST"\n{lua_body}\nwrk.headers["Content-Type"] = "{NPY}"\n')
    return script


def load(url: str, script: Path, connections: int, seconds: float) -> wrk.Round:
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds:g}s",
        f"--timeout={wrk.RESPONSE_TIMEOUT_S}s",
        "--latency",
        "-s",
        str(script),
        url,
    ]
    return wrk.parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
