"""tsx beside TorchServe 0.12, Mosec and LitServe on the same models: one worker each, batches of up
to 64, in turns, one table.

    python -m benchmarks.peers [--quick] [--only ok,mlp] [--peers tsx,mosec] [--rounds 3] [--json
    FILE]

From the root of the repository, on Linux, with `wrk`; TorchServe needs Java 17 too. Each peer gets
an environment of its own, from PyPI, on first use; TSX_PEER_TORCHSERVE names one that exists
already. What is not to be had is left out, and the table says so. The whole takes about 45 minutes,
a quick run about eight.
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
WARM_UP = 3  # seconds: a JVM must warm up


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
        type=names([each.name for each in measure.WORKLOADS]),
        help="workloads, with commas between",
    )
    parser.add_argument("--peers", type=names(field.PEERS), help="servers, with commas between")
    parser.add_argument(
        "--environments",
        type=Path,
        default=environments.default_place(),
        help="where the peers' environments are kept",
    )
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.open_seconds = 1, 2, min(1, options.open_seconds)
    options.arrivals = ("constant",) if options.quick else ("constant", "Poisson")
    return options


def names(known: list[str] | tuple[str, ...]):  # type: ignore[no-untyped-def]  # what argparse takes for a type
    def parse(text: str) -> list[str]:
        asked = [word.strip().lower() for word in text.split(",")]
        unknown = set(asked) - {name.lower() for name in known}
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}"
            )
        return [name for name in known if name.lower() in asked]

    return parse


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def packer(options: argparse.Namespace) -> Path:
    """The real torch-model-archiver: that of TorchServe's environment where one was named."""
    named = os.environ.get("TSX_PEER_TORCHSERVE")
    return (
        (Path(named) if named else environments.made("archiver", options.environments))
        / "bin"
        / "torch-model-archiver"
    )


def bodies(
    directory: Path, model: Path, workloads: list[measure.Workload]
) -> list[tuple[measure.Workload, Path]]:
    """A file for each workload: random bytes where it names a size, else the model's own sample,
    which bare.py has written.
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
    """All workloads of one model: the servers are up together, and load goes to one at a time."""
    model = MODELS / f"{name}.py"
    chosen = [
        each
        for each in measure.WORKLOADS
        if each.model == name and (options.only is None or each.name in options.only)
    ]
    if not chosen:
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
        taking_part: list[field.Contender] = []
        for peer in options.peers or field.PEERS:
            say(f"{name}: starting {peer}")
            where = stack.enter_context(ExitStack())
            try:
                each = where.enter_context(
                    field.contender(
                        peer, options.environments, directory, model, archive, body, expected
                    )
                )
            except (environments.Missing, RuntimeError) as error:
                if peer == "tsx":
                    raise
                results.left_out[f"{peer} ({name})"] = str(error)
                say(f"left out: {error}")
                continue
            taking_part.append(each)
        load(model, bodies(directory, model, chosen), taking_part, options, results, noise)


def load(
    model: Path,
    files: list[tuple[measure.Workload, Path]],
    taking_part: list[field.Contender],
    options: argparse.Namespace,
    results: measure.Results,
    noise: machine.Noise,
) -> None:
    for each in taking_part:
        measure.closed_round(each, *files[0], 16, min(WARM_UP, options.seconds), measure.Results())
    for line in measure.rounds(files, taking_part, model, options.rounds, options.seconds, results):
        say(line)
        noise.sample()
    if options.open_seconds:
        for line in measure.open_rounds(
            files, taking_part, options.arrivals, options.rounds, options.open_seconds, results
        ):
            say(line)
            noise.sample()


def main() -> None:
    options = arguments()
    try:
        environments.program("wrk", "wrk")
    except environments.Missing as error:
        sys.exit(f"nothing can be measured: {error}")
    results, noise = measure.Results(), machine.Noise()
    busy = machine.busy_before()
    for name in dict.fromkeys(each.model for each in measure.WORKLOADS):
        run_model(name, options, results, noise)
    disturbed = [*([busy] if busy else []), *noise.disturbed()]
    head = (
        f"{machine.describe()}; medians of {options.rounds} rounds of {options.seconds:g} s (open"
        f" loop: {options.open_seconds:g} s), one worker, batches of up to {field.BATCH}, one"
        " thread for the model, load from the same machine"
    )
    if options.json:
        options.json.write_text(
            json.dumps(report.as_json(results, head, noise, disturbed), indent=1)
        )
    print(report.whole(results, head, noise, disturbed))


if __name__ == "__main__":
    main()
