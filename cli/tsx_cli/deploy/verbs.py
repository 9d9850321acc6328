"""What `tsx deploy` does, verb by verb."""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tsx_archiver import Inspection
from tsx_cli.deploy.cloud import Cloud, told
from tsx_cli.deploy.emitting import write
from tsx_cli.deploy.engine import Engine
from tsx_cli.deploy.facts import Facts, look_at, requirements_of
from tsx_cli.deploy.kinds import KINDS
from tsx_cli.deploy.lambda_ import Lambda
from tsx_cli.deploy.local import this_machine
from tsx_cli.deploy.plan import Plan
from tsx_cli.deploy.platforms import Platform, Version
from tsx_cli.deploy.preflight import Preflight, load, look_ahead
from tsx_cli.deploy.render import check_kind, emit
from tsx_cli.deploy.sagemaker import SageMaker
from tsx_cli.deploy.show import Steps, confirm, plain, show_plan, show_status, show_versions
from tsx_cli.deploy.spec import DeploySpec, read_named, read_spec, read_target
from tsx_cli.failure import CliError, UsageError
from tsx_cli.output import print_json
from tsx_cli.packing import check_lines

PLATFORMS: Mapping[str, Platform] = {"sagemaker": SageMaker(), "lambda": Lambda()}
Given = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """A deployment by its name."""

    name: str
    platform: Platform
    cloud: Cloud

    def engine(self, steps: Steps | None = None) -> Engine:
        return Engine(self.cloud, KINDS) if steps is None else Engine(self.cloud, KINDS, on_event=steps)


def show_changes(file: Path | None, given: Given, *, check: bool, as_json: bool) -> bool:
    """Whether there are any."""
    spec = read_spec(file, given)
    place = _place(spec.name, spec.target, spec.region, spec.profile)
    planned, ahead = _planned(place.engine(), place, spec, check=check)
    if as_json:
        print_json(planned.as_json() | ahead.as_json())
    else:
        show_plan(planned)
        print("\n".join(ahead.lines(date.today())))
    return not planned.is_empty


def apply(file: Path | None, given: Given, *, ask: bool, check: bool, as_json: bool) -> None:
    spec = read_spec(file, given)
    place = _place(spec.name, spec.target, spec.region, spec.profile)
    with Steps(quiet=as_json) as steps:
        engine = place.engine(steps)
        planned, ahead = _planned(engine, place, spec, check=check)
        if not as_json:
            show_plan(planned)
        if not planned.is_empty:
            ahead = _tried(ahead, steps, check=check)
            if not as_json:
                print("\n".join(ahead.lines(date.today())))
        _carry_out(engine, planned, ask=ask)
    _tell(place, as_json=as_json)


def emit_files(file: Path | None, given: Given, kind: str, directory: Path) -> None:
    """Asks nothing of any platform, and writes nowhere else."""
    target = check_kind(kind, read_target(file, given))
    spec = read_spec(file, {**given, "target": target})
    inspection, sha256 = look_at(spec.model)
    manifest = inspection.manifest
    facts = Facts(spec.model, sha256, manifest.model_name, manifest.version, spec.image or "", "", "", requirements_of(inspection))
    with this_machine(spec.build.wheel) as local:
        emitted = emit(kind, spec, facts, local)
        for path in write(emitted, directory):
            print(f"wrote {path}")
    print(f"Next, in {directory}: {emitted.next_step}")


def show_state(file: Path | None, given: Given, *, as_json: bool) -> None:
    place = _named(file, given)
    told = place.platform.status(place.cloud, place.name)
    if told is None:
        raise _absent(place)
    print_json(told) if as_json else show_status(told)


def ask(file: Path | None, given: Given, body: str, content_type: str | None, accept: str | None) -> bytes:
    place = _named(file, given)
    content = sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
    kind = content_type or mimetypes.guess_type(body)[0] or "application/octet-stream"
    return place.platform.invoke(place.cloud, place.name, content, kind, accept)


def show_history(file: Path | None, given: Given, *, as_json: bool) -> None:
    place = _named(file, given)
    versions = place.platform.versions(place.cloud, place.name)
    if as_json:
        print_json([{**each._asdict(), "made": plain(each.made), "tags": dict(each.tags)} for each in versions])
    elif not versions:
        raise _absent(place)
    else:
        show_versions(versions)


def go_back(file: Path | None, given: Given, to: int | None, *, ask: bool, as_json: bool) -> None:
    place = _named(file, given)
    version = _earlier(place.platform.versions(place.cloud, place.name), to, place)
    with Steps(quiet=as_json) as steps:
        engine = place.engine(steps)
        planned = engine.plan(place.platform.going_back(place.cloud, place.name, version))
        if not as_json:
            show_plan(planned)
        _carry_out(engine, planned, ask=ask)
    _tell(place, as_json=as_json)


def promote(file: Path | None, given: Given, *, ask: bool, as_json: bool) -> None:
    place = _named(file, given)
    with Steps(quiet=as_json) as steps:
        engine = place.engine(steps)
        planned = engine.plan(place.platform.promoting(place.cloud, place.name))
        if not as_json:
            show_plan(planned)
        _carry_out(engine, planned, ask=ask)
    _tell(place, as_json=as_json)


def remove(file: Path | None, given: Given, *, purge: bool, ask: bool, as_json: bool) -> None:
    place = _named(file, given)
    with Steps(quiet=as_json) as steps:
        engine = place.engine(steps)
        planned = engine.plan([], place.platform.belongings(place.cloud, place.name, purge=purge))
        if planned.is_empty:
            raise _absent(place)
        if not as_json:
            show_plan(planned)
        if ask and (not sys.stdin.isatty() or input(f"Type '{place.name}' to remove all of this: ").strip() != place.name):
            raise CliError("nothing was removed; give --yes where nobody can be asked")
        engine.apply(planned)
    if as_json:
        print_json(planned.as_json())


def _planned(engine: Engine, place: Place, spec: DeploySpec, *, check: bool) -> tuple[Plan, Preflight]:
    inspection, sha256 = look_at(spec.model)
    facts, image_bytes = _facts(spec, inspection, sha256, place.cloud)
    wanted = place.platform.wanted(spec, facts)
    ahead = look_ahead(spec, inspection, place.cloud.region, image_bytes, strict=check)
    return engine.plan(wanted, place.platform.obsolete(place.cloud, spec, wanted)), ahead


def _tried(ahead: Preflight, steps: Steps, *, check: bool) -> Preflight:
    """What the archive says of itself, and that it loads."""
    if not check:
        steps.say(f"{ahead.spec.model} was not loaded here (--no-check)")
        return ahead
    with steps.busy(f"loading {ahead.spec.model} in a worker on this machine"):
        result = load(ahead.spec.model)
    steps.say("\n".join(check_lines(result)))
    return ahead.loaded(result)


def _carry_out(engine: Engine, planned: Plan, *, ask: bool) -> None:
    if planned.is_empty:
        return
    if ask and not confirm(planned, "Carry this out?"):
        raise CliError("nothing was changed; give --yes where nobody can be asked")
    engine.apply(planned)


def _tell(place: Place, *, as_json: bool) -> None:
    told = place.platform.status(place.cloud, place.name)
    if told is not None:
        print_json(told) if as_json else show_status(told)


def _facts(spec: DeploySpec, inspection: Inspection, sha256: str, cloud: Cloud) -> tuple[Facts, int | None]:
    """With the bytes of the image, where they are known."""
    manifest = inspection.manifest
    image, size = _by_digest(spec.image, cloud) if spec.image else ("", None)
    if not image:
        raise UsageError("image is not given: --image REPOSITORY:TAG, one that has tsx in it and is pushed")
    return Facts(spec.model, sha256, manifest.model_name, manifest.version, image, cloud.account, cloud.region), size


def _by_digest(image: str, cloud: Cloud) -> tuple[str, int | None]:
    """A tag may mean another image tomorrow: what is deployed is named by its digest, where ECR can be asked for it."""
    host, slash, rest = image.partition("/")
    if "@sha256:" in image or not slash or ".dkr.ecr." not in host:
        return image, None
    repository, _, tag = rest.partition(":")
    with told(f"looking for the image {image}"):
        found = cloud.client("ecr").describe_images(repositoryName=repository, imageIds=[{"imageTag": tag or "latest"}])
    return f"{host}/{repository}@{found['imageDetails'][0]['imageDigest']}", found["imageDetails"][0].get("imageSizeInBytes")


def _place(name: str, target: str, region: str | None, profile: str | None) -> Place:
    if target not in PLATFORMS:  # of tsx.toml, where no model is read that would look at it
        raise UsageError(f"target is '{target}'; there is {', '.join(PLATFORMS)}")
    return Place(name, PLATFORMS[target], Cloud(region, profile))


def _named(file: Path | None, given: Given) -> Place:
    found = read_named(file, given)
    return _place(found["name"], found["target"], found.get("region"), found.get("profile"))


def _earlier(versions: Sequence[Version], to: int | None, place: Place) -> Version:
    if not versions:
        raise _absent(place)
    if to is not None:
        found = next((each for each in versions if each.number == to), None)
        if found is None:
            raise UsageError(f"--to: there is no version {to}; there are {', '.join(str(each.number) for each in versions)}")
        return found
    if any(each.percent for each in versions):  # a canary is the newest, and it is what is gone back from
        return next(each for each in versions if each.is_current)
    current = next((place for place, each in enumerate(versions) if each.is_current), len(versions) - 1)
    if current == 0:
        raise CliError(f"{place.name} has no earlier version; `tsx deploy history` lists those that there are")
    return versions[current - 1]


def _absent(place: Place) -> CliError:
    return CliError(f"there is no deployment '{place.name}' in {place.cloud.region}; is the --region right?")
