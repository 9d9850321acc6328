"""The default number of threads, compared with the best number that is set by hand.

    python benchmarks/shared_cores.py [small] [large] [--seconds 3] [--rounds 5] [--connections 8]

In the three cases, a model runs alone, with another model, and with busy processes. Three servers
have the same model: with tsx's default, with `threads` of 1, and with `threads` of all cores. They
get the load in turns; the others idle meanwhile. Each also has another model with the same setting.
`small` is three convolutions on 32 x 32 pixels, `large` the same on 224 x 224 with four times the
channels. The last column is the default's throughput relative to the better of the other two in the
same rounds.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import machine
import psutil
import servers
import wrk

MODELS = {"small": (32, 16), "large": (224, 64)}  # pixels, channels of the first layer
CORES = len(psutil.Process().cpu_affinity())
CASES = ("alone", "beside another model", "beside busy processes")
SPIN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="small|large", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=3, help="of load in each turn")
    parser.add_argument("--rounds", type=int, default=5, help="whose medians are printed")
    parser.add_argument("--connections", type=int, default=8)
    options = parser.parse_args()
    noise = machine.Noise()
    print(
        f"{machine.describe()}; medians of {options.rounds} rounds of {options.seconds:g} s,"
        f" {options.connections} connections"
    )
    print(
        f"{'model':7}{'case':24}{'default':>10}{'1 thread':>10}{f'{CORES} threads':>11}"
        f"{'of the best':>13}"
    )
    for model in options.models:
        with tempfile.TemporaryDirectory() as name:
            measure(model, Path(name), options, noise)
    print(noise)


def measure(model: str, directory: Path, options: argparse.Namespace, noise: machine.Noise) -> None:
    body = directory / "body.png"
    variants: tuple[dict[str, object], ...] = ({}, {"threads": 1}, {"threads": CORES})
    body.write_bytes(picture(MODELS[model][0]))
    with ExitStack() as stack:
        running = []
        for number, config in enumerate(variants):
            (server_directory := directory / str(number)).mkdir()
            server = stack.enter_context(
                servers.tsx(
                    server_directory,
                    *(pack(model, server_directory, name, config) for name in ("model", "other")),
                )
            )
            for name in ("model", "other"):
                servers.first_answer(server, f"/predictions/{name}", body.read_bytes())
            running.append(server)
        for case in CASES:
            rates: list[list[float]] = [[] for _ in running]
            for _ in range(options.rounds):
                noise.sample()
                for server, server_rates in zip(running, rates, strict=True):
                    with running_case(case, server, body):
                        url = f"{server.inference}/predictions/model"
                        wrk.load(url, options.connections, 2, body)
                        server_rates.append(
                            wrk.load(url, options.connections, options.seconds, body).rate
                        )
            default, one_thread, all_cores = map(machine.median, rates)
            print(
                f"{model:7}{case:24}{default:10,.0f}{one_thread:10,.0f}{all_cores:11,.0f}"
                f"{default / max(one_thread, all_cores):13.0%}",
                flush=True,
            )


@contextmanager
def running_case(case: str, server: servers.Server, body: Path) -> Iterator[None]:
    if case == "alone":
        yield
        return
    commands = [[sys.executable, "-c", SPIN]] * CORES
    if case == "beside another model":
        commands = [
            [
                "wrk",
                "-t1",
                "-c2",
                "-d60s",
                "-s",
                str(wrk.SCRIPT),
                f"{server.inference}/predictions/other",
            ]
        ]
    environment = servers.clean_environment() | {"BODY": str(body)}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def pack(model: str, directory: Path, name: str, config: dict[str, object]) -> Path:
    import torch

    pixels, channels = MODELS[model]
    layers: list[torch.nn.Module] = []
    for in_channels, out_channels in (
        (3, channels),
        (channels, 2 * channels),
        (2 * channels, 4 * channels),
    ):
        layers += [
            torch.nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1),
            torch.nn.ReLU(),
        ]
    net = torch.nn.Sequential(
        *layers,
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * channels, 10),
    ).eval()
    torch.jit.save(
        torch.jit.trace(net, torch.zeros(1, 3, pixels, pixels)), directory / f"{name}.pt"
    )  # type: ignore[no-untyped-call]  # torch's
    handler = directory / "handler.py"
    handler.write_text(HANDLER)
    return servers.archive(
        directory,
        name,
        "--serialized-file",
        directory / f"{name}.pt",
        "--handler",
        handler,
        config={"batchSize": 8, **config},
    )


HANDLER = """
import numpy as np
import torch
from ts.torch_handler.image_classifier import ImageClassifier

class Plain(ImageClassifier):
    image_processing = staticmethod(lambda image: torch.from_numpy(np.array(image, dtype=np.float32) / 255).permute(2, 0, 1))
"""


def picture(pixels: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((pixels, pixels), 80).convert("RGB").save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    main()
