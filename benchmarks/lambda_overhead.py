"""The cost of a Lambda invocation in addition to the handler's time, and the steps of a cold start.

    python benchmarks/lambda_overhead.py [--invocations 300] [--rounds 5]

Warm: the model digits behind a local Runtime API (that of `tsx check`), with AWS's client and with
tsx's. They take turns with a bare function that AWS's client calls and that calls the same handler.
Afterwards a plain loop measures the handler alone.

Cold: the cases take turns, each with a new process. It begins like the entry point of the image,
and records the time of each step. Unlike on a real cold start, compiled files are in the page
cache.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import machine
import servers

from tsx_archiver import open_archive
from tsx_cli.check.lambda_host import Host

DIGITS = Path(__file__).parents[1] / "examples" / "digits"
IMAGE = (DIGITS / "images" / "7.png").read_bytes()
PACK = (
    "digits",
    "--model-file",
    DIGITS / "model.py",
    "--handler",
    DIGITS / "handler.py",
    "--extra-files",
    DIGITS / "index_to_name.json",
)

EVENT = {
    "version": "2.0",
    "rawPath": "/predictions/digits",
    "rawQueryString": "",
    "headers": {"content-type": "image/png"},
    "requestContext": {
        "http": {"method": "POST", "path": "/predictions/digits", "sourceIp": "127.0.0.1"},
        "stage": "$default",
    },
    "body": base64.b64encode(IMAGE).decode(),
    "isBase64Encoded": True,
}
BARE = """
import base64, json, os, sys
os.chdir(os.environ["MODEL"]); sys.path.insert(0, os.environ["MODEL"])
from tsx_runtime.worker import main
from tsx_runtime.worker.handler_api import ts_shim
ts_shim.install()
from tsx_runtime.worker.handler_api.context import Context
from handler import DigitClassifier
import torch
torch.set_num_threads(int(os.environ["THREADS"]))
context = Context("digits", os.environ["MODEL"], json.load(open("MAR-INF/MANIFEST.json")), 1, None, "1", True, None, {})
model = DigitClassifier(); model.initialize(context)
def handler(event, _):
    context.begin(["id\\r\\n\\r\\n"], {}, lambda *_: None)
    body = json.dumps(model.handle([{"body": base64.b64decode(event["body"])}], context)[0])
    return {"statusCode": 200, "headers": {"content-type": "application/json"}, "body": body, "isBase64Encoded": False}
"""
PLAIN = """
import json, sys, time
sys.path.insert(0, sys.argv[1]); import bare
event = json.loads(sys.argv[2]); times = []
for _ in range(int(sys.argv[3])):
    began = time.perf_counter(); bare.handler(event, None); times.append(time.perf_counter() - began)
print(sorted(times)[len(times) // 2])
"""
COLD = """
import json, os, sys, time
times = [float(sys.argv[1]), time.time()]
import tsx_runtime.targets.aws_lambda.ric_client, tsx_runtime.targets.aws_lambda.function as function
times.append(time.time())
if sys.argv[2] == "torch":
    from tsx_runtime.worker.launch import preload
times.append(time.time())
handler = function.Handler(os.environ)
times.append(time.time())
class Context:
    get_remaining_time_in_millis = staticmethod(lambda: 60_000)
for _ in range(2):
    answer = handler(json.loads(sys.argv[3]), Context())
    assert answer["statusCode"] == 200, answer
    times.append(time.time())
print(json.dumps([after - before for before, after in zip(times, times[1:])]), flush=True)
os._exit(0)
"""
STEPS = ("Python", "import tsx", "import torch", "load", "first inference", "second")


def unpacked_model(directory: Path) -> Path:
    """Unpack an archive, and return the directory that an image has at /opt/ml/model."""
    archive = servers.archive(directory, *PACK, "--serialized-file", DIGITS / "digits.pth")
    with open_archive(archive, cache=directory / "cache") as unpacked:
        model = directory / "model"
        unpacked.directory.rename(model)
    return model


def variables(directory: Path, model: Path, extra_variables: Mapping[str, str]) -> dict[str, str]:
    base_variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("TSX_", "AWS_"))
    }
    return base_variables | {
        "TSX_MODEL_DIR": str(model),
        "TSX_CACHE_DIR": str(directory / "unpacked"),
        **extra_variables,
    }


def measure_warm(
    directory: Path, model: Path, invocations: int, rounds: int, noise: machine.Noise
) -> None:
    (directory / "bare.py").write_text(BARE)
    threads = str(len(os.sched_getaffinity(0)))
    entry = [sys.executable, "-m", "tsx_runtime.targets.entry"]
    bare = {
        "MODEL": str(model),
        "THREADS": threads,
        "PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]),
    }
    hosts = {
        "the handler, by awslambdaric": Host(
            [sys.executable, "-m", "awslambdaric", "bare.handler"],
            directory,
            variables(directory, model, bare),
        ),
        "tsx, by awslambdaric": Host(
            entry, directory, variables(directory, model, {"TSX_LAMBDA_RUNTIME": "awslambdaric"})
        ),
        "tsx, by its own client": Host(
            entry, directory, variables(directory, model, {"TSX_LAMBDA_RUNTIME": "tsx"})
        ),
    }
    times_by_host: dict[str, list[float]] = {name: [] for name in hosts}
    answers = set()
    try:
        for host in hosts.values():
            for _ in range(50):
                reported = host.invoke(EVENT)
                assert not reported.error, (reported.answer, host.log)
                answers.add(json.dumps(json.loads(reported.json()["body"])))
        assert len(answers) == 1, answers
        for _ in range(rounds):
            noise.sample()
            for name, host in hosts.items():
                times = []
                for _ in range(invocations):
                    start = time.perf_counter()
                    host.invoke(EVENT)
                    times.append(time.perf_counter() - start)
                times_by_host[name].append(machine.median(times))
    finally:
        for host in hosts.values():
            host.close()
    command = [sys.executable, "-c", PLAIN, str(directory), json.dumps(EVENT), str(3 * invocations)]
    plain_s = float(
        subprocess.run(
            command,
            env=variables(directory, model, bare),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    print(f"warm, medians of {rounds} turns of {invocations} invocations, ms:\n")
    print("| | an invocation | beyond the handler's own time |\n|---|---|---|")
    print(f"| the handler in a plain loop | {plain_s * 1000:.2f} | |")
    for name, times in times_by_host.items():
        print(
            f"| {name} | {machine.median(times) * 1000:.2f} |"
            f" {(machine.median(times) - plain_s) * 1000:.2f} |"
        )


def measure_cold(scratch: Path, model: Path, rounds: int, noise: machine.Noise) -> None:
    packed = scratch / "packed"
    packed.mkdir()
    servers.archive(packed, *PACK, "--serialized-file", DIGITS / "digits.pth")
    model_with_warm_up = scratch / "warm"
    subprocess.run(["cp", "-r", str(model), str(model_with_warm_up)], check=True)
    (model_with_warm_up / "7.png").write_bytes(IMAGE)
    (model_with_warm_up / "model-config.yaml").write_text("warmup:\n  - file: 7.png\n")
    manifest = json.loads((model_with_warm_up / "MAR-INF" / "MANIFEST.json").read_text())
    manifest["model"]["configFile"] = "model-config.yaml"
    (model_with_warm_up / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    (scratch / "none").mkdir()
    cases: dict[str, tuple[Path, dict[str, str]]] = {
        "as tsx deploy makes the image": (model, {}),
        "the .mar itself, unpacked at the start": (packed, {"FRESH": "1"}),
        "nothing compiled beforehand": (
            model,
            {"PYTHONPYCACHEPREFIX": str(scratch / "none"), "PYTHONDONTWRITEBYTECODE": "1"},
        ),
        "one thread for torch": (model, {"OMP_NUM_THREADS": "1"}),
        "with a warm-up in the archive": (model_with_warm_up, {}),
    }
    times_by_case: dict[str, list[list[float]]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        noise.sample()
        for name, (directory, extra_variables) in cases.items():
            if turn == 0 and "PYTHONPYCACHEPREFIX" in extra_variables:
                continue
            cache = (
                scratch / f"unpacked-{turn}" if "FRESH" in extra_variables else scratch / "unpacked"
            )
            env = variables(scratch, directory, {**extra_variables, "TSX_CACHE_DIR": str(cache)})
            command = [sys.executable, "-c", COLD, str(time.time()), "torch", json.dumps(EVENT)]
            reported = subprocess.run(
                command,
                env=env,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ).stdout
            if turn:  # After the first turn, all files are in memory.
                times_by_case[name].append(json.loads(reported))
    print(
        f"\ncold, medians of {rounds} rounds, ms:\n\n| | {' | '.join(STEPS)} | until the first"
        f" answer |\n|{'---|' * (len(STEPS) + 2)}"
    )
    for name, times in times_by_case.items():
        steps = [machine.median(step) * 1000 for step in zip(*times, strict=True)]
        first_answer_ms = (
            machine.median([sum(steps_of_round[:-1]) for steps_of_round in times]) * 1000
        )
        print(
            f"| {name} |"
            f" {' | '.join(f'{step:.0f}' if step >= 10 else f'{step:.1f}' for step in steps)} |"
            f" {first_answer_ms:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--invocations", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    noise = machine.Noise()
    print(f"{machine.describe()}\n")
    with tempfile.TemporaryDirectory() as directory:
        parent = Path(directory)
        model = unpacked_model(parent)
        measure_warm(parent, model, options.invocations, options.rounds, noise)
        measure_cold(parent, model, options.rounds, noise)
    print(f"\n{noise}")


if __name__ == "__main__":
    main()
