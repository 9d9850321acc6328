"""The image of a deployment without `--image`: built here and pushed to the target's registry, as
resources of the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.kinds import ecr
from tsx_cli.deploy.container import kinds as container_kinds
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.resources import Ref, Resource
from tsx_cli.deploy.image.programs import Builder
from tsx_cli.deploy.image.recipe import Local, Recipe, recipe, tag_in
from tsx_cli.deploy.spec import DeploySpec

ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?")


class Images(NamedTuple):
    image: str | Ref
    resources: list[Resource]
    kinds: Mapping[str, ResourceKind]
    notes: Sequence[str]


def images(spec: DeploySpec, facts: Facts, local: Local, cloud: Any) -> Images:
    """Raises UsageError where it is not said where it has to go."""
    made = recipe(spec, facts, local)
    tag = tag_in(spec.repository, spec.name, made.tag)
    if spec.target == "container":
        name = f"{spec.repository or spec.name}:{tag}"
        kind = container_kinds.LocalImage(Builder(cloud.program.name), made)
        return Images(
            name,
            [Resource("Image", "Tsx::Container::Image", name, {})],
            {"Tsx::Container::Image": kind},
            made.notes,
        )
    if spec.target == "kubernetes":
        name = f"{spec.repository}:{made.tag}"
        pushed = container_kinds.PushedImage(Builder(spec.build.tool), made)
        image = Resource("Image", "Tsx::Registry::Image", name, {})
        return Images(
            Ref("Image", "Uri", made.tag), [image], {"Tsx::Registry::Image": pushed}, made.notes
        )
    return _in_ecr(
        spec,
        facts,
        made._replace(tag=tag),
        ecr.EcrImage(Builder(spec.build.tool), made, made.machine),
    )


def own_repository(target: str, name: str) -> str:
    """Of one deployment, so that it can go with it."""
    return f"tsx/{target}/{name}"


def _in_ecr(spec: DeploySpec, facts: Facts, made: Recipe, kind: ecr.EcrImage) -> Images:
    registry = f"{facts.account}.dkr.ecr.{facts.region}.amazonaws.com{'.cn' if facts.region.startswith('cn-') else ''}"
    whole = spec.repository or f"{registry}/{own_repository(spec.target, spec.name)}"
    host, _, path = whole.partition("/")
    if not ECR.fullmatch(host) or not path:
        raise UsageError(
            f"repository is {whole}; {spec.target} takes images from ECR only:"
            " ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME"
        )
    tags = (
        {"tsx:name": spec.name, "tsx:target": spec.target} if spec.repository is None else {}
    )  # one that is named may be shared
    scanned = {"ImageScanningConfiguration": {"ScanOnPush": True}}
    repository = Resource("Repository", "AWS::ECR::Repository", path, scanned, tags=tags)
    image = Resource("Image", "Tsx::ECR::Image", f"{whole}:{made.tag}", {}, ("Repository",))
    return Images(
        Ref("Image", "Uri", made.tag), [repository, image], {"Tsx::ECR::Image": kind}, made.notes
    )
