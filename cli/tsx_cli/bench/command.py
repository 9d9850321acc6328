"""The `tsx bench` command: its options, the run and the exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import typer
from typer.core import TyperCommand

from tsx_cli.bench.commands import options
from tsx_cli.common.failure import FAILED, INTERRUPTED, UsageError
from tsx_cli.common.lazy import command_of
from tsx_cli.common.options import AsJson, finite, read_settings, refuse_others
from tsx_cli.common.output import one_line

app = typer.Typer(add_completion=False)

AGAINST = "tsx_cli.bench.commands.against_command"
TORCHSERVE = "tsx_cli.bench.commands.torchserve_command"
COMPARE = "tsx_cli.bench.commands.compare_command"
# A resumed run takes all other options from the original run.
RESUME_OPTIONS = {
    "model",
    "resume",
    "time_limit",
    "profile",
    "write",
    "as_json",
    "price_per_hour",
    "junit",
}


class ReplaceableCommand(TyperCommand):
    """A command that delegates to another command, depending on its arguments.

    A benchmark of a running server has other options than a benchmark of an archive.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        module = replacing_module(args)
        if module is None:
            return super().make_context(info_name, args, parent, **extra)
        if module == COMPARE:
            info_name, args = f"{info_name} compare", args[1:]
        return command_of(importlib.import_module(module).app).make_context(
            info_name, args, parent, **extra
        )


@app.command("bench", cls=ReplaceableCommand)
def bench_command(
    context: typer.Context,
    model: options.Model = None,
    slo: options.SloBounds = None,
    inputs: options.Inputs = None,
    content_type: options.ContentType = None,
    input_kind: options.InputKind = None,
    input_shape: options.InputShape = None,
    prompt_tokens: options.PromptTokens = None,
    max_tokens: options.MaxTokens = None,
    batch_sizes: options.BatchSizes = "1..32",
    workers: options.Workers = None,
    devices: options.Devices = None,
    precision: options.Precisions = None,
    compiled: options.Compiled = None,
    forms: options.Forms = None,
    threads: options.Threads = None,
    mode: options.LoadMode = options.Mode.CLOSED,
    connections: options.Connections = None,
    rate: options.Rates = None,
    arrivals: options.ArrivalsOf = None,
    duration: options.RoundTime = None,
    rounds: options.Rounds = 3,
    confidence_width: options.Width = "5%",
    time_limit: options.TimeLimit = None,
    exhaustive: options.Exhaustive = False,
    tolerance: options.Tolerance = None,
    same_top: options.SameTop = None,
    allow_different: options.AllowDifferent = False,
    output: options.Output = None,
    resume: options.Resume = None,
    ramp: options.Ramp = False,
    profile: options.Profile = False,
    write: options.Write = False,
    price_per_hour: options.PricePerHour = None,
    junit: options.JUnit = None,
    server_cores: options.ServerCores = None,
    generator_cores: options.GeneratorCores = None,
    seed: options.Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Find the best way to run a model within a latency bound, by measuring it.

    The real server runs in each promising configuration under generated load, as in `tsx bench
    model.mar --slo 'p99<100ms'`. Ctrl-C stops the run and reports what was measured. `tsx bench
    --against URL --model NAME --input FILE` measures a running server; see `--against URL --help`.
    `tsx bench compare A.json B.json` compares two runs, and `tsx bench CONFIG.yaml` runs a file of
    TorchServe's auto-benchmark.
    """
    from tsx_cli.archive.source import require_archive
    from tsx_cli.bench.commands.session import RunRequest, resumed_run, run_bench
    from tsx_cli.bench.report import show, write_report
    from tsx_cli.bench.report.junit import bound_cases, check_junit, write_junit
    from tsx_cli.bench.report.write_back import check_writable
    from tsx_cli.bench.report.write_back import write as write_into_archive

    # These modules import a server, which would slow --help down.
    from tsx_cli.bench.search.options import BenchOptions, seconds, share
    from tsx_cli.common.output import print_json
    from tsx_cli.common.run_directory import new_directory

    limit = None if time_limit is None else seconds(time_limit, "--time-limit")
    settings, _ = read_settings(None)
    if resume is not None:
        refuse_others(context, RESUME_OPTIONS, "--resume uses the options of the original run")
        request = resumed_run(resume, model, limit, quiet=as_json)
    else:
        if model is None:
            raise UsageError("name an archive: tsx bench model.mar")
        bench_options = BenchOptions(
            slo=slo,
            inputs=tuple(str(path.absolute()) for path in inputs or ()),
            content_type=content_type,
            input_kind=input_kind,
            input_shape=input_shape,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            batch_sizes=batch_sizes,
            workers=workers,
            devices=devices,
            precisions=precision,
            compiled=compiled,
            forms=forms,
            threads=threads,
            mode=mode.value,
            loads=_loads(mode, connections, rate, arrivals),
            arrivals=(arrivals or options.Arrivals.POISSON).value,
            duration=None if duration is None else seconds(duration, "--duration"),
            rounds=rounds,
            width=share(confidence_width, "--confidence-width"),
            exhaustive=exhaustive,
            tolerance=tolerance,
            same_top=same_top,
            allow_different=allow_different,
            seed=seed,
            server_cores=server_cores,
            generator_cores=generator_cores,
            ramp=ramp,
        )
        require_archive(model)
        directory = new_directory("bench", model, output)
        request = RunRequest(model, bench_options, directory, limit, quiet=as_json)
    if limit is None and not request.options.exhaustive:
        request = replace(request, time_limit=seconds(options.DEFAULT_TIME, "--time-limit"))
    round_s = request.options.duration or 0.0
    if request.time_limit is not None and round_s > request.time_limit:
        raise UsageError(
            f"--duration: one round of {round_s:g} s is longer than the run may take; give more"
            " --time-limit"
        )
    if write:
        check_writable(request.model)
    if price_per_hour is not None:
        finite(price_per_hour, "--price-per-hour")
    if junit is not None:
        check_junit(junit, request.options.slo, "--slo")
    results = run_bench(replace(request, profile=profile), settings)
    results.price_per_hour = price_per_hour
    write_report(results, request.directory)
    if as_json:
        print_json(results.model_dump(mode="json"))
    else:
        show(results)
        print(
            f"report: {one_line(request.directory / 'report.html')}, with report.md, results.csv"
            " and results.json beside it"
        )
        if results.faster_unmeasured:
            print(f"continue: tsx bench --resume {one_line(request.directory)} --time-limit 5m")
    if write and results.complete:
        print(
            one_line(write_into_archive(request.model, results, settings)),
            file=sys.stderr if as_json else sys.stdout,
        )
    elif write:
        message = (
            f"nothing was written into {request.model}: `tsx bench --resume {request.directory}"
            " --write` goes on"
        )
        print(one_line(message), file=sys.stderr)
    if junit is not None:
        write_junit(junit, bound_cases(results), results)
    if not results.complete:
        raise typer.Exit(INTERRUPTED)
    if results.winner is None:
        raise typer.Exit(FAILED)


def _loads(
    mode: options.Mode, connections: str | None, rate: str | None, arrivals: options.Arrivals | None
) -> tuple[float, ...]:
    """Parse the numbers of connections or the rates.

    Raises:
        UsageError: The loads are not numbers, or do not fit the mode.
    """
    for name, value in (("--rate", rate), ("--arrivals", arrivals)):
        if value is not None and mode is options.Mode.CLOSED:
            raise UsageError(f"{name} is for an open loop: leave it out, or give --mode open")
    if connections is not None and mode is options.Mode.OPEN:
        raise UsageError(
            "--connections is for a closed loop: leave it out, or leave --mode open out"
        )
    option, text = ("--rate", rate) if mode is options.Mode.OPEN else ("--connections", connections)
    if text is None:
        return ()
    try:
        numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    are_valid = mode is options.Mode.OPEN or all(number.is_integer() for number in numbers)
    if not numbers or not are_valid or not all(0 < number <= 1e6 for number in numbers):
        raise UsageError(f"{option}: '{text}' is not a list of numbers above 0, such as 1,8,64")
    return numbers


def replacing_module(arguments: Sequence[str]) -> str | None:
    """Return the module whose command handles these arguments; None means `bench_command`."""
    if arguments and arguments[0] == "compare":
        return COMPARE
    options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    if "--torchserve-config" in options or any(
        argument.endswith((".yaml", ".yml")) for argument in _positional(arguments)
    ):
        return TORCHSERVE
    return AGAINST if "--against" in options else None


def _positional(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments that are neither options nor values of options."""
    for previous, argument in zip(("", *arguments), arguments, strict=False):
        if not argument.startswith("-") and (not previous.startswith("-") or "=" in previous):
            yield argument
