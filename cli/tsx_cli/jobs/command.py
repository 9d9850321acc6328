"""`tsx jobs` lists, shows, cancels and retries the asynchronous requests of a running server."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tsx_cli.common.client import AnswerCommand, RequestFailed, Server, path
from tsx_cli.common.failure import UsageError
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson
from tsx_cli.common.output import human, one_line, print_json, print_result, print_table

PAGE = 500  # maximum number of jobs in one response
STATES = ("queued", "running", "done", "failed", "cancelled", "expired")
COLUMNS = ["job", "model", "version", "state", "answer", "accepted", "waited", "ran", "attempts"]

Model = Annotated[str | None, typer.Option(help="Only jobs of this model.")]
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB]...", help="Ids of jobs; or choose them with --model and --all."),
]
All = Annotated[bool, typer.Option("--all", help="All such jobs, instead of those that are named.")]

app = typer.Typer(
    add_completion=False,
    help="List, show, cancel and retry the asynchronous requests of a running server.",
    no_args_is_help=True,
)


@app.command("list", cls=AnswerCommand)
@with_server
def list_jobs(
    server: Server,
    model: Model = None,
    state: Annotated[
        str | None, typer.Option(help=f"Only jobs in this state: {', '.join(STATES)}.")
    ] = None,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Number of jobs to show.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    if state is not None and state not in STATES:
        raise UsageError(f"--state takes {', '.join(STATES)}, not '{state}'")
    jobs = _jobs(server, count, model=model, state=state)
    if as_json:
        print_json(jobs)
    elif jobs:
        print_table(COLUMNS, [_row(job, time.time()) for job in jobs])
    else:
        description = "such jobs" if model or state else "jobs"
        hint = "a prediction becomes one with the header 'Prefer: respond-async'"
        print(f"there are no {description} at {server.url}; {hint}")


@app.command(cls=AnswerCommand)
@with_server
def show(
    server: Server,
    job: Annotated[str, typer.Argument(help="Id of the job.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the body of its answer to this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one job, and with -o save its answer."""
    record = server.call("GET", path("jobs", job, "record")).json()
    if output is not None:
        if record["state"] != "done":
            raise UsageError(
                f"job {job} is {record['state']} and has no answer to write to {output}; leave"
                " -o out"
            )
        answer = server.send("GET", path("jobs", job))
        if answer.status != record["status"]:
            raise server.refusal(answer.status, answer.body(), path("jobs", job))
        output.write_bytes(answer.body())
    print_result(record, as_json, _show)


@app.command(cls=AnswerCommand)
@with_server
def cancel(
    server: Server,
    jobs: Ids = None,
    all_jobs: All = False,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Cancel jobs that are queued or running."""
    _check(jobs, all_jobs, model)
    changed = _change(server, "DELETE", (), jobs, model, ("queued", "running"))
    print_result(changed, as_json, _show_ids)


@app.command(cls=AnswerCommand)
@with_server
def retry(
    server: Server,
    jobs: Ids = None,
    all_jobs: All = False,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Run jobs again that failed or were cancelled."""
    _check(jobs, all_jobs, model)
    changed = _change(server, "POST", ("retry",), jobs, model, ("failed", "cancelled"))
    print_result(changed, as_json, _show_ids)


def _check(ids: list[str] | None, all_jobs: bool, model: str | None) -> None:
    if bool(ids) == all_jobs or (ids and model):
        raise UsageError(
            "give the ids of jobs, as `tsx jobs list` shows them, or --all, which --model narrows"
        )


def _jobs(server: Server, max_jobs: int | None = None, **query: str | None) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    page: dict[str, Any] = {"next": None}
    while "next" in page and (max_jobs is None or len(jobs) < max_jobs):
        limit = PAGE if max_jobs is None else min(PAGE, max_jobs - len(jobs))
        page = server.call("GET", path("jobs", limit=limit, next=page["next"], **query)).json()
        jobs += page["jobs"]
    return jobs


def _change(
    server: Server,
    method: str,
    verb: tuple[str, ...],
    ids: list[str] | None,
    model: str | None,
    states: tuple[str, ...],
) -> list[str]:
    """Change the given jobs, or all jobs in some states, and return the changed ones.

    If all jobs are changed, jobs that have ended in the meantime are skipped.
    """
    changed_ids = []
    for id in ids or [
        job["id"] for state in states for job in _jobs(server, model=model, state=state)
    ]:
        try:
            server.call(method, path("jobs", id, *verb)).json()
        except RequestFailed as error:
            if ids or error.status not in (404, 409):
                raise
        else:
            changed_ids.append(id)
    return changed_ids


def _row(job: dict[str, Any], now: float) -> list[object]:
    start_time, end_time = job.get("started"), job.get("finished")
    waited_s = (start_time or end_time or now) - job["created"]
    run_text = None if start_time is None else f"{(end_time or now) - start_time:.2f} s"
    return [
        *(job.get(name) for name in ("id", "model", "version", "state", "status")),
        _clock(job["created"]),
        f"{waited_s:.2f} s",
        run_text,
        job["attempts"],
    ]


def _show(job: dict[str, Any]) -> None:
    facts = dict(zip(COLUMNS, _row(job, time.time()), strict=True)) | {
        "request": job["request_id"],
        "size": human(job["size"]),
    }
    facts |= {
        "callback": job["callback"],
        "expires": _clock(job["expires"]) if "expires" in job else None,
    }
    for name, value in facts.items():
        if value not in (None, ""):
            print(f"{name:9} {one_line(value)}")


def _show_ids(ids: list[str]) -> None:
    print("\n".join(map(one_line, ids)) or "there are no jobs to change")


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")
