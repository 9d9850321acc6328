"""The verbs of `tsx deploy`."""

from __future__ import annotations

import mimetypes
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_cli.archive.packing import check_lines
from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.inputs import SAMPLES
from tsx_cli.common.output import one_line, print_json
from tsx_cli.deploy.aws.session import Cloud, translate_errors
from tsx_cli.deploy.commands.images import images
from tsx_cli.deploy.commands.locations import Location, locate, locate_named_deployment
from tsx_cli.deploy.commands.logs_view import (
    explain,
    explain_log,
    log_of,
    show_explanation,
    show_lines,
)
from tsx_cli.deploy.commands.show import Steps, confirm, show_plan, show_status, show_versions
from tsx_cli.deploy.commands.spec_file import read_spec, read_target
from tsx_cli.deploy.emit.github import NO_SAMPLES, command_arguments
from tsx_cli.deploy.emit.render import KINDS, WITHOUT_IMAGE, check_kind, emit
from tsx_cli.deploy.emit.write import write
from tsx_cli.deploy.engine.engine import RETRY_HINT, DeployFailed, Engine
from tsx_cli.deploy.engine.facts import read_archive
from tsx_cli.deploy.engine.plan import Plan
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.local import image_builder, this_machine
from tsx_cli.deploy.image.programs import pin_digest
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.preflight.limits import LimitFinding
from tsx_cli.deploy.preflight.preflight import Preflight, load_archive, run_preflight
from tsx_cli.deploy.sagemaker.shared_endpoints import complete_spec
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.spec_values import span

Options = Mapping[str, Any]


def show_changes(file: Path | None, options: Options, *, check: bool, as_json: bool) -> bool:
    """Print a plan, and return whether it changes anything."""
    spec, location = _read_spec_and_location(file, options)
    with ExitStack() as stack:
        plan, preflight = _plan_deployment(location.engine(), location, spec, stack, check=check)
    if as_json:
        print_json(plan.as_json() | preflight.as_json())
    else:
        show_plan(plan)
        print("\n".join(preflight.lines()))
    return not plan.is_empty


def apply(file: Path | None, options: Options, *, ask: bool, check: bool, as_json: bool) -> None:
    spec, location = _read_spec_and_location(file, options)
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


def emit_files(
    file: Path | None, options: Options, kind: str, directory: Path, *, as_json: bool
) -> None:
    """Write the files of `--emit`, without calling any platform."""
    given_target, steps = read_target(file, options), Steps(quiet=as_json)
    target = check_kind(kind, given_target)
    spec = read_spec(file, {**options, "target": target})
    if given_target is None and len(KINDS[kind][0]) > 1:
        steps.say(f"the target is {target}, of {', '.join(KINDS[kind][0])}; --target names another")
    steps.say(f"reading {spec.model}")
    inspection, facts = read_archive(spec.model, image=spec.image or "")
    if spec.target == "kubernetes":
        manifests(spec, "", {})  # This raises errors of the specification.
    needs_image = kind not in WITHOUT_IMAGE
    if needs_image:
        steps.say("looking up the base image, and building a wheel of tsx where it has no release")
    with this_machine(spec, needs_image) as local:
        emitted_files = emit(
            kind, spec, facts, local, command_arguments(file, options) if kind == "github" else ()
        )
        paths = write(emitted_files, directory)
    if kind == "github" and not any(
        member.name.startswith(f"{SAMPLES}/") for member in inspection.members
    ):
        emitted_files = emitted_files._replace(notes=[*emitted_files.notes, NO_SAMPLES])
    if as_json:
        print_json(
            {
                "files": [str(path) for path in paths],
                "next": emitted_files.next_step,
                "notes": list(emitted_files.notes),
            }
        )
        return
    for path in paths:
        print(f"wrote {path}")
    for note in emitted_files.notes:
        print(one_line(f"note: {note}"))
    print(f"Next, in {directory}: {emitted_files.next_step}")


def show_deployment(file: Path | None, options: Options, *, as_json: bool) -> None:
    location = locate_named_deployment(file, options)
    status = location.platform.status(location.cloud, location.name)
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
    file: Path | None,
    options: Options,
    *,
    since: str | None,
    count: int,
    follow: bool,
    as_json: bool,
) -> None:
    location = locate_named_deployment(file, options)
    log = log_of(location)
    show_lines(
        log,
        since=None if since is None else span(since, "--since"),
        count=count,
        follow=follow,
        as_json=as_json,
    )


def invoke_deployment(
    file: Path | None, options: Options, body: str, content_type: str | None, accept: str | None
) -> Response:
    location = locate_named_deployment(file, options)
    content = sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
    kind = content_type or mimetypes.guess_type(body)[0] or "application/octet-stream"
    return location.platform.invoke(location.cloud, location.name, content, kind, accept)


def show_history(file: Path | None, options: Options, *, as_json: bool) -> None:
    location = locate_named_deployment(file, options)
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


def roll_back(
    file: Path | None, options: Options, number: int | None, *, ask: bool, as_json: bool
) -> None:
    location = locate_named_deployment(file, options)
    version = _find_earlier_version(
        location.platform.versions(location.cloud, location.name), number, location
    )
    # The hint contains the number, because a second run without it would go back further.
    retry_hint = f"Run `tsx deploy rollback --version {version.number}`"
    _move_requests(
        location,
        location.platform.rollback_resources(location.cloud, location.name, version),
        retry_hint,
        ask=ask,
        as_json=as_json,
    )


def promote(file: Path | None, options: Options, *, ask: bool, as_json: bool) -> None:
    location = locate_named_deployment(file, options)
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
    file: Path | None, options: Options, *, purge: bool, ask: bool, as_json: bool
) -> None:
    location = locate_named_deployment(file, options)
    with Steps(quiet=as_json) as steps:
        engine = location.engine(steps)
        existing = location.platform.existing_resources(location.cloud, location.name, purge=purge)
        # Resources at the beginning of the list are deleted last.
        plan = engine.plan([], [*(location.leftovers(existing) if purge else []), *existing])
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


def _read_spec_and_location(file: Path | None, options: Options) -> tuple[DeploySpec, Location]:
    spec = read_spec(file, options)
    location = locate(spec)
    return (complete_spec(location.cloud, spec) if spec.target == "sagemaker" else spec), location


def _plan_deployment(
    engine: Engine, location: Location, spec: DeploySpec, stack: ExitStack, *, check: bool
) -> tuple[Plan, Preflight]:
    """Check and plan a deployment; `stack` keeps the files of an image that is built here."""
    cloud, image_bytes = location.cloud, None
    inspection, facts = read_archive(spec.model, image=spec.image or "", region=cloud.region)
    if spec.builds_image:
        # This raises errors of the specification before a wheel is built.
        location.platform.wanted_resources(cloud, spec, facts)
    local = stack.enter_context(image_builder(spec))
    if isinstance(cloud, Cloud):
        account = cloud.account
        image_by_digest, image_bytes = resolve_digest(spec.image or "", cloud)
        facts = replace(facts, account=account, image=image_by_digest)
    elif spec.target == "kubernetes" and spec.image is not None:
        facts = replace(facts, image=pin_digest(spec.image))
    image_resources: list[Resource] = []
    notes: Sequence[str] = ()
    if local is not None:
        image, image_resources, kinds, notes = images(spec, facts, local, cloud)
        facts, engine.kinds = replace(facts, image=image), {**engine.kinds, **kinds}
    wanted = [*image_resources, *location.platform.wanted_resources(cloud, spec, facts)]
    preflight = run_preflight(spec, inspection, image_bytes, strict=check).with_notes(wanted)
    preflight = replace(
        preflight, findings=(*preflight.findings, *(LimitFinding(False, note) for note in notes))
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


def _print_status(location: Location, *, as_json: bool) -> None:
    status = location.platform.status(location.cloud, location.name)
    if status is not None:
        print_json(status) if as_json else show_status(status)


def resolve_digest(image: str, cloud: Cloud) -> tuple[str, int | None]:
    """Return an image of ECR by its digest, because a tag may mean another image tomorrow."""
    host, slash, path = image.partition("/")
    if "@sha256:" in image or not slash or ".dkr.ecr." not in host:
        return image, None
    repository, _, tag = path.partition(":")
    with translate_errors(f"looking for the image {image}"):
        (image_details,) = cloud.client("ecr").describe_images(
            repositoryName=repository, imageIds=[{"imageTag": tag or "latest"}]
        )["imageDetails"]
    return f"{host}/{repository}@{image_details['imageDigest']}", image_details.get(
        "imageSizeInBytes"
    )


def _find_earlier_version(
    versions: Sequence[DeployedVersion], number: int | None, location: Location
) -> DeployedVersion:
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
        if isinstance(location.cloud, Cloud)
        else f"on {location.cloud.region}"
    )
    return CliError(f"there is no deployment '{location.name}' {location_text}")
