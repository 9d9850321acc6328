"""`tsx deploy`: the words of its verbs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tsx_cli.common.failure import FAILED, UsageError
from tsx_cli.common.lazy import DefaultGroup
from tsx_cli.common.options import AsJson
from tsx_cli.deploy.commands.options import Said, deployment, takes, wish

# `verbs` is imported in the commands: pydantic is slow to import, and help needs none of it.

CHANGES = 2  # the exit code of a plan that changes something


WRONG_WORDS: type[Exception] = typer.BadParameter.__mro__[1]  # what typer raises for all that it does not understand


class DeployGroup(DefaultGroup):
    default = "apply"

    def invoke(self, ctx: Any) -> Any:
        """A plan ends with 2 where something changes, so what was asked for wrongly ends it with 1, as any other error does."""
        words = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except (UsageError, WRONG_WORDS) as error:
            if "--plan" in words or words[0] == "plan":
                error.exit_code = FAILED  # type: ignore[attr-defined]  # which both have
            raise


Emit = Annotated[
    tuple[str, Path] | None,
    typer.Option("--emit", metavar="KIND DIR", help="Only write files into DIR: dockerfile, compose, cloudformation or kubernetes."),
]
NoCheck = Annotated[
    bool, typer.Option("--no-check", help="Do not load the archive here first, and only tell of limits that it breaks instead of stopping.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

app = typer.Typer(
    cls=DeployGroup,
    add_completion=False,
    help="Bring an archive to a container, Kubernetes, SageMaker or Lambda, by a plan that is shown first.",
    no_args_is_help=True,
)


@app.command("apply")
@takes(wish)
def apply_command(
    said: Said,
    no_check: NoCheck = False,
    plan: Annotated[bool, typer.Option("--plan", help="Only show what would change; exit code 0: nothing, 2: something.")] = False,
    emit: Emit = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show what has to change, ask, and carry it out. Running it again changes nothing; a run that broke off goes on."""
    from tsx_cli.deploy.commands.verbs import apply, emit_files, show_changes

    if emit is not None:
        emit_files(*said, *emit, as_json=as_json)
        return
    if plan:
        raise typer.Exit(CHANGES if show_changes(*said, check=not no_check, as_json=as_json) else 0)
    apply(*said, ask=not yes, check=not no_check, as_json=as_json)


@app.command("plan")
@takes(wish)
def plan_command(said: Said, no_check: NoCheck = False, emit: Emit = None, as_json: AsJson = False) -> None:
    """Show what has to change and change nothing. Exit code 0: nothing, 2: something, 1: an error."""
    from tsx_cli.deploy.commands.verbs import emit_files, show_changes

    if emit is not None:
        emit_files(*said, *emit, as_json=as_json)
        return
    raise typer.Exit(CHANGES if show_changes(*said, check=not no_check, as_json=as_json) else 0)


@app.command()
@takes(deployment)
def status(said: Said, as_json: AsJson = False) -> None:
    """Show how a deployment does: its state, its model, its instances, its alarms."""
    from tsx_cli.deploy.commands.verbs import show_state

    show_state(*said, as_json=as_json)


@app.command()
@takes(deployment)
def logs(
    said: Said,
    follow: Annotated[bool, typer.Option("--follow", help="Go on showing what comes, until Ctrl-C.")] = False,
    since: Annotated[
        str | None, typer.Option("--since", help="How far back, such as 90s, 10m or 2h; if not said, as far as --lines go.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000, help="How many of the last lines.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show what the deployment has written to its log."""
    from tsx_cli.deploy.commands.verbs import show_logs

    show_logs(*said, since=since, count=lines, follow=follow, as_json=as_json)


@app.command()
@takes(deployment)
def invoke(
    said: Said,
    body: Annotated[str, typer.Argument(metavar="FILE", help="What is sent; - for standard input.")],
    content_type: Annotated[str | None, typer.Option("--content-type", help="What the file is, if its name does not say it.")] = None,
    accept: Annotated[str | None, typer.Option("--accept", help="The form of the answer.")] = None,
) -> None:
    """Send a file to a deployment and print the answer."""
    from tsx_cli.deploy.commands.verbs import ask

    sys.stdout.flush()
    sys.stdout.buffer.write(ask(*said, body, content_type, accept))


@app.command()
def prices(
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask AWS for its list prices of the region and keep them, with the date.")
    ] = False,
    region: Annotated[str | None, typer.Option("--region", help="AWS region, if not the one of the environment.")] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="AWS profile, if not the one of the environment.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how old the list prices are that plans reckon with, or ask AWS for new ones (pricing:GetProducts)."""
    from tsx_cli.deploy.commands.price_command import show_prices

    show_prices(region, profile, refresh=refresh, as_json=as_json)


@app.command()
@takes(deployment)
def history(said: Said, as_json: AsJson = False) -> None:
    """List what was deployed and can be gone back to."""
    from tsx_cli.deploy.commands.verbs import show_history

    show_history(*said, as_json=as_json)


@app.command()
@takes(deployment)
def rollback(
    said: Said,
    to: Annotated[int | None, typer.Option("--to", help="Number of the version, as `history` tells it; else the one before.")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier version."""
    from tsx_cli.deploy.commands.verbs import go_back

    go_back(*said, to, ask=not yes, as_json=as_json)


@app.command()
@takes(deployment)
def promote(said: Said, yes: Yes = False, as_json: AsJson = False) -> None:
    """Give a canary all requests at once."""
    from tsx_cli.deploy.commands.verbs import promote

    promote(*said, ask=not yes, as_json=as_json)


@app.command()
@takes(deployment)
def destroy(
    said: Said,
    purge: Annotated[bool, typer.Option("--purge", help="Remove what was uploaded or built for it too: models, and images.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove all of a deployment, after asking for its name."""
    from tsx_cli.deploy.commands.verbs import remove

    remove(*said, purge=purge, ask=not yes, as_json=as_json)
