"""The options that several verbs of `tsx deploy` share, and the specification built from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from tsx_cli.common.failure import UsageError
from tsx_cli.common.options import read_pair
from tsx_runtime.shared.suggestions import suggestion

TARGETS = ("container", "sagemaker", "lambda", "kubernetes", "ray")

Shared = TypeVar("Shared")
Result = TypeVar("Result")


class DeploymentOptions(NamedTuple):
    file: Path | None  # the tsx.toml that was named
    given: dict[str, Any]  # in the words of `[deploy]`; None for what was not said


def with_options(
    shared: Callable[..., Shared],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Gives a command the options of `shared` before its own, and what `shared` makes of them as
    its first argument.

    typer learns a command's options from its signature: this puts one together.
    """
    theirs = inspect.signature(shared, eval_str=True).parameters

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        def run(**options: Any) -> Result:
            return command(shared(**{name: options.pop(name) for name in theirs}), **options)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        each = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*theirs.values(), *own)
        ]
        run.__signature__ = inspect.Signature(each)  # type: ignore[attr-defined]  # where `inspect` looks first
        return run

    return decorate


def deployment_options(
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the deployment; by default the archive's.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help=f"Target: {', '.join(TARGETS)}.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-f",
            "--file",
            metavar="tsx.toml",
            help=r"Read \[deploy] from this file instead of ./tsx.toml.",
        ),
    ] = None,
    region: Annotated[
        str | None, typer.Option("--region", help="AWS region; by default that of the environment.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="AWS profile; by default that of the environment."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Ray cluster: ray://HOST:10001, HOST:6379 or auto."),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help=r"Any key of \[deploy], such as sagemaker.instances=2; may be repeated.",
        ),
    ] = None,
) -> DeploymentOptions:
    """Which deployment. Raises UsageError for a target that there is not."""
    if target is not None and target not in TARGETS:
        raise UsageError(
            f"--target: there is no '{target}'{suggestion(target, TARGETS) or '.'} There are"
            f" {', '.join(TARGETS)}"
        )
    given: dict[str, Any] = {"name": name, "target": target, "region": region, "profile": profile}
    if address is not None:
        given["ray"] = {"address": address}
    for assignment in assign or []:
        _assign(given, assignment)
    return DeploymentOptions(file, given)


@with_options(deployment_options)
def desired_options(
    options: DeploymentOptions,
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL.mar", help="The archive, if tsx.toml does not name one."),
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="An existing image, already pushed.")
    ] = None,
    role: Annotated[str | None, typer.Option("--role", help="ARN of the execution role.")] = None,
    create_role: Annotated[
        bool, typer.Option("--create-role", help="Create an execution role; `destroy` removes it.")
    ] = False,
    canary: Annotated[
        str | None,
        typer.Option(
            "--canary", help="Share of the traffic that the new version gets first, such as 10%."
        ),
    ] = None,
    bake: Annotated[
        str | None,
        typer.Option("--bake", help="How long the new version keeps that share, such as 10m."),
    ] = None,
    alarm: Annotated[
        list[str] | None,
        typer.Option(
            "--alarm",
            metavar="CONDITION",
            help="What triggers a rollback: 5xx>0, p95>300ms or an alarm's name; may be repeated.",
        ),
    ] = None,
) -> DeploymentOptions:
    """What is to be there."""
    given: dict[str, Any] = {**options.given, "model": model, "image": image}
    if role is not None and create_role:
        raise UsageError(
            "--role uses an existing role, and --create-role creates one. Remove one of them"
        )
    if role is not None:
        given["role"] = role
    if create_role:
        given["create_role"] = True
    shift = {"percent": canary, "bake": bake, "alarms": alarm or None}
    if any(value is not None for value in shift.values()):
        given["canary"] = {key: value for key, value in shift.items() if value is not None}
    return DeploymentOptions(options.file, given)


def _assign(given: dict[str, Any], assignment: str) -> None:
    key, value = read_pair(assignment, "--set takes KEY=VALUE")
    place = given
    *path, last = key.split(".")
    for part in path:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise UsageError(f"--set {key}: '{part}' is not a table")
    place[last] = value
