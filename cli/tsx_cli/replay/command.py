"""`tsx replay` sends the requests of a recording again, with their original spacing."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tsx_cli.common.client import Server
from tsx_cli.common.compare_option import Ignore
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import AsJson, Config, Url, read_settings
from tsx_cli.common.output import milliseconds, one_line, print_result, print_table
from tsx_runtime.recordings import NotARecording, read

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    recording: Annotated[
        Path,
        typer.Argument(metavar="FILE|DIRECTORY", help="A recording, or a directory of recordings."),
    ],
    speed: Annotated[
        float, typer.Option(min=0.001, help="Speed factor relative to the recording.")
    ] = 1.0,
    model: Annotated[
        str | None,
        typer.Option(help="Model to send the requests to; by default that of the recording."),
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Version or label to send the requests to.")
    ] = None,
    comparison: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="HOW",
            help="numeric[:rtol=1e-3,atol=1e-6] (default), exact or top-k[:k=5].",
        ),
    ] = None,
    ignore: Ignore = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of requests to send.")
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Connections; further concurrent requests wait for a free one."
        ),
    ] = 64,
    as_json: AsJson = False,
    url: Url = None,
    config: Config = None,
) -> None:
    """Replay the requests of a recording to a running server, and report its responses.

    The requests keep their original spacing.
    """
    from tsx_cli.replay.run import Replay, read_comparison  # a slow import

    if math.isnan(speed):
        raise UsageError("--speed takes a number, such as 2 for twice as fast as they came")
    settings, _ = read_settings(config)
    server = Server(
        url or settings.inference_address,
        settings.inference_token,
        certificate=settings.certificate_file,
    )
    try:
        run = Replay(server, model, version, read_comparison(comparison, ignore))
        run.send_all(
            itertools.islice(read(recording), limit),
            speed,
            concurrency,
            progress=sys.stderr.isatty() and not as_json,
        )
    except NotARecording as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"{recording} cannot be read: {error.strerror or error}") from error
    if not run.sent:
        raise CliError(f"{recording} contains no complete request")
    summary = run.summary()
    print_result(summary, as_json, _show)
    if run.failed:
        raise CliError(f"{sum(run.failed.values())} of {run.sent} requests got no answer")
    if set(run.answers) == {404} and not run.equal:
        raise CliError(
            "no such model is served: `tsx models list` shows the models; --model and --version"
            " choose where the requests go"
        )
    if run.first_error and not run.same_status and min(run.answers) >= 300:
        raise CliError(
            f"no request got the same answer as when it was recorded; the first got {run.first_error}"
        )


def _show(summary: dict[str, Any]) -> None:
    answers = [*summary["answers"].items(), *summary["failed"].items()]
    rows: list[tuple[str, object]] = [
        ("sent", f"{summary['sent']} in {summary['seconds']:.1f} s"),
        *(
            (f"answered {status}" if status.isdigit() else f"not answered ({status})", count)
            for status, count in answers
        ),
        ("latency p50", _milliseconds_text(summary["p50_ms"])),
        ("latency p99", _milliseconds_text(summary["p99_ms"])),
        ("the slowest", _milliseconds_text(summary["max_ms"])),
        ("sent late p99", _milliseconds_text(summary["late_p99_ms"])),
        ("the latest", _milliseconds_text(summary["late_max_ms"])),
    ]
    if summary["compared"]:
        rows.append(
            (
                "equal answers",
                f"{summary['equal']} of {summary['compared']}, compared by {summary['compare']}",
            )
        )
        if summary["largest_difference"] is not None:
            rows.append(("largest difference", f"{summary['largest_difference']:.3g}"))
    print_table(["replay", ""], rows)
    for difference in summary["different"]:
        recorded_answer, new_answer = difference["recorded"], difference["now"]
        print(
            f"differs at {difference['at']} s: recorded {recorded_answer['status']} {one_line(recorded_answer['answer'])}, now"
            f" {new_answer['status']} {one_line(new_answer['answer'])}"
        )
        print(f"  {one_line(difference['why'])}")


def _milliseconds_text(value: float | None) -> str:
    return "" if value is None else milliseconds(value)
