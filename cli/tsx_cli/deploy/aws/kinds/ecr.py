"""ECR: repositories, and images built on this machine and pushed there."""

from __future__ import annotations

import base64
import re

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, tag_list, tag_map
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits, numbered
from tsx_cli.deploy.image.programs import Builder
from tsx_cli.deploy.image.recipe import Recipe

OWN = "tsx/"  # the beginning of the names of those that tsx deploy makes


class Repository(ResourceKind):
    """Whether it exists, and its tags; its other settings are left to the user."""

    traits = Traits(is_tagged=False, unseen=frozenset({"ImageScanningConfiguration"}))

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        answer, tags = (
            cloud.find(
                "ecr",
                "describe_repositories",
                f"looking for the repository {name}",
                repositoryNames=[name],
            ),
            {},
        )
        if answer is None:
            return None
        [found] = answer["repositories"]
        if name.startswith(OWN):  # the deploying identity may lack the permission for others
            doing = f"looking for the tags of the repository {name}"
            tags = tag_map(
                cloud.call(
                    "ecr", "list_tags_for_resource", doing, resourceArn=found["repositoryArn"]
                )["tags"]
            )
        return Observed(
            name,
            {},
            tags,
            {"Arn": found["repositoryArn"], "RepositoryUri": found["repositoryUri"], "Ref": name},
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        scanning = {
            "scanOnPush": bool(resource.properties["ImageScanningConfiguration"]["ScanOnPush"])
        }
        wanted = {
            "repositoryName": resource.name,
            "tags": tag_list(resource.tags),
            "imageScanningConfiguration": scanning,
        }
        cloud.call("ecr", "create_repository", f"creating the repository {resource.name}", **wanted)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        doing = f"deleting the repository {found.name} and its images"
        cloud.call("ecr", "delete_repository", doing, repositoryName=found.name, force=True)


class EcrImage(ResourceKind):
    """Its name is `HOST/REPOSITORY:TAG`, the tag made of all that is in it; what is deployed is the
    digest that ECR gives it.
    """

    traits = Traits(is_tagged=False)
    poll, patience = 2.0, 3600.0

    def __init__(
        self,
        builder: Builder | None = None,
        recipe: Recipe | None = None,
        machine: str | None = None,
    ) -> None:
        self._builder, self._recipe, self._machine = builder, recipe, machine

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        host, _, rest = name.partition("/")
        repository, _, tag = rest.rpartition(":")
        which = {"repositoryName": repository, "imageIds": [{"imageTag": tag}]}
        answer = cloud.find("ecr", "describe_images", f"looking for the image {name}", **which)
        if answer is None:
            return None
        [found] = answer["imageDetails"]
        digest = found["imageDigest"]
        outputs = {
            "Uri": f"{host}/{repository}@{digest}",
            "Digest": digest,
            "Bytes": found.get("imageSizeInBytes"),
        }
        return Observed(name, {}, outputs=outputs)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        """Raises CliError where nothing here can build."""
        assert self._builder is not None
        assert self._recipe is not None
        if not self._builder.is_here(resource.name):
            self._builder.build(self._recipe, resource.name, self._machine)
        given = cloud.call("ecr", "get_authorization_token", "asking ECR for a password")[
            "authorizationData"
        ][0]
        user, _, password = base64.b64decode(given["authorizationToken"]).decode().partition(":")
        self._builder.login(resource.name.partition("/")[0], user, password)
        self._builder.push(resource.name)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        repository, _, tag = found.name.partition("/")[2].rpartition(":")
        which = {"repositoryName": repository, "imageIds": [{"imageTag": tag}]}
        cloud.call("ecr", "batch_delete_image", f"deleting the image {found.name}", **which)


def images_of(cloud: Cloud, repository: str, tag: re.Pattern[str]) -> list[Resource]:
    """The images with such tags in `HOST/REPOSITORY`, also of versions that are not kept any
    more.
    """
    doing, name = f"listing the images of {repository}", repository.partition("/")[2]
    found = cloud.listed(
        "ecr", "list_images", "imageIds", doing, repositoryName=name, filter={"tagStatus": "TAGGED"}
    )
    tags = sorted(each["imageTag"] for each in found if tag.fullmatch(each["imageTag"]))
    return numbered("Image", "Tsx::ECR::Image", [f"{repository}:{tag}" for tag in tags])
