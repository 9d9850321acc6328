"""The interface of a kind of resource, and code that several kinds share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tsx_cli.common.failure import CliError
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits


class CloudError(CliError):
    """The platform refused or failed; `code` is the platform's code for the reason, if any."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ResourceKind(Protocol):
    """The operations on resources of one kind: observe, create, update and delete.

    `cloud` is their location: an AWS account, the containers of this machine, or a cluster.
    """

    traits: Traits = Traits()
    poll_interval_s: float = 1.0  # seconds between observations of a changing resource
    timeout_s: float = 60.0  # seconds after which a change is given up
    create_timeout_s: float = 60.0  # seconds during which `create` is repeated if it returns a text

    def observe(self, cloud: Any, name: str) -> Observed | None:
        """Return the resource with this name, or None if there is none.

        Raises:
            CloudError: The platform refused or failed.
        """
        ...

    def create(self, cloud: Any, resource: Resource) -> str | None:
        """Begin to create a resource; `observe` tells when it is ready.

        Its properties contain no Ref.

        Returns:
            None, or a text about the condition to wait for before the next call of this method.
        """
        ...

    def update(
        self, cloud: Any, resource: Resource, observed: Observed, changed: set[str]
    ) -> str | None:
        """Begin to update a resource; by default, one call writes all of it.

        Args:
            cloud: The location of the resource.
            resource: The wanted state.
            observed: The current state.
            changed: The names of the properties that differ, and `tags`.

        Returns:
            None, or the progress if this method has to be called again after the change.
        """
        return self.create(cloud, resource)

    def delete(self, cloud: Any, observed: Observed) -> str | None:
        """Begin to delete a resource; `observe` tells when it is gone.

        Returns:
            None, or a text about the condition to wait for before the next call of this method.
        """
        ...


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_map(tags: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}


def pick(response: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the given keys of a response that have a value."""
    return {key: response[key] for key in keys if response.get(key) is not None}
