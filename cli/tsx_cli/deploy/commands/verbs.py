"""The verbs of `tsx deploy`."""

from __future__ import annotations

import mimetypes
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_cli.archive.packing import check_lines
from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.output import print_json
from tsx_cli.deploy.commands.logs_view import (
    explain,
    explain_log,
    log_of,
    show_explanation,
    show_lines,
)
from tsx_cli.deploy.commands.options import DeploymentOptions
from tsx_cli.deploy.commands.show import Steps, confirm, show_plan, show_status, show_versions
from tsx_cli.deploy.commands.spec_file import read_named_spec, read_spec
from tsx_cli.deploy.engine.engine import RETRY_HINT, DeployFailed, Engine
from tsx_cli.deploy.engine.facts import read_archive
from tsx_cli.deploy.engine.plan import Plan
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.local import this_machine
from tsx_cli.deploy.image.recipe import recipe
from tsx_cli.deploy.preflight.preflight import Preflight, load_archive, run_preflight
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.target import Location
from tsx_cli.deploy.targets import find_target


def show_changes(options: DeploymentOptions, *, check: bool, as_json: bool) -> bool:
    """Print a plan, and return whether it changes anything."""
    spec, location = _read_spec_and_location(options)
    with ExitStack() as stack:
        plan, preflight = _plan_deployment(location.engine(), location, spec, stack, check=check)
    if as_json:
        print_json(plan.as_json() | preflight.as_json())
    else:
        show_plan(plan)
        print("\n".join(preflight.lines()))
    return not plan.is_empty


def apply(options: DeploymentOptions, *, ask: bool, check: bool, as_json: bool) -> None:
    spec, location = _read_spec_and_location(options)
    with ExitStack() as stack, Steps(quiet=as_json) as steps:
        engine = location.engine(steps)
        plan, preflight = _plan_deployment(engine, location, spec, stack, check=check)
        if not as_json:
            show_plan(plan)
        if not plan.is_empty:
            preflight = _check_load(preflight, steps, check=check)
            if not as_json:
                print("\n".join(preflight.lines()))
        _confirm_and_apply(engine, location, plan, ask=ask, as_json=as_json)
    _print_status(location, as_json=as_json)


def show_deployment(options: DeploymentOptions, *, as_json: bool) -> None:
    location = locate_named_deployment(options)
    status = _read_status(location)
    if status is None:
        raise _absence_error(location)
    log = log_of(location)
    explanation = explain_log(log, status["reason"]) if status.get("reason") else None
    if as_json:
        print_json(status | (explanation or {}))
        return
    show_status(status)
    if explanation is not None:
        show_explanation(explanation, log, to_stderr=False)


def show_logs(
    options: DeploymentOptions, *, since: str | None, count: int, follow: bool, as_json: bool
) -> None:
    show_lines(
        log_of(locate_named_deployment(options)),
        since=since,
        count=count,
        follow=follow,
        as_json=as_json,
    )


def invoke_deployment(
    options: DeploymentOptions, body: str, content_type: str | None, accept: str | None
) -> Response:
    location = locate_named_deployment(options)
    content = sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
    kind = content_type or mimetypes.guess_type(body)[0] or "application/octet-stream"
    return location.platform.invoke(location.cloud, location.name, content, kind, accept)


def show_history(options: DeploymentOptions, *, as_json: bool) -> None:
    location = locate_named_deployment(options)
    versions = location.platform.versions(location.cloud, location.name)
    if as_json:
        print_json(
            [
                {**version._asdict(), "made": version.made.isoformat(), "tags": dict(version.tags)}
                for version in versions
            ]
        )
    elif not versions:
        raise _absence_error(location)
    else:
        show_versions(versions)


def roll_back(options: DeploymentOptions, number: int | None, *, ask: bool, as_json: bool) -> None:
    location = locate_named_deployment(options)
    version = _find_earlier_version(location, number)
    # The hint contains the number, because a second run without it would go back further.
    retry_hint = f"Run `tsx deploy rollback --version {version.number}`"
    _move_requests(
        location,
        location.platform.rollback_resources(location.cloud, location.name, version),
        retry_hint,
        ask=ask,
        as_json=as_json,
    )


def promote(options: DeploymentOptions, *, ask: bool, as_json: bool) -> None:
    location = locate_named_deployment(options)
    if not location.platform.versions(location.cloud, location.name):
        raise _absence_error(location)
    _move_requests(
        location,
        location.platform.promotion_resources(location.cloud, location.name),
        RETRY_HINT,
        ask=ask,
        as_json=as_json,
    )


def _move_requests(
    location: Location, wanted: Sequence[Resource], retry_hint: str, *, ask: bool, as_json: bool
) -> None:
    """Move the requests to another version."""
    with Steps(quiet=as_json) as steps:
        engine = location.engine(steps)
        engine.retry_hint = retry_hint
        plan = engine.plan(wanted)
        if not as_json:
            show_plan(plan)
        _confirm_and_apply(engine, location, plan, ask=ask, as_json=as_json)
    _print_status(location, as_json=as_json)


def destroy_deployment(
    options: DeploymentOptions, *, purge: bool, ask: bool, as_json: bool
) -> None:
    location = locate_named_deployment(options)
    with Steps(quiet=as_json) as steps:
        engine = location.engine(steps)
        existing = location.platform.existing_resources(location.cloud, location.name, purge=purge)
        leftovers = location.target.leftovers(location, existing) if purge else []
        # Resources at the beginning of the list are deleted last.
        plan = engine.plan([], [*leftovers, *existing])
        if plan.is_empty:
            raise _absence_error(location)
        if not as_json:
            show_plan(plan)
        if ask and (
            not sys.stdin.isatty()
            or input(f"Type '{location.name}' to remove all of this: ").strip() != location.name
        ):
            raise CliError("nothing was removed; without a terminal, confirm with --yes")
        engine.apply(plan)
    if as_json:
        print_json(plan.as_json())


def _read_spec_and_location(options: DeploymentOptions) -> tuple[DeploySpec, Location]:
    spec = read_spec(*options)
    target = find_target(spec.target)
    location = target.locate(spec)
    return target.complete(location.cloud, spec), location


def locate_named_deployment(options: DeploymentOptions) -> Location:
    spec = read_named_spec(*options)
    return find_target(spec.target).locate(spec)


def _plan_deployment(
    engine: Engine, location: Location, spec: DeploySpec, stack: ExitStack, *, check: bool
) -> tuple[Plan, Preflight]:
    """Check and plan a deployment; `stack` keeps the files of an image that is built here."""
    cloud, target = location.cloud, location.target
    inspection, facts = read_archive(spec.model, image=spec.image or "", region=cloud.region)
    if spec.builds_image:
        # This raises errors of the specification before a wheel is built.
        location.platform.wanted_resources(cloud, spec, facts)
        local = stack.enter_context(this_machine(spec))
    facts, image_bytes = target.pin_image(cloud, facts)
    image_resources: list[Resource] = []
    notes: Sequence[str] = ()
    if spec.builds_image:
        image_recipe = recipe(spec, facts, local)
        image, image_resources, kinds = target.built_image(cloud, spec, image_recipe)
        facts, engine.kinds = replace(facts, image=image), {**engine.kinds, **kinds}
        notes = image_recipe.notes
    wanted = [*image_resources, *location.platform.wanted_resources(cloud, spec, facts)]
    preflight = run_preflight(target, spec, inspection, image_bytes, strict=check).with_notes(
        [*(note for resource in wanted for note in resource.notes), *notes]
    )
    return engine.plan(wanted, location.platform.obsolete_resources(cloud, spec, wanted)), preflight


def _check_load(preflight: Preflight, steps: Steps, *, check: bool) -> Preflight:
    """Load the archive on this machine if `check` is set, and print the result."""
    if not check:
        steps.say(f"{preflight.spec.model} was not loaded here (--no-check)")
        return preflight
    with steps.busy(f"loading {preflight.spec.model} in a worker on this machine"):
        result = load_archive(preflight.spec.model)
    steps.say("\n".join(check_lines(result)))
    return preflight.with_load_result(result)


def _confirm_and_apply(
    engine: Engine, location: Location, plan: Plan, *, ask: bool, as_json: bool
) -> None:
    """Ask for confirmation, and apply a plan.

    JSON output does not show the plan, so it needs --yes.

    Raises:
        CliError: The change was not confirmed, or has failed.
    """
    if plan.is_empty and plan.is_settled:
        return
    if ask and not plan.is_empty and (as_json or not confirm(plan, "Apply these changes?")):
        raise CliError("nothing was changed; without a terminal, confirm with --yes")
    start = time.time()
    try:
        engine.apply(plan)
    except DeployFailed as error:
        explain(error, log_of(location), start)
        raise


def _read_status(location: Location) -> dict[str, Any] | None:
    status = location.platform.status(location.cloud, location.name)
    return status and {"name": location.name, "target": location.target.name, **status}


def _print_status(location: Location, *, as_json: bool) -> None:
    status = _read_status(location)
    if status is not None:
        print_json(status) if as_json else show_status(status)


def _find_earlier_version(location: Location, number: int | None) -> DeployedVersion:
    versions = location.platform.versions(location.cloud, location.name)
    if not versions:
        raise _absence_error(location)
    if number is not None:
        version = next((version for version in versions if version.number == number), None)
        if version is None:
            raise UsageError(
                f"--version: there is no version {number}; there are"
                f" {', '.join(str(version.number) for version in versions)}"
            )
        return version
    # During a canary, a rollback returns from the canary to the current version.
    if any(version.percent for version in versions):
        return next(version for version in versions if version.is_current)
    current = next(
        (index for index, version in enumerate(versions) if version.is_current), len(versions) - 1
    )
    if current == 0:
        raise CliError(
            f"{location.name} has no earlier version; `tsx deploy history` lists the existing ones"
        )
    return versions[current - 1]


def _absence_error(location: Location) -> CliError:
    location_text = (
        f"in {location.cloud.region}; check --region"
        if location.log_name
        else f"on {location.cloud.region}"
    )
    return CliError(f"there is no deployment '{location.name}' {location_text}")
