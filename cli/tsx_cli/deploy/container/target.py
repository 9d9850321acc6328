"""The target `container`: docker or podman on this machine."""

from __future__ import annotations

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.container.deployment import IMAGE, KIND, ContainerPlatform
from tsx_cli.deploy.container.kinds import ContainerHost, DockerContainer, LocalImage
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.programs import Builder, find_engine
from tsx_cli.deploy.image.recipe import Recipe, tag_for_repository
from tsx_cli.deploy.preflight.outlook import DeploymentScaling
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.target import BuiltImage, DeployTarget, Location


class ContainerTarget(DeployTarget):
    name = "container"

    def locate(self, spec: DeploySpec) -> Location:
        program = find_engine(spec.container.engine)
        # The engine that runs the image also builds it.
        kinds = {KIND: DockerContainer(), IMAGE: LocalImage(Builder(program.name))}
        return Location(spec.name, self, ContainerHost(program), ContainerPlatform(), kinds)

    def scaling(self, spec: DeploySpec) -> DeploymentScaling:
        return DeploymentScaling(1)

    def check(self, spec: DeploySpec) -> None:
        if spec.canary is not None:
            raise UsageError("canary: the target container runs one version at a time. Remove it")
        super().check(spec)

    def built_image(self, cloud: ContainerHost, spec: DeploySpec, recipe: Recipe) -> BuiltImage:
        tag = tag_for_repository(spec.repository, spec.name, recipe.tag)
        name = f"{spec.repository or spec.name}:{tag}"
        kinds = {IMAGE: LocalImage(Builder(cloud.program.name), recipe)}
        return BuiltImage(name, [Resource("Image", IMAGE, name, {})], kinds)


TARGET = ContainerTarget()
