"""The interface of a deployment target, and the location of a deployment."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.engine import Engine, OnEvent
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.platform import Platform
from tsx_cli.deploy.engine.resources import Ref, Resource
from tsx_cli.deploy.image.recipe import Recipe
from tsx_cli.deploy.preflight.limits import GIB, MIB, TargetProfile, set_limit
from tsx_cli.deploy.preflight.outlook import DeploymentScaling
from tsx_cli.deploy.spec import DeploySpec


class BuiltImage(NamedTuple):
    """The image of a deployment without `--image`, which is built on this machine."""

    image: str | Ref
    resources: list[Resource]
    kinds: Mapping[str, ResourceKind]


@dataclass(frozen=True)
class Location:
    """The location of a deployment; `cloud` is passed to the methods of kinds and platform."""

    name: str
    target: DeployTarget
    cloud: Any
    platform: Platform
    kinds: Mapping[str, ResourceKind]
    repository: str | None = None  # the given repository of built images, if any
    log_name: str = ""  # the deployment's log group in CloudWatch, if any

    def engine(self, on_event: OnEvent = Engine.on_event) -> Engine:
        return Engine(self.cloud, self.kinds, on_event=on_event)


class DeployTarget(ABC):
    """A kind of platform that `tsx deploy` deploys to; `cloud` is that of the location."""

    name: str
    can_create_role = False

    @abstractmethod
    def locate(self, spec: DeploySpec) -> Location:
        """Return the location of a deployment; the specification may have no other keys.

        Raises:
            CliError: A program or a package is missing.
        """

    def scaling(self, spec: DeploySpec) -> DeploymentScaling:
        """Return the scaling of a deployment; by default, there are no instances to scale."""
        return DeploymentScaling()

    def check(self, spec: DeploySpec) -> None:
        """Check a specification when it is read.

        Raises:
            UsageError: The target does not have what a key asks for.
        """
        if spec.create_role and not self.can_create_role:
            raise UsageError(
                "create_role: SageMaker and Lambda have that, and the target"
                f" {self.name} does not. Remove it"
            )

    def check_files(self, spec: DeploySpec) -> None:  # noqa: B027  # Most have nothing to check.
        """Check a specification before files are written, without calling the platform."""

    def complete(self, cloud: Any, spec: DeploySpec) -> DeploySpec:
        """Complete a specification with the settings of existing resources."""
        return spec

    def profile(self, spec: DeploySpec) -> TargetProfile:
        """Return the target with the limits that the deployment sets."""
        settings: Any = getattr(spec, self.name)
        limits = set_limit("start", settings.startup_timeout, f"{self.name}.startup_timeout")
        if settings.memory:
            limits |= set_limit("memory", _bytes(settings.memory), f"{self.name}.memory")
        return TargetProfile(self.name, limits, spec.env, spec.device)

    def pin_image(self, cloud: Any, facts: Facts) -> tuple[Facts, int | None]:
        """Return the facts with the given image by its digest, and its size in bytes if known."""
        return facts, None

    def built_image(self, cloud: Any, spec: DeploySpec, recipe: Recipe) -> BuiltImage:
        """Return the image that has to be built; Ray is not asked, since it builds none.

        Raises:
            UsageError: The target cannot pull from the repository.
        """
        raise NotImplementedError

    def leftovers(self, location: Location, existing: Sequence[Resource]) -> list[Resource]:
        """Return what remains after the `existing` resources are removed, for `--purge`."""
        return []


def _bytes(text: str) -> int:
    """Parse a size as docker (`4g`, `512m`) or Kubernetes (`4Gi`, `512Mi`) writes it."""
    number = re.sub("[a-z]+", "", text, flags=re.IGNORECASE)
    return int(number) * (GIB if "g" in text.lower() else MIB)
