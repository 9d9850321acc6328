"""The options of `tsx bench --against`, from which it makes a plan of the load."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from tsx_cli.bench.commands import options
from tsx_cli.common.failure import FAILED, UsageError
from tsx_cli.common.options import Token, finite, read_token

app = typer.Typer(add_completion=False)


@app.command("bench")
def bench_against(
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure a running server.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of its model.")] = None,
    version: Annotated[
        str | None, typer.Option(help="Version of the model; by default its default version.")
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            help=(
                "tsx, torchserve, openai-chat, openai-completions, kserve-v1, kserve-v2,"
                " invocations, grpc, "
                "kserve-v2-grpc; post: to URL itself."
            )
        ),
    ] = "tsx",
    token: Token = None,
    certificate: options.Certificate = None,
    sources: options.Inputs = None,
    content_type: options.ContentType = None,
    input_kind: options.InputKind = None,
    input_shape: options.InputShape = None,
    prompt_tokens: options.PromptTokens = None,
    max_tokens: options.MaxTokens = None,
    connections: Annotated[
        int | None,
        typer.Option(
            help="Connections; by default 16 in a closed loop and 256 in an open one.",
            rich_help_panel=options.LOAD,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, independent of the server: an open loop.",
            rich_help_panel=options.LOAD,
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Arrivals of an open loop: poisson, constant, or recorded.",
            rich_help_panel=options.LOAD,
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(help="Speed factor relative to the recording.", rich_help_panel=options.LOAD),
    ] = None,
    duration: options.Duration = "10s",
    warm_up: Annotated[
        str,
        typer.Option(
            metavar="TIME|auto",
            help="Warm-up before each round; auto detects its length.",
            rich_help_panel=options.LOAD,
        ),
    ] = "auto",
    rounds: Annotated[
        int,
        typer.Option(
            help="Repetitions; two or more give confidence intervals.", rich_help_panel=options.LOAD
        ),
    ] = 1,
    timeout: Annotated[
        str,
        typer.Option(metavar="TIME", help="Timeout of a request.", rich_help_panel=options.LOAD),
    ] = "30s",
    slo: Annotated[
        str | None,
        typer.Option(
            help=(
                "Bounds to keep, such as p99<100ms,errors<0.1%; of event streams"
                " ttft.p99<300ms,tpot.p99<50ms."
            )
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of random arrivals and generated inputs.", rich_help_panel=options.LOAD
        ),
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write a report: report.html, report.md, results.csv and .json.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    json_to: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE|-",
            help="Write the results as JSON; - is standard output.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    ramp: options.Ramp = False,
    price_per_hour: options.PricePerHour = None,
    junit: options.JUnit = None,
    generator_cores: options.GeneratorCores = None,
) -> None:
    """Measure a running server."""
    if against is None:
        raise UsageError(
            "name the server to measure: --against http://127.0.0.1:8080 --model NAME --input FILE"
        )
    if model is None and protocol == "post":
        model = ""
    if model is None:
        raise UsageError("--against needs the name of the model: --model NAME")
    from tsx_cli.bench.commands.against import run_against, show_against
    from tsx_cli.bench.commands.progress import Progress
    from tsx_cli.bench.load.inputs import choose_payloads, parse_shape
    from tsx_cli.bench.load.plan import LoadPlan
    from tsx_cli.bench.load.results import command_line, parse_slo
    from tsx_cli.bench.report import write_report
    from tsx_cli.bench.report.junit import bound_cases, check_junit, write_junit
    from tsx_cli.bench.search.options import seconds
    from tsx_cli.bench.search.server import choose_cores

    if json_to not in (None, "-") and (
        Path(json_to).is_dir() or not Path(json_to).absolute().parent.is_dir()
    ):
        raise UsageError(
            f"--json: '{json_to}' cannot be a file; name one in a directory that is there, or - for"
            " standard output"
        )
    if output is not None and output.exists() and not output.is_dir():
        raise UsageError(f"--output: '{output}' is a file; name a directory")
    if speed is not None and arrivals != "recorded":
        raise UsageError(
            "--speed is that of a recording: give --arrivals recorded as well, or leave it out"
        )
    if ramp and (rate is not None or arrivals == "recorded"):
        raise UsageError(
            "--ramp chooses the rates itself: leave --rate and --arrivals recorded out"
        )
    if junit is not None:
        check_junit(junit, slo, "--slo")
    if price_per_hour is not None:
        finite(price_per_hour, "--price-per-hour")
    pinning = choose_cores(None, generator_cores, running=True)
    shape = None if input_shape is None else parse_shape(input_shape)
    bounds = None if slo is None else parse_slo(slo)
    payloads, source = choose_payloads(
        None,
        sources or (),
        kind=input_kind,
        shape=shape,
        seed=seed,
        content_type=content_type,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
    )
    is_open = not ramp and (rate is not None or arrivals is not None)
    plan = LoadPlan(
        against,
        model,
        payloads,
        protocol,
        version,
        mode="open" if is_open else "closed",
        connections=connections if connections is not None else 256 if is_open else 16,
        rate=rate,
        arrivals=arrivals or "poisson",  # type: ignore[arg-type]  # LoadPlan checks the value
        speed=1.0 if speed is None else speed,
        seconds=seconds(duration, "--duration"),
        warm_up=(
            "auto"
            if warm_up == "auto"
            else 0.0
            if warm_up in ("0", "0s")
            else seconds(warm_up, "--warm-up")
        ),
        timeout=seconds(timeout, "--timeout"),
        token=read_token(token),
        certificate=trusted_certificate(certificate, against),
        seed=seed,
        slo=bounds,
    )
    secret = None if token is None or token.startswith("@") else token
    with Progress(math.inf, quiet=json_to == "-") as progress:
        results = run_against(
            plan,
            source,
            rounds=rounds,
            slo=bounds,
            ramp=(arrivals or "poisson") if ramp else None,  # type: ignore[arg-type]  # LoadPlan checks the value
            pinning=pinning,
            price_per_hour=price_per_hour,
            command=command_line(secret),
            on_progress=lambda number, load: progress.show_round(
                number, None if ramp else rounds, load
            ),
        )
    text = results.model_dump_json(indent=1) + "\n"
    if json_to == "-":
        sys.stdout.write(text)
    else:
        show_against(results)
        if json_to is not None:
            Path(json_to).write_text(text, encoding="utf-8")
    if output is not None:
        write_report(results, output)
        print(
            f"report: {output / 'report.html'}, with report.md, results.csv and results.json"
            " beside it",
            file=sys.stderr,
        )
    if junit is not None:
        write_junit(junit, bound_cases(results), results)
    if bounds is not None and results.trials[0].best is None:
        raise typer.Exit(FAILED)


def trusted_certificate(path: Path | None, url: str) -> str | None:
    """Return the certificate file to trust in addition to the certificates of this machine.

    If no path is given, the setting `certificate_file` applies, as in other commands.

    Raises:
        UsageError: A file is given, but the address is not https.
    """
    if path is not None and not url.startswith("https:"):
        raise UsageError(
            f"--certificate: '{url}' is not an https address; leave it out, or write https://"
        )
    if path is None and url.startswith("https:"):
        from tsx_cli.common.options import read_settings

        path = read_settings(None)[0].certificate_file
    return None if path is None else str(path.absolute())
