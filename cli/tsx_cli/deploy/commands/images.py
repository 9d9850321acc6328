"""The image of a deployment without `--image`: it is built here and pushed to a registry."""

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
from tsx_cli.deploy.image.recipe import Local, Recipe, recipe, tag_for_repository
from tsx_cli.deploy.spec import DeploySpec

ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?")


class Images(NamedTuple):
    image: str | Ref
    resources: list[Resource]
    kinds: Mapping[str, ResourceKind]
    notes: Sequence[str]


def images(spec: DeploySpec, facts: Facts, local: Local, cloud: Any) -> Images:
    """Return the image that has to be built.

    Raises:
        UsageError: The target cannot pull from the repository.
    """
    image_recipe = recipe(spec, facts, local)
    tag = tag_for_repository(spec.repository, spec.name, image_recipe.tag)
    if spec.target == "container":
        name = f"{spec.repository or spec.name}:{tag}"
        kind = container_kinds.LocalImage(Builder(cloud.program.name), image_recipe)
        return Images(
            name,
            [Resource("Image", "Tsx::Container::Image", name, {})],
            {"Tsx::Container::Image": kind},
            image_recipe.notes,
        )
    if spec.target == "kubernetes":
        name = f"{spec.repository}:{image_recipe.tag}"
        pushed = container_kinds.PushedImage(Builder(spec.build.tool), image_recipe)
        image = Resource("Image", "Tsx::Registry::Image", name, {})
        return Images(
            Ref("Image", "Uri", image_recipe.tag),
            [image],
            {"Tsx::Registry::Image": pushed},
            image_recipe.notes,
        )
    return _ecr_images(
        spec,
        facts,
        image_recipe._replace(tag=tag),
        ecr.EcrImage(Builder(spec.build.tool), image_recipe, image_recipe.machine),
    )


def own_repository(target: str, name: str) -> str:
    """Return the name of a deployment's own repository, which is removed with the deployment."""
    return f"tsx/{target}/{name}"


def _ecr_images(spec: DeploySpec, facts: Facts, image_recipe: Recipe, kind: ecr.EcrImage) -> Images:
    suffix = ".cn" if facts.region.startswith("cn-") else ""
    registry = f"{facts.account}.dkr.ecr.{facts.region}.amazonaws.com{suffix}"
    repository_name = spec.repository or f"{registry}/{own_repository(spec.target, spec.name)}"
    host, _, path = repository_name.partition("/")
    if not ECR.fullmatch(host) or not path:
        raise UsageError(
            f"repository is {repository_name}; {spec.target} takes images from ECR only:"
            " ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME"
        )
    # A repository that the specification names has no owner, because deployments may share it.
    tags = {"tsx:name": spec.name, "tsx:target": spec.target} if spec.repository is None else {}
    scanning = {"ImageScanningConfiguration": {"ScanOnPush": True}}
    repository = Resource("Repository", "AWS::ECR::Repository", path, scanning, tags=tags)
    image = Resource(
        "Image", "Tsx::ECR::Image", f"{repository_name}:{image_recipe.tag}", {}, ("Repository",)
    )
    return Images(
        Ref("Image", "Uri", image_recipe.tag),
        [repository, image],
        {"Tsx::ECR::Image": kind},
        image_recipe.notes,
    )
