"""Repositories of ECR, and images that are built on this machine and pushed to them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, tag_list, tag_map
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits, numbered_resources
from tsx_cli.deploy.image.programs import Builder
from tsx_cli.deploy.image.recipe import Recipe

OWN_PREFIX = "tsx/"  # prefix of the repositories that tsx deploy creates


class Repository(ResourceKind):
    """A repository: only its existence and its tags are compared."""

    traits = Traits(is_tagged=False, unreported=frozenset({"ImageScanningConfiguration"}))

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        response = cloud.find(
            "ecr",
            "describe_repositories",
            f"looking for the repository {name}",
            repositoryNames=[name],
        )
        tags = {}
        if response is None:
            return None
        [repository] = response["repositories"]
        # The deploying identity may lack the permission to read the tags of other repositories.
        if name.startswith(OWN_PREFIX):
            doing = f"looking for the tags of the repository {name}"
            tags = tag_map(
                cloud.call(
                    "ecr", "list_tags_for_resource", doing, resourceArn=repository["repositoryArn"]
                )["tags"]
            )
        return Observed(
            name,
            {},
            tags,
            {
                "Arn": repository["repositoryArn"],
                "RepositoryUri": repository["repositoryUri"],
                "Ref": name,
            },
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        scanning = {
            "scanOnPush": bool(resource.properties["ImageScanningConfiguration"]["ScanOnPush"])
        }
        arguments = {
            "repositoryName": resource.name,
            "tags": tag_list(resource.tags),
            "imageScanningConfiguration": scanning,
        }
        cloud.call(
            "ecr", "create_repository", f"creating the repository {resource.name}", **arguments
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        doing = f"deleting the repository {observed.name} and its images"
        cloud.call("ecr", "delete_repository", doing, repositoryName=observed.name, force=True)


class EcrImage(ResourceKind):
    """An image; its name is `HOST/REPOSITORY:TAG`, and its tag is a hash of its content.

    The deployment uses the digest that ECR assigns.
    """

    traits = Traits(is_tagged=False)
    poll_interval_s, timeout_s = 2.0, 3600.0

    def __init__(
        self,
        builder: Builder | None = None,
        recipe: Recipe | None = None,
        machine: str | None = None,
    ) -> None:
        self._builder, self._recipe, self._machine = builder, recipe, machine

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        outputs = _find_image(cloud.find, name)
        return None if outputs is None else Observed(name, {}, outputs=outputs)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        """Build the image if this machine does not have it, and push it.

        Raises:
            CliError: No program on this machine can build.
        """
        assert self._builder is not None
        assert self._recipe is not None
        if not self._builder.is_local(resource.name):
            self._builder.build(self._recipe, resource.name, self._machine)
        authorization = cloud.call("ecr", "get_authorization_token", "asking ECR for a password")[
            "authorizationData"
        ][0]
        user, _, password = (
            base64.b64decode(authorization["authorizationToken"]).decode().partition(":")
        )
        self._builder.login(resource.name.partition("/")[0], user, password)
        self._builder.push(resource.name)

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        repository, _, tag = observed.name.partition("/")[2].rpartition(":")
        image_key = {"repositoryName": repository, "imageIds": [{"imageTag": tag}]}
        cloud.call("ecr", "batch_delete_image", f"deleting the image {observed.name}", **image_key)


def images_of(cloud: Cloud, repository: str, tag: re.Pattern[str]) -> list[Resource]:
    """Return the images with matching tags in `HOST/REPOSITORY`, of all versions ever deployed."""
    doing, name = f"listing the images of {repository}", repository.partition("/")[2]
    images = cloud.list_items(
        "ecr", "list_images", "imageIds", doing, repositoryName=name, filter={"tagStatus": "TAGGED"}
    )
    tags = sorted(image["imageTag"] for image in images if tag.fullmatch(image["imageTag"]))
    return numbered_resources("Image", "Tsx::ECR::Image", [f"{repository}:{tag}" for tag in tags])


def resolve_digest(image: str, cloud: Cloud) -> tuple[str, int | None]:
    """Return an image of ECR by its digest, because a tag may mean another image tomorrow."""
    host, slash, _ = image.partition("/")
    if "@sha256:" in image or not slash or ".dkr.ecr." not in host:
        return image, None
    outputs: Any = _find_image(cloud.call, image)
    return outputs["Uri"], outputs["Bytes"]


def _find_image(ask: Callable[..., Any], name: str) -> dict[str, Any] | None:
    """Return the outputs of an image, or None if `ask` returns None."""
    host, _, path = name.partition("/")
    repository, _, tag = path.partition(":")
    image_key = {"repositoryName": repository, "imageIds": [{"imageTag": tag or "latest"}]}
    response = ask("ecr", "describe_images", f"looking for the image {name}", **image_key)
    if response is None:
        return None
    [image] = response["imageDetails"]
    return {
        "Uri": f"{host}/{repository}@{image['imageDigest']}",
        "Bytes": image.get("imageSizeInBytes"),
    }
