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
from tsx_cli.deploy.aws.session import Cloud, translated_errors
from tsx_cli.deploy.commands.images import images
from tsx_cli.deploy.commands.locations import Location, named
from tsx_cli.deploy.commands.locations import place as place_of
from tsx_cli.deploy.commands.logs_view import explain, log_of, show_lines, show_why, why
from tsx_cli.deploy.commands.show import Steps, confirm, show_plan, show_status, show_versions
from tsx_cli.deploy.commands.spec_file import read_spec, read_target
from tsx_cli.deploy.emit.github import NO_SAMPLES, command_arguments
from tsx_cli.deploy.emit.render import KINDS, WITHOUT_IMAGE, check_kind, emit
from tsx_cli.deploy.emit.write import write
from tsx_cli.deploy.engine.engine import AGAIN, DeployFailed, Engine
from tsx_cli.deploy.engine.facts import read_archive
from tsx_cli.deploy.engine.plan import Plan
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.local import image_builder, this_machine
from tsx_cli.deploy.image.programs import pinned
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.preflight.limits import LimitFinding
from tsx_cli.deploy.preflight.preflight import Preflight, load, look_ahead
from tsx_cli.deploy.sagemaker.shared_endpoints import completed
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.spec_values import span

Given = Mapping[str, Any]


def show_changes(file: Path | None, given: Given, *, check: bool, as_json: bool) -> bool:
    """Whether there are any."""
    spec, place = _specified(file, given)
    with ExitStack() as stack:
        planned, ahead = _planned(place.engine(), place, spec, stack, check=check)
    if as_json:
        print_json(planned.as_json() | ahead.as_json())
    else:
        show_plan(planned)
        print("\n".join(ahead.lines()))
    return not planned.is_empty


def apply(file: Path | None, given: Given, *, ask: bool, check: bool, as_json: bool) -> None:
    spec, place = _specified(file, given)
    with ExitStack() as stack, Steps(quiet=as_json) as steps:
        engine = place.engine(steps)
        planned, ahead = _planned(engine, place, spec, stack, check=check)
        if not as_json:
            show_plan(planned)
        if not planned.is_empty:
            ahead = _tried(ahead, steps, check=check)
            if not as_json:
                print("\n".join(ahead.lines()))
        _carry_out(engine, place, planned, ask=ask, as_json=as_json)
    _tell(place, as_json=as_json)


def emit_files(
    file: Path | None, given: Given, kind: str, directory: Path, *, as_json: bool
) -> None:
    """Asks nothing of any platform, and writes nowhere else."""
    named_target, steps = read_target(file, given), Steps(quiet=as_json)
    target = check_kind(kind, named_target)
    spec = read_spec(file, {**given, "target": target})
    if named_target is None and len(KINDS[kind][0]) > 1:
        steps.say(f"the target is {target}, of {', '.join(KINDS[kind][0])}; --target names another")
    steps.say(f"reading {spec.model}")
    inspection, facts = read_archive(spec.model, image=spec.image or "")
    if spec.target == "kubernetes":
        manifests(spec, "", {})  # refuses what is missing
    needs_image = kind not in WITHOUT_IMAGE
    if needs_image:
        steps.say("looking up the base image, and building a wheel of tsx where it has no release")
    with this_machine(spec, needs_image) as local:
        emitted = emit(
            kind, spec, facts, local, command_arguments(file, given) if kind == "github" else ()
        )
        paths = write(emitted, directory)
    if kind == "github" and not any(
        member.name.startswith(f"{SAMPLES}/") for member in inspection.members
    ):
        emitted = emitted._replace(notes=[*emitted.notes, NO_SAMPLES])
    if as_json:
        print_json(
            {
                "files": [str(path) for path in paths],
                "next": emitted.next_step,
                "notes": list(emitted.notes),
            }
        )
        return
    for path in paths:
        print(f"wrote {path}")
    for note in emitted.notes:
        print(one_line(f"note: {note}"))
    print(f"Next, in {directory}: {emitted.next_step}")


def show_state(file: Path | None, given: Given, *, as_json: bool) -> None:
    place = named(file, given)
    answer = place.platform.status(place.cloud, place.name)
    if answer is None:
        raise _absent(place)
    log = log_of(place)
    found = why(log, answer["reason"]) if answer.get("reason") else None
    if as_json:
        print_json(answer | (found or {}))
        return
    show_status(answer)
    if found is not None:
        show_why(found, log, to_stderr=False)


def show_logs(
    file: Path | None, given: Given, *, since: str | None, count: int, follow: bool, as_json: bool
) -> None:
    place = named(file, given)
    log = log_of(place)
    show_lines(
        log,
        since=None if since is None else span(since, "--since"),
        count=count,
        follow=follow,
        as_json=as_json,
    )


def ask(
    file: Path | None, given: Given, body: str, content_type: str | None, accept: str | None
) -> Response:
    place = named(file, given)
    content = sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
    kind = content_type or mimetypes.guess_type(body)[0] or "application/octet-stream"
    return place.platform.invoke(place.cloud, place.name, content, kind, accept)


def show_history(file: Path | None, given: Given, *, as_json: bool) -> None:
    place = named(file, given)
    versions = place.platform.versions(place.cloud, place.name)
    if as_json:
        print_json(
            [
                {**each._asdict(), "made": each.made.isoformat(), "tags": dict(each.tags)}
                for each in versions
            ]
        )
    elif not versions:
        raise _absent(place)
    else:
        show_versions(versions)


def go_back(file: Path | None, given: Given, to: int | None, *, ask: bool, as_json: bool) -> None:
    place = named(file, given)
    version = _earlier(place.platform.versions(place.cloud, place.name), to, place)
    # without the number it would go back one further
    again = f"Run `tsx deploy rollback --version {version.number}`"
    _move(
        place,
        place.platform.going_back(place.cloud, place.name, version),
        again,
        ask=ask,
        as_json=as_json,
    )


def promote(file: Path | None, given: Given, *, ask: bool, as_json: bool) -> None:
    place = named(file, given)
    if not place.platform.versions(place.cloud, place.name):
        raise _absent(place)
    _move(place, place.platform.promoting(place.cloud, place.name), AGAIN, ask=ask, as_json=as_json)


def _move(
    place: Location, wanted: Sequence[Resource], again: str, *, ask: bool, as_json: bool
) -> None:
    """Requests to another version."""
    with Steps(quiet=as_json) as steps:
        engine = place.engine(steps)
        engine.again = again
        planned = engine.plan(wanted)
        if not as_json:
            show_plan(planned)
        _carry_out(engine, place, planned, ask=ask, as_json=as_json)
    _tell(place, as_json=as_json)


def remove(file: Path | None, given: Given, *, purge: bool, ask: bool, as_json: bool) -> None:
    place = named(file, given)
    with Steps(quiet=as_json) as steps:
        engine = place.engine(steps)
        there = place.platform.belongings(place.cloud, place.name, purge=purge)
        planned = engine.plan(
            [], [*(place.leftovers(there) if purge else []), *there]
        )  # what is first goes last
        if planned.is_empty:
            raise _absent(place)
        if not as_json:
            show_plan(planned)
        if ask and (
            not sys.stdin.isatty()
            or input(f"Type '{place.name}' to remove all of this: ").strip() != place.name
        ):
            raise CliError("nothing was removed; without a terminal, confirm with --yes")
        engine.apply(planned)
    if as_json:
        print_json(planned.as_json())


def _specified(file: Path | None, given: Given) -> tuple[DeploySpec, Location]:
    spec = read_spec(file, given)
    place = place_of(spec)
    return (completed(place.cloud, spec) if spec.target == "sagemaker" else spec), place


def _planned(
    engine: Engine, place: Location, spec: DeploySpec, stack: ExitStack, *, check: bool
) -> tuple[Plan, Preflight]:
    """`stack` keeps the files of an image that is built here."""
    cloud, image_bytes = place.cloud, None
    inspection, facts = read_archive(spec.model, image=spec.image or "", region=cloud.region)
    if spec.builds_image:
        place.platform.wanted(cloud, spec, facts)  # refuses what is missing before a wheel is built
    local = stack.enter_context(image_builder(spec))
    if isinstance(cloud, Cloud):
        account = cloud.account
        pushed, image_bytes = by_digest(spec.image or "", cloud)
        facts = replace(facts, account=account, image=pushed)
    elif spec.target == "kubernetes" and spec.image is not None:
        facts = replace(facts, image=pinned(spec.image))
    built: list[Resource] = []
    notes: Sequence[str] = ()
    if local is not None:
        image, built, kinds, notes = images(spec, facts, local, cloud)
        facts, engine.kinds = replace(facts, image=image), {**engine.kinds, **kinds}
    wanted = [*built, *place.platform.wanted(cloud, spec, facts)]
    ahead = look_ahead(spec, inspection, image_bytes, strict=check).noted(wanted)
    ahead = replace(
        ahead, findings=(*ahead.findings, *(LimitFinding(False, note) for note in notes))
    )
    return engine.plan(wanted, place.platform.obsolete(cloud, spec, wanted)), ahead


def _tried(ahead: Preflight, steps: Steps, *, check: bool) -> Preflight:
    """What the archive says of itself, and that it loads."""
    if not check:
        steps.say(f"{ahead.spec.model} was not loaded here (--no-check)")
        return ahead
    with steps.busy(f"loading {ahead.spec.model} in a worker on this machine"):
        result = load(ahead.spec.model)
    steps.say("\n".join(check_lines(result)))
    return ahead.loaded(result)


def _carry_out(engine: Engine, place: Location, planned: Plan, *, ask: bool, as_json: bool) -> None:
    """With JSON there is no confirmation: the plan would not be visible."""
    if planned.is_empty and planned.is_settled:
        return
    if ask and not planned.is_empty and (as_json or not confirm(planned, "Apply these changes?")):
        raise CliError("nothing was changed; without a terminal, confirm with --yes")
    begin = time.time()
    try:
        engine.apply(planned)
    except DeployFailed as error:
        explain(error, log_of(place), begin)
        raise


def _tell(place: Location, *, as_json: bool) -> None:
    answer = place.platform.status(place.cloud, place.name)
    if answer is not None:
        print_json(answer) if as_json else show_status(answer)


def by_digest(image: str, cloud: Cloud) -> tuple[str, int | None]:
    """A tag may mean another image tomorrow: what is deployed is named by its digest, where ECR can
    be asked for it.
    """
    host, slash, rest = image.partition("/")
    if "@sha256:" in image or not slash or ".dkr.ecr." not in host:
        return image, None
    repository, _, tag = rest.partition(":")
    with translated_errors(f"looking for the image {image}"):
        (found,) = cloud.client("ecr").describe_images(
            repositoryName=repository, imageIds=[{"imageTag": tag or "latest"}]
        )["imageDetails"]
    return f"{host}/{repository}@{found['imageDigest']}", found.get("imageSizeInBytes")


def _earlier(
    versions: Sequence[DeployedVersion], to: int | None, place: Location
) -> DeployedVersion:
    if not versions:
        raise _absent(place)
    if to is not None:
        found = next((each for each in versions if each.number == to), None)
        if found is None:
            raise UsageError(
                f"--version: there is no version {to}; there are"
                f" {', '.join(str(each.number) for each in versions)}"
            )
        return found
    if any(
        each.percent for each in versions
    ):  # a canary is the newest, and it is what is gone back from
        return next(each for each in versions if each.is_current)
    current = next(
        (place for place, each in enumerate(versions) if each.is_current), len(versions) - 1
    )
    if current == 0:
        raise CliError(
            f"{place.name} has no earlier version; `tsx deploy history` lists the existing ones"
        )
    return versions[current - 1]


def _absent(place: Location) -> CliError:
    where = (
        f"in {place.cloud.region}; check --region"
        if isinstance(place.cloud, Cloud)
        else f"on {place.cloud.region}"
    )
    return CliError(f"there is no deployment '{place.name}' {where}")
