"""`tsx deploy`: apply, plan, status, invoke, history, rollback and destroy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tsx_cli.deploy.targets import TARGETS
from tsx_cli.failure import UsageError
from tsx_cli.lazy import DefaultGroup
from tsx_cli.options import AsJson
from tsx_runtime.nearest import suggestion

CHANGES = 2  # the exit code of a plan that changes something


class DeployGroup(DefaultGroup):
    default = "apply"


Model = Annotated[Path | None, typer.Argument(metavar="MODEL.mar", help="The archive, if tsx.toml does not name it.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the deployment, which is that of the endpoint.")]
Target = Annotated[str | None, typer.Option("--target", help="Where to: sagemaker.")]
File = Annotated[Path | None, typer.Option("-f", "--file", metavar="tsx.toml", help="Read [deploy] from this file instead of ./tsx.toml.")]
Region = Annotated[str | None, typer.Option("--region", help="AWS region, if not the one of the environment.")]
Profile = Annotated[str | None, typer.Option("--profile", help="AWS profile, if not the one of the environment.")]
Image = Annotated[str | None, typer.Option("--image", help="An image that is built and pushed already.")]
Role = Annotated[str | None, typer.Option("--role", help="ARN of the role that it runs with.")]
Assign = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of [deploy], such as sagemaker.instances=2; may be repeated."),
]
CanaryShare = Annotated[str | None, typer.Option("--canary", help="Share of the traffic that a new version gets first, such as 10%.")]
Bake = Annotated[str | None, typer.Option("--bake", help="For how long it keeps that share, such as 10m.")]
Alarm = Annotated[
    list[str] | None, typer.Option("--alarm", help="What sends it back: 5xx>0, p95>300ms or an alarm's name; may be repeated.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

app = typer.Typer(
    cls=DeployGroup,
    add_completion=False,
    help="Bring an archive to a SageMaker endpoint, by a plan that is shown first.",
    no_args_is_help=True,
)


@app.command("apply")
def apply_command(
    model: Model = None,
    target: Target = None,
    name: Name = None,
    file: File = None,
    region: Region = None,
    profile: Profile = None,
    image: Image = None,
    role: Role = None,
    assign: Assign = None,
    canary: CanaryShare = None,
    bake: Bake = None,
    alarm: Alarm = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only show what would change; exit code 0: nothing, 2: something.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show what has to change, ask, and carry it out. Running it again changes nothing; a run that broke off goes on."""
    given = given_words(model, target, name, region, profile, image, role, assign, canary, bake, alarm)
    from tsx_cli.deploy.verbs import apply, show_changes  # here, as pydantic is slow to import and help needs none of it

    if plan:
        raise typer.Exit(CHANGES if show_changes(file, given, as_json=as_json) else 0)
    apply(file, given, ask=not yes, as_json=as_json)


@app.command("plan")
def plan_command(
    model: Model = None,
    target: Target = None,
    name: Name = None,
    file: File = None,
    region: Region = None,
    profile: Profile = None,
    image: Image = None,
    role: Role = None,
    assign: Assign = None,
    canary: CanaryShare = None,
    bake: Bake = None,
    alarm: Alarm = None,
    as_json: AsJson = False,
) -> None:
    """Show what has to change and change nothing. Exit code 0: nothing, 2: something, 1: an error."""
    from tsx_cli.deploy.verbs import show_changes

    given = given_words(model, target, name, region, profile, image, role, assign, canary, bake, alarm)
    raise typer.Exit(CHANGES if show_changes(file, given, as_json=as_json) else 0)


@app.command()
def status(
    name: Name = None, target: Target = None, file: File = None, region: Region = None, profile: Profile = None, as_json: AsJson = False
) -> None:
    """Show how a deployment does: its state, its model, its instances, its alarms."""
    from tsx_cli.deploy.verbs import show_state

    show_state(file, named(name, target, region, profile), as_json=as_json)


@app.command()
def invoke(
    body: Annotated[str, typer.Argument(metavar="FILE", help="What is sent; - for standard input.")],
    name: Name = None,
    target: Target = None,
    file: File = None,
    region: Region = None,
    profile: Profile = None,
    content_type: Annotated[str | None, typer.Option("--content-type", help="What the file is, if its name does not say it.")] = None,
    accept: Annotated[str | None, typer.Option("--accept", help="The form of the answer.")] = None,
) -> None:
    """Send a file to a deployment and print the answer."""
    from tsx_cli.deploy.verbs import ask

    sys.stdout.flush()
    sys.stdout.buffer.write(ask(file, named(name, target, region, profile), body, content_type, accept))


@app.command()
def history(
    name: Name = None, target: Target = None, file: File = None, region: Region = None, profile: Profile = None, as_json: AsJson = False
) -> None:
    """List what was deployed and can be gone back to."""
    from tsx_cli.deploy.verbs import show_history

    show_history(file, named(name, target, region, profile), as_json=as_json)


@app.command()
def rollback(
    name: Name = None,
    target: Target = None,
    to: Annotated[int | None, typer.Option("--to", help="Number of the version, as `history` tells it; else the one before.")] = None,
    file: File = None,
    region: Region = None,
    profile: Profile = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier version."""
    from tsx_cli.deploy.verbs import go_back

    go_back(file, named(name, target, region, profile), to, ask=not yes, as_json=as_json)


@app.command()
def destroy(
    name: Name = None,
    target: Target = None,
    file: File = None,
    region: Region = None,
    profile: Profile = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove uploaded models too.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove all of a deployment, after asking for its name."""
    from tsx_cli.deploy.verbs import remove

    remove(file, named(name, target, region, profile), purge=purge, ask=not yes, as_json=as_json)


def named(name: str | None, target: str | None, region: str | None, profile: str | None) -> dict[str, Any]:
    _check_target(target)
    return {"name": name, "target": target, "region": region, "profile": profile}


def given_words(
    model: Path | None,
    target: str | None,
    name: str | None,
    region: str | None,
    profile: str | None,
    image: str | None,
    role: str | None,
    assign: list[str] | None,
    canary: str | None,
    bake: str | None,
    alarms: list[str] | None,
) -> dict[str, Any]:
    """What was said on the command line, in the words of `[deploy]`."""
    given: dict[str, Any] = {**named(name, target, region, profile), "model": model, "image": image}
    for assignment in assign or []:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes KEY=VALUE, not '{assignment}'")
        place = given
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UsageError(f"--set {key}: '{part}' is no table")
        place[last] = value
    if role is not None:
        given.setdefault("sagemaker", {})["role"] = role
    said = {"percent": canary, "bake": bake, "alarms": alarms or None}
    if any(value is not None for value in said.values()):
        given["canary"] = {key: value for key, value in said.items() if value is not None}
    return given


def _check_target(target: str | None) -> None:
    if target is not None and target not in TARGETS:
        raise UsageError(f"--target: there is no '{target}'{suggestion(target, TARGETS)} There is {', '.join(TARGETS)}")
