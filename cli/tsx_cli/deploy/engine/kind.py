"""The interface of a kind of resource, and code that several kinds share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tsx_cli.common.failure import CliError
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits


class CloudError(CliError):
    """The platform refused or failed; `code` is its own name for the reason, if it has one."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ResourceKind(Protocol):
    """`cloud` is where its resources are: an AWS account, this machine's containers, a cluster."""

    traits: Traits = Traits()
    poll: float = 1.0  # seconds between two looks at one that is changing
    patience: float = 60.0  # seconds after which a change is given up as stuck
    create_patience: float = (
        60.0  # seconds in which it is tried again to create one, where `create` asks for that
    )

    def observe(self, cloud: Any, name: str) -> Observed | None:
        """What is there under this name; None where nothing is. Raises CloudError."""
        ...

    def create(self, cloud: Any, resource: Resource) -> str | None:
        """Begin to make it: `observe` says when it is ready. Its properties hold no Ref.

        A text says what has to be waited for before this is called again.
        """
        ...

    def update(
        self, cloud: Any, resource: Resource, found: Observed, changed: set[str]
    ) -> str | None:
        """Begin to make it what is wanted: as it is created, where one call writes all of it.

        `changed` are the names of the properties that differ, and `tags`. A text says how far it
        is, where this has to be called again once that has settled.
        """
        return self.create(cloud, resource)

    def delete(self, cloud: Any, found: Observed) -> str | None:
        """Begin to remove it: `observe` says when it is gone. A text says what has to be waited for
        before this is called again.
        """
        ...


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_map(tags: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}


def only(answer: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Of an answer, what a resource's properties may say."""
    return {key: answer[key] for key in keys if answer.get(key) is not None}
