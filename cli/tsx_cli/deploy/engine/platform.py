"""The interface of a deployment target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from tsx_cli.common.client import Response
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.spec import DeploySpec


class DeployedVersion(NamedTuple):
    """An earlier deployment that `tsx deploy rollback` can return to."""

    number: int  # 1 is the oldest kept version
    id: str  # name on the platform
    made: datetime
    tags: Mapping[str, str]
    is_current: bool
    percent: float = 0.0  # percentage of the requests during a canary

    @property
    def model(self) -> str:
        return self.tags.get("tsx:model", "")


class Platform(Protocol):
    """The operations on the deployments to one target.

    `cloud` is their location: an AWS account, the containers of this machine, or a cluster.
    """

    def wanted_resources(self, cloud: Any, spec: DeploySpec, facts: Facts) -> list[Resource]: ...

    def existing_resources(self, cloud: Any, name: str, *, purge: bool = False) -> list[Resource]:
        """Return the existing resources of a deployment; with `purge`, files and images as well."""
        ...

    def obsolete_resources(
        self, cloud: Any, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        """Return the resources that are no longer wanted, including surplus earlier versions."""
        ...

    def versions(self, cloud: Any, name: str) -> list[DeployedVersion]:
        """Return the versions, oldest first."""
        ...

    def rollback_resources(self, cloud: Any, name: str, version: DeployedVersion) -> list[Resource]:
        """Return the resources of an earlier version."""
        ...

    def promotion_resources(self, cloud: Any, name: str) -> list[Resource]:
        """Return the resources that give a canary all requests.

        Raises:
            CliError: There is no canary, or the platform ends it by itself.
        """
        ...

    def status(self, cloud: Any, name: str) -> dict[str, Any] | None:
        """Return more fields of `tsx deploy status`, or None if there is no such deployment."""
        ...

    def invoke(
        self, cloud: Any, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response: ...
