"""`tsx deploy`: the command lines of its verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tsx_cli.common.failure import FAILED, UsageError
from tsx_cli.common.lazy import DefaultGroup
from tsx_cli.common.options import AsJson, InputOption, with_options
from tsx_cli.deploy.commands.options import DeploymentOptions, deployment_options, desired_options

# `verbs` is imported inside the commands: it imports pydantic, which would slow down the help.

CHANGES = 2  # exit code of a plan with changes


# The base class of typer's usage errors.
TYPER_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class DeployGroup(DefaultGroup):
    default = "apply"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, and insert a missing directory after `--emit KIND`."""
        index = args.index("--emit") + 2 if "--emit" in args else 0
        if 0 < index <= len(args) and (
            index == len(args) or args[index].startswith("-") or Path(args[index]).is_file()
        ):
            args = [*args[:index], args[index - 1], *args[index:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb; usage errors of a plan exit with 1, because 2 means changes."""
        arguments = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except (UsageError, TYPER_USAGE_ERROR) as error:
            if "--plan" in arguments or arguments[0] == "plan":
                error.exit_code = FAILED  # type: ignore[attr-defined]  # both classes have it
            raise


Emit = Annotated[
    tuple[str, Path] | None,
    typer.Option(
        "--emit",
        metavar="KIND [DIR]",
        help=(
            "Only write files into DIR, by default ./KIND: dockerfile, compose, cloudformation,"
            " kubernetes, helm, kustomize, github, ray or any target."
        ),
    ),
]
NoCheck = Annotated[
    bool,
    typer.Option(
        "--no-check",
        help="Do not load the archive on this machine first, and only warn about exceeded limits.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

app = typer.Typer(
    cls=DeployGroup,
    add_completion=False,
    help=(
        "Deploy an archive to a container, Kubernetes, Ray, SageMaker or Lambda; the plan is shown"
        " first."
    ),
    no_args_is_help=True,
)


@app.command("apply")
@with_options(desired_options)
def apply_command(
    options: DeploymentOptions,
    no_check: NoCheck = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Only show what would change. Exit code 0: nothing, 2: something."
        ),
    ] = False,
    emit: Emit = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show the plan, ask for confirmation, and apply it.

    Running it again continues an interrupted run, or changes nothing.
    """
    from tsx_cli.deploy.commands.verbs import apply

    if plan or emit is not None:
        _plan(options, no_check, emit, as_json)
    else:
        apply(options, ask=not yes, check=not no_check, as_json=as_json)


@app.command("plan")
@with_options(desired_options)
def plan_command(
    options: DeploymentOptions,
    no_check: NoCheck = False,
    emit: Emit = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan without applying it. Exit code 0: no changes, 2: changes, 1: an error."""
    _plan(options, no_check, emit, as_json)


def _plan(
    options: DeploymentOptions, no_check: bool, emit: tuple[str, Path] | None, as_json: bool
) -> None:
    if emit is not None:
        from tsx_cli.deploy.commands.files import emit_files

        emit_files(options, *emit, as_json=as_json)
        return
    from tsx_cli.deploy.commands.verbs import show_changes

    raise typer.Exit(CHANGES if show_changes(options, check=not no_check, as_json=as_json) else 0)


@app.command()
@with_options(deployment_options)
def status(options: DeploymentOptions, as_json: AsJson = False) -> None:
    """Show a deployment: its state, its model, its instances, its alarms."""
    from tsx_cli.deploy.commands.verbs import show_deployment

    show_deployment(options, as_json=as_json)


@app.command()
@with_options(deployment_options)
def logs(
    options: DeploymentOptions,
    follow: Annotated[
        bool, typer.Option("--follow", help="Follow new lines until Ctrl-C.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help=(
                "How far back to start, such as 90s, 10m or 2h; by default as far as --lines goes."
            ),
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=10_000, help="Number of last lines to show.")
    ] = 100,
    as_json: AsJson = False,
) -> None:
    """Show the log of a deployment."""
    from tsx_cli.deploy.commands.verbs import show_logs

    show_logs(options, since=since, count=lines, follow=follow, as_json=as_json)


@app.command()
@with_options(deployment_options)
def invoke(
    options: DeploymentOptions,
    body: Annotated[
        str | None, typer.Argument(metavar="FILE", help="File to send; - reads standard input.")
    ] = None,
    input_option: InputOption = None,
    content_type: Annotated[
        str | None,
        typer.Option(
            "--content-type", help="Content type of the file, if its name does not show it."
        ),
    ] = None,
    accept: Annotated[
        str | None, typer.Option("--accept", help="Content type of the answer.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the answer, unchanged, to this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a file to a deployment and print the answer, as `tsx predict` does.

    --json shows its content type.
    """
    from tsx_cli.deploy.commands.verbs import invoke_deployment
    from tsx_cli.predict.command import check_delivery, deliver

    check_delivery(output, as_json=as_json)
    if (body is None) == (input_option is None):
        raise UsageError("name one file to send: `tsx deploy invoke FILE`")
    response = invoke_deployment(options, body or input_option or "", content_type, accept)
    deliver(response, output, as_json=as_json)


@app.command()
@with_options(deployment_options)
def history(options: DeploymentOptions, as_json: AsJson = False) -> None:
    """List the versions that `rollback` can return to."""
    from tsx_cli.deploy.commands.verbs import show_history

    show_history(options, as_json=as_json)


@app.command()
@with_options(deployment_options)
def rollback(
    options: DeploymentOptions,
    number: Annotated[
        int | None,
        typer.Option(
            "--version", help="Version number as shown by `history`; by default the previous one."
        ),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Return to an earlier version."""
    from tsx_cli.deploy.commands.verbs import roll_back

    roll_back(options, number, ask=not yes, as_json=as_json)


@app.command()
@with_options(deployment_options)
def promote(options: DeploymentOptions, yes: Yes = False, as_json: AsJson = False) -> None:
    """Send all requests to the canary now."""
    from tsx_cli.deploy.commands.verbs import promote

    promote(options, ask=not yes, as_json=as_json)


@app.command()
@with_options(deployment_options)
def destroy(
    options: DeploymentOptions,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also remove uploaded models, built images and logs.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove a deployment completely, after asking for its name."""
    from tsx_cli.deploy.commands.verbs import destroy_deployment

    destroy_deployment(options, purge=purge, ask=not yes, as_json=as_json)
