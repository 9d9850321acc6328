"""A comparison of tsx with TorchServe 0.12, Mosec and LitServe: one worker, batches of up to 64.

    python -m benchmarks.peers [--quick] [--only ok,mlp] [--peers tsx,mosec] [--rounds 3] [--json
    FILE]

Run it from the root of the repository, on Linux, with `wrk`; TorchServe needs Java 17 too. Each
peer gets its own environment from PyPI on first use; TSX_PEER_TORCHSERVE names an existing
environment. A peer that cannot be installed is left out, and the report tells it. A run takes about
45 minutes, a quick one about eight.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks import machine, servers
from benchmarks.peers import environments, field, measure, report

MODELS = Path(__file__).parents[1] / "models"
MAX_WARM_UP_S = 3  # A JVM needs this warm-up.


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of everything; the medians are printed (3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=4, help="of each round of the closed loop (4)"
    )
    parser.add_argument(
        "--open-seconds",
        type=float,
        default=2,
        help="of each round of the open loop; 0 leaves it out (2)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of 2 s, one of 1 s in the open loop, constant arrivals only",
    )
    parser.add_argument(
        "--only",
        type=names([workload.name for workload in measure.WORKLOADS]),
        help="workloads, with commas between",
    )
    parser.add_argument("--peers", type=names(field.PEERS), help="servers, with commas between")
    parser.add_argument(
        "--environments",
        type=Path,
        default=environments.default_directory(),
        help="where the peers' environments are kept",
    )
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.open_seconds = 1, 2, min(1, options.open_seconds)
    options.arrivals = ("constant",) if options.quick else ("constant", "Poisson")
    return options


def names(known_names: list[str] | tuple[str, ...]):  # type: ignore[no-untyped-def]  # what argparse takes for a type
    def parse(text: str) -> list[str]:
        choices = [name.strip().lower() for name in text.split(",")]
        unknown_names = set(choices) - {name.lower() for name in known_names}
        if unknown_names:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown_names))}; known are {', '.join(known_names)}"
            )
        return [name for name in known_names if name.lower() in choices]

    return parse


def print_status(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def packer(options: argparse.Namespace) -> Path:
    """Return the torch-model-archiver of TorchServe's environment if that is used, else tsx's."""
    environment = os.environ.get("TSX_PEER_TORCHSERVE")
    return (
        (
            Path(environment)
            if environment
            else environments.environment_of("archiver", options.environments)
        )
        / "bin"
        / "torch-model-archiver"
    )


def bodies(
    directory: Path, model: Path, workloads: list[measure.Workload]
) -> list[tuple[measure.Workload, Path]]:
    """Return a body file for each workload.

    A file has random bytes of the workload's size, or the model's sample, which bare.py writes.
    """
    files = []
    for workload in workloads:
        file = directory / ("sample" if workload.size is None else workload.name)
        if workload.size is not None:
            file.write_bytes(os.urandom(workload.size))
        files.append((workload, file))
    return files


def run_model(
    name: str, options: argparse.Namespace, results: measure.Results, noise: machine.Noise
) -> None:
    """Run all workloads of a model. Its servers run together, and one at a time gets load."""
    model = MODELS / f"{name}.py"
    workloads = [
        workload
        for workload in measure.WORKLOADS
        if workload.model == name and (options.only is None or workload.name in options.only)
    ]
    if not workloads:
        return
    with tempfile.TemporaryDirectory(prefix="tsx-peers-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        expected, _ = measure.bare_round(model, directory / "sample", 0)
        config: dict[str, object] = {
            "minWorkers": 1,
            "maxWorkers": 1,
            "batchSize": field.BATCH,
            "maxBatchDelay": 1,
        }
        archive = servers.archive(
            directory, name, "--handler", model, config=config, packer=packer(options)
        )
        body = (directory / "sample").read_bytes()
        contenders: list[field.Contender] = []
        for peer in options.peers or field.PEERS:
            print_status(f"{name}: starting {peer}")
            peer_stack = stack.enter_context(ExitStack())
            try:
                contender = peer_stack.enter_context(
                    field.contender(
                        peer, options.environments, directory, model, archive, body, expected
                    )
                )
            except (environments.Missing, RuntimeError) as error:
                if peer == "tsx":
                    raise
                results.left_out[f"{peer} ({name})"] = str(error)
                print_status(f"left out: {error}")
                continue
            contenders.append(contender)
        load(model, bodies(directory, model, workloads), contenders, options, results, noise)


def load(
    model: Path,
    files: list[tuple[measure.Workload, Path]],
    contenders: list[field.Contender],
    options: argparse.Namespace,
    results: measure.Results,
    noise: machine.Noise,
) -> None:
    for contender in contenders:
        measure.closed_round(
            contender, *files[0], 16, min(MAX_WARM_UP_S, options.seconds), measure.Results()
        )
    for line in measure.rounds(files, contenders, model, options.rounds, options.seconds, results):
        print_status(line)
        noise.sample()
    if options.open_seconds:
        for line in measure.open_rounds(
            files, contenders, options.arrivals, options.rounds, options.open_seconds, results
        ):
            print_status(line)
            noise.sample()


def main() -> None:
    options = arguments()
    try:
        environments.program("wrk", "wrk")
    except environments.Missing as error:
        sys.exit(f"nothing can be measured: {error}")
    results, noise = measure.Results(), machine.Noise()
    disturbance = machine.busy_before()
    for name in dict.fromkeys(workload.model for workload in measure.WORKLOADS):
        run_model(name, options, results, noise)
    disturbed = [*([disturbance] if disturbance else []), *noise.disturbed()]
    head = (
        f"{machine.describe()}; medians of {options.rounds} rounds of {options.seconds:g} s (open"
        f" loop: {options.open_seconds:g} s), one worker, batches of up to {field.BATCH}, one"
        " thread for the model, load from the same machine"
    )
    if options.json:
        options.json.write_text(
            json.dumps(report.as_json(results, head, noise, disturbed), indent=1)
        )
    print(report.report_text(results, head, noise, disturbed))


if __name__ == "__main__":
    main()
