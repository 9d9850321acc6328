"""The options of `tsx bench --against`, and how they make a load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tsx_cli.bench import options
from tsx_cli.failure import FAILED, CliError, UsageError

app = typer.Typer(add_completion=False)
OPTION = "--against"


class OrAgainst(TyperCommand):
    """A command that becomes this one where `--against` is among its words: a server that runs already has other options."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if any(word == OPTION or word.startswith(f"{OPTION}=") for word in args):
            return typer.main.get_command(app).make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@app.command("bench")
def bench_against(
    against: Annotated[str | None, typer.Option(metavar="URL", help="Measure a server that runs already.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of its model.")] = None,
    version: Annotated[str | None, typer.Option(help="Version of the model, if not its default one.")] = None,
    protocol: Annotated[
        str, typer.Option(help="tsx, torchserve, kserve-v1, kserve-v2, invocations, grpc, kserve-v2-grpc; post: to URL itself.")
    ] = "tsx",
    token: Annotated[str | None, typer.Option(metavar="TOKEN|@FILE", help="Token that the server asks for, or the file it is in.")] = None,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate to trust.")] = None,
    sources: options.Inputs = None,
    content_type: options.ContentType = None,
    input_kind: options.InputKind = None,
    input_shape: options.InputShape = None,
    connections: Annotated[int | None, typer.Option(help="Connections; 16 in a closed loop and 256 in an open one, if not given.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, whatever the server does: an open loop.")] = None,
    arrivals: Annotated[str | None, typer.Option(help="Of an open loop: poisson, constant, or recorded as the input is.")] = None,
    speed: Annotated[float, typer.Option(help="How many times as fast as they were recorded.")] = 1.0,
    duration: options.Duration = "10s",
    warm_up: Annotated[str, typer.Option(metavar="TIME|auto", help="Time before each round; auto finds it.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Repetitions; from two on there are confidence intervals.")] = 1,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Until a request is given up.")] = "30s",
    slo: Annotated[str | None, typer.Option(help="Bounds to hold, such as p99<100ms,errors<0.1%.")] = None,
    engine: Annotated[str, typer.Option(help="tsx, or wrk for closed loops where it is installed.")] = "tsx",
    seed: Annotated[int, typer.Option(help="Of random arrivals and inputs that are made up.")] = 0,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the results as JSON; - is standard output.")
    ] = None,
) -> None:
    """Measure a server that runs already."""
    if against is None:
        raise UsageError("name the server to measure: --against http://127.0.0.1:8080 --model NAME --input FILE")
    if model is None and protocol == "post":
        model = ""
    if model is None:
        raise UsageError("--against needs the name of the model: --model NAME")
    from tsx_cli.bench.against import progress_line, run_against, show_against, write_json
    from tsx_cli.bench.asked import command_line, seconds
    from tsx_cli.bench.generator import LoadPlan
    from tsx_cli.bench.inputs import choose_payloads, parse_shape
    from tsx_cli.bench.slo import parse_slo

    if json_to not in (None, "-") and (Path(json_to).is_dir() or not Path(json_to).absolute().parent.is_dir()):
        raise UsageError(f"--json: '{json_to}' cannot be a file; name one in a directory that is there, or - for standard output")
    shape = None if input_shape is None else parse_shape(input_shape)
    bounds = None if slo is None else parse_slo(slo)
    payloads, source = choose_payloads(None, sources or (), kind=input_kind, shape=shape, seed=seed, content_type=content_type)
    opened = rate is not None or arrivals is not None
    plan = LoadPlan(
        against,
        model,
        payloads,
        protocol,
        version,
        mode="open" if opened else "closed",
        connections=connections if connections is not None else 256 if opened else 16,
        rate=rate,
        arrivals=arrivals or "poisson",  # type: ignore[arg-type]  # the plan looks at it
        speed=speed,
        seconds=seconds(duration, "--duration"),
        warm_up="auto" if warm_up == "auto" else 0.0 if warm_up == "0" else seconds(warm_up, "--warm-up"),
        timeout=seconds(timeout, "--timeout"),
        token=_token(token),
        certificate=None if certificate is None else str(certificate.absolute()),
        engine=engine,
        seed=seed,
    )
    progress = progress_line(rounds) if json_to != "-" else None
    secret = None if token is None or token.startswith("@") else token
    results = run_against(plan, source, rounds=rounds, slo=bounds, command=command_line(secret), on_progress=progress)
    if json_to != "-":
        show_against(results)
    if json_to is not None:
        write_json(results, json_to)
    if bounds is not None and results.trials[0].best is None:
        raise typer.Exit(FAILED)


def _token(given: str | None) -> str | None:
    """Raises UsageError, CliError."""
    found = given
    if given is not None and given.startswith("@"):
        try:
            found = Path(given[1:]).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise CliError(f"--token: {given[1:]} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise CliError(f"--token: {given[1:]} holds no token: {error}") from error
    if found is not None and (not found or not found.isascii() or not found.isprintable() or " " in found):
        raise UsageError("--token: a token is one word of plain letters, digits and signs")
    return found
