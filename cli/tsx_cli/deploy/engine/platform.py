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

    number: int  # 1 is the oldest that is kept
    id: str  # its name on the platform
    made: datetime
    tags: Mapping[str, str]
    is_current: bool
    percent: float = 0.0  # of the requests, where it shares them with another

    @property
    def model(self) -> str:
        return self.tags.get("tsx:model", "")


class Platform(Protocol):
    """`cloud` is where its deployments are: an AWS account, this machine's containers, a
    cluster.
    """

    def wanted(self, cloud: Any, spec: DeploySpec, facts: Facts) -> list[Resource]: ...

    def belongings(self, cloud: Any, name: str, *, purge: bool = False) -> list[Resource]:
        """All of a deployment that is there, each with what it needs; with `purge` also files and
        images.
        """
        ...

    def obsolete(self, cloud: Any, spec: DeploySpec, wanted: Sequence[Resource]) -> list[Resource]:
        """Earlier versions beyond those that are kept."""
        ...

    def versions(self, cloud: Any, name: str) -> list[DeployedVersion]:
        """The oldest first."""
        ...

    def going_back(self, cloud: Any, name: str, version: DeployedVersion) -> list[Resource]:
        """What is wanted where an earlier version is."""
        ...

    def promoting(self, cloud: Any, name: str) -> list[Resource]:
        """What is wanted where a canary has won.

        Raises CliError where there is none, or where the platform ends it by itself.
        """
        ...

    def status(self, cloud: Any, name: str) -> dict[str, Any] | None:
        """What `tsx deploy status` shows; None where there is no such deployment."""
        ...

    def invoke(
        self, cloud: Any, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response: ...
