"""`tsx monitor`: baselines, drift, quality and contested answers of models."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from tsx_cli.common.client import AnswerCommand, Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.management import Addresses, with_both, with_server
from tsx_cli.common.options import AsJson, Config, ModelName, read_settings
from tsx_cli.common.output import one_line, print_json, print_result, print_table
from tsx_cli.common.status_line import StatusLine

if TYPE_CHECKING:
    from tsx_runtime.settings.schema import Settings

POLL_INTERVAL_S = 5.0
UNDECIDED = DRIFTED = 3  # exit codes of a comparison without a decision, and of a drift
CONTEST_COLUMNS = ("id", "version", "prediction", "reason", "state", "response", "truth")

Archive = Annotated[
    Path, typer.Argument(metavar="MODEL.mar", help="The archive, or a model's directory.")
]
RECORDINGS = typer.Option(
    "--from",
    metavar="PATH|URL",
    help="Recordings (*.tsxrec) or SageMaker's data capture: a file, a directory, or s3://...",
)

app = typer.Typer(
    add_completion=False,
    help="Make baselines; show the drift, quality, groups and contested answers of models.",
    no_args_is_help=True,
)


@app.command()
def baseline(
    model: Archive,
    source: Annotated[
        str,
        typer.Option(
            "--input",
            metavar="INPUT",
            help=(
                "A recording, a directory with a request per file, or a .csv, .jsonl or .parquet"
                " with a request per row."
            ),
        ),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "The right answers, one per request: lines of text, JSON lines, or a table with"
                " the column `label`."
            ),
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Maximum number of requests, from all parts of the input.")
    ] = 10_000,
    fields: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSON with the kinds of fields: {"PATH": "KIND"}.'),
    ] = None,
    no_answers: Annotated[
        bool, typer.Option("--no-answers", help="Summarize the inputs only; do not run the model.")
    ] = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Summarize inputs and answers, and write this baseline into the archive.

    The model runs on this machine for requests without answers. A baseline has quantiles and
    counts, and no rows.
    """
    # It imports the server's front end; a late import keeps --help quick.
    from tsx_cli.monitor.baseline import show_baseline, write_baseline

    result = write_baseline(
        model,
        source,
        read_settings(config)[0],
        labels=labels,
        limit=rows,
        fields=fields,
        with_answers=not no_answers,
    )
    print_result(result, as_json, show_baseline)


@app.command(cls=AnswerCommand)
@with_server
def show(server: Server, name: ModelName, as_json: AsJson = False) -> None:
    """Show what has moved since the baseline, the quality of each version, and groups."""
    from tsx_cli.monitor.tables import show_report  # a slow import

    print_result(server.call_json("GET", path("models", name, "monitor")), as_json, show_report)


@app.command(cls=AnswerCommand)
@with_server
def compare(
    server: Server,
    name: ModelName,
    versions: Annotated[
        str | None, typer.Option(metavar="OLD,NEW", help="The versions; by default the newest two.")
    ] = None,
    metric: Annotated[
        Literal["accuracy", "mean_error"] | None,
        typer.Option(help="By default the first that both versions have."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Wait until there is a decision.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say which version is better by the reported truth, by how much, and how sure that is.

    It may be asked at any time. Exit code 0: there is a decision; 3: there is none yet.
    """
    with StatusLine(quiet=as_json) as status:
        while (comparison := _comparison(server, name, versions, metric))[
            "better"
        ] is None and watch:
            status.update(escape(comparison["sentence"]))
            time.sleep(POLL_INTERVAL_S)
    print_result(comparison, as_json, lambda comparison: print(one_line(comparison["sentence"])))
    if comparison["better"] is None:
        raise typer.Exit(UNDECIDED)


@app.command()
def analyze(
    model: Archive,
    source: Annotated[str, RECORDINGS],
    evidently: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the HTML report that Evidently makes."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIRECTORY|URL", help="The recordings that Evidently compares with."
        ),
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Compare recorded requests with the baseline of an archive, without a server.

    Exit code 0: nothing has drifted in the last window of any version; 3: something has.
    """
    from tsx_cli.monitor.tables import show_report  # a slow import

    if (evidently is None) != (reference is None):
        raise UsageError("give --evidently FILE and --reference RECORDINGS together")
    settings = read_settings(config)[0]
    result = _analyze(model, source, settings)
    if evidently is not None and reference is not None:
        from tsx_cli.monitor.evidently_report import write_report  # needs the extra monitor

        write_report(model, reference, source, evidently, settings)
    print_result(result, as_json, show_report)
    if any(version["alarm"] for version in result["versions"]):
        raise typer.Exit(DRIFTED)


@app.command(cls=AnswerCommand)
@with_both
def contests(
    servers: Addresses,
    name: ModelName,
    show_all: Annotated[bool, typer.Option("--all", help="List answered ones as well.")] = False,
    answer: Annotated[
        str | None, typer.Option(metavar="ID", help="Answer this contest, with --state.")
    ] = None,
    state: Annotated[
        Literal["upheld", "corrected"] | None, typer.Option(help="Whether the answer stays.")
    ] = None,
    response: Annotated[str, typer.Option(help="What the person is told.")] = "",
    truth: Annotated[str | None, typer.Option(help="The right answer.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="ID", help="Explain the answer to the recorded request.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the contested answers of a model, answer one, or explain one."""
    from tsx_cli.monitor import review  # a slow import

    if (answer is None) != (state is None):
        raise UsageError("give --answer ID and --state upheld, or --state corrected, together")
    management, address = servers.management, ("models", name, "monitor", "contests")
    id = answer or explain
    only = None if show_all or id else "open"
    listed = management.call_json("GET", path(*address, state=only), kind=list)
    if id is None:
        print_result(listed, as_json, _show_contests)
        return
    contest = next((contest for contest in listed if contest["id"] == id), None)
    if contest is None:
        raise CliError(f"{name} has no contest {id}; `tsx monitor contests {name} --all`")
    if answer is not None:
        fields = {"state": state, "response": response, "truth": truth}
        contest = management.call_json("POST", path(*address, id), fields)
        print_result([contest], as_json, _show_contests)
        return
    recorded = review.read_recorded(management, name, contest["request_id"])
    result = review.explain(servers.inference, name, recorded, contest["prediction"])
    print_json({**contest, "explanation": result})


@app.command(cls=AnswerCommand)
@with_both
def report(
    servers: Addresses,
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME|MODEL.mar", help="A served model, or an archive to compare --from with."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    source: Annotated[str | None, RECORDINGS] = None,
    archives: Annotated[
        list[Path] | None,
        typer.Option("--archive", help="An archive whose facts are shown; may be repeated."),
    ] = None,
) -> None:
    """Write the model card and report for a review, as one HTML file."""
    from tsx_archiver import ARCHIVE_SUFFIXES  # slow imports
    from tsx_cli.monitor import page, review

    settings, server, files = read_settings(None)[0], servers.management, archives or []
    parts: dict[str, list[Any]] = {"served": [], "contests": [], "worst": []}
    if source is not None:
        files = files or [Path(model)]
        content = _analyze(Path(model), source, settings)
    elif model.endswith(ARCHIVE_SUFFIXES):
        raise UsageError(
            f"{model} is an archive: give --from RECORDINGS to compare with its baseline, or the"
            " name of a served model"
        )
    else:
        address = path("models", model)
        content = server.call_json("GET", f"{address}/monitor")
        parts["served"] = server.call_json("GET", f"{address}/all", kind=list)
        parts["contests"] = server.call_json("GET", f"{address}/monitor/contests", kind=list)
        for version in content["versions"][:1]:
            parts["worst"] += review.worst_answers(servers, model, version["version"])
    facts = [review.archive_facts(file, settings) for file in files]
    html = page.render_page(content, facts=facts, source=source or server.url, **parts)
    output.write_text(html, encoding="utf-8")
    print(f"{output} has the report on {content['model']}")


@app.command()
def export(
    recording: Annotated[
        str,
        typer.Argument(
            metavar="FILE|DIRECTORY|URL", help="A recording, a directory of them, or s3://..."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: a .jsonl.")],
    config: Config = None,
) -> None:
    """Write the requests of a recording for SageMaker Model Monitor.

    Failed requests are left out, because SageMaker captures none.
    """
    from tsx_archiver.storage.atomic_file import write_atomically  # slow imports
    from tsx_cli.monitor.data_capture import encode_capture
    from tsx_cli.monitor.recordings import read_any

    counts = Counter[bool]()  # requests by whether they failed
    endpoint = read_settings(config)[0].s3_endpoint_url
    with write_atomically(output, mode=0o600) as file:
        for entry in read_any(recording, endpoint):
            failed = entry.status >= 400
            file.write(b"" if failed else encode_capture(entry))
            counts[failed] += 1
    print(f"{output}: {counts[False]} requests, without {counts[True]} that failed")


def _analyze(model: Path, source: str, settings: Settings) -> dict[str, Any]:
    from tsx_runtime.features.monitor.settings import check_packages  # slow imports

    check_packages("The analysis of recordings")
    from tsx_cli.monitor.analysis import analyze_recordings  # needs the extra monitor

    return analyze_recordings(model, source, settings)


def _comparison(
    server: Server, name: str, versions: str | None, metric: str | None
) -> dict[str, Any]:
    report = server.call_json("GET", path("models", name, "monitor"))
    for comparison in report["comparisons"]:
        pair = f"{comparison['old']},{comparison['new']}"
        if versions in (None, pair) and metric in (None, comparison["metric"]):
            return dict(comparison)
    raise CliError(
        f"{name} has no such comparison: it needs two monitored versions, and the truth of answers"
        " of both (`tsx feedback`)"
    )


def _show_contests(listed: list[dict[str, Any]]) -> None:
    from tsx_cli.monitor.tables import clock  # a slow import

    rows = [[clock(item["at"]), *(item.get(name) for name in CONTEST_COLUMNS)] for item in listed]
    print_table(["when", *CONTEST_COLUMNS], rows)
    if not rows:
        print("no contested answer waits; --all lists the answered ones")
