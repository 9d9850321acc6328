"""The options that several verbs of `tsx deploy` share, and the specification built from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tsx_cli.common.failure import UsageError
from tsx_cli.common.options import read_pair, with_options
from tsx_cli.deploy.targets import TARGETS
from tsx_runtime.shared.suggestions import suggestion


class DeploymentOptions(NamedTuple):
    """The options of a command, merged into one table."""

    file: Path | None  # the given tsx.toml
    values: dict[str, Any]  # key of `[deploy]` -> value, None for unused options


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
    """Return the options that identify a deployment.

    Raises:
        UsageError: There is no such target.
    """
    if target is not None and target not in TARGETS:
        raise UsageError(
            f"--target: there is no '{target}'{suggestion(target, TARGETS) or '.'} There are"
            f" {', '.join(TARGETS)}"
        )
    values: dict[str, Any] = {"name": name, "target": target, "region": region, "profile": profile}
    if address is not None:
        values["ray"] = {"address": address}
    for assignment in assign or []:
        _assign(values, assignment)
    return DeploymentOptions(file, values)


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
    """Return the options that describe the wanted deployment.

    Raises:
        UsageError: Both --role and --create-role are given.
    """
    values: dict[str, Any] = {**options.values, "model": model, "image": image}
    if role is not None and create_role:
        raise UsageError(
            "--role uses an existing role, and --create-role creates one. Remove one of them"
        )
    if role is not None:
        values["role"] = role
    if create_role:
        values["create_role"] = True
    shift = {"percent": canary, "bake": bake, "alarms": alarm or None}
    if any(value is not None for value in shift.values()):
        values["canary"] = {key: value for key, value in shift.items() if value is not None}
    return DeploymentOptions(options.file, values)


def _assign(values: dict[str, Any], assignment: str) -> None:
    key, value = read_pair(assignment, "--set takes KEY=VALUE")
    table = values
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"--set {key}: '{part}' is not a table")
    table[last] = value
