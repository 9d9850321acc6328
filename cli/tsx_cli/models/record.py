"""`tsx models record` writes a fraction of a model's requests to files on the server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tsx_cli.common.client import Server, path
from tsx_cli.common.failure import UsageError
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson, ModelName
from tsx_cli.common.output import human, print_result


@with_server
def record(
    server: Server,
    name: ModelName,
    share: Annotated[str | None, typer.Option(help="Share of the requests, such as 1%.")] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            help="Maximum size of all files together; the oldest are removed first.",
            show_default="100MB",
        ),
    ] = None,
    max_age: Annotated[
        str | None,
        typer.Option(help="Remove requests older than this: 12h, 7d.", show_default="1d"),
    ] = None,
    answers: Annotated[bool, typer.Option("--answers", help="Record the answers as well.")] = False,
    off: Annotated[
        bool, typer.Option("--off", help="Stop recording; the recorded files stay.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="With --off: remove what was recorded.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Record requests for `tsx replay`; without options, show what is recorded."""
    terms = {
        key: value
        for key, value in {"share": share, "max_size": max_size, "max_age": max_age}.items()
        if value is not None
    }
    if off and (terms or answers):
        raise UsageError(
            "--off ends the recording; use it without --share, --max-size, --max-age and --answers"
        )
    if remove and not off:
        raise UsageError("--remove deletes the files when a recording ends; use it with --off")
    if (terms or answers) and share is None:
        raise UsageError(
            "give the share of the requests to record, such as --share 1%, or --share 100%"
        )
    target = path("models", name, "record")
    if off:
        answer = server.call("DELETE", path("models", name, "record", remove=remove)).json()
    elif terms:
        answer = server.call_json("PUT", target, {**terms, "answers": answers})
    else:
        answer = server.call("GET", target).json()
    print_result(answer, as_json, _show)


def _show(answer: dict[str, Any]) -> None:
    if answer["recording"]:
        terms = answer["terms"]
        answers = "with answers" if terms["answers"] else "without answers"
        limits_text = f"up to {human(terms['max_size'])}, for {terms['max_age'] / 3600:g} hours"
        print(
            f"{answer['model']}: {terms['share']:g} % of the requests are recorded, {answers},"
            f" {limits_text}"
        )
        dropped = ", ".join(f"{count} ({reason})" for reason, count in answer["dropped"].items())
        print(f"recorded: {answer['recorded']}" + (f"; not recorded: {dropped}" if dropped else ""))
        if answer.get("problem"):
            print(f"nothing can be written to disk: {answer['problem']}")
    else:
        print(f"{answer['model']}: not recorded")
    if answer["files"]:
        print(
            f"{human(answer['bytes'])} in {answer['files']} files on the server:"
            f" {answer['directory']}"
        )
