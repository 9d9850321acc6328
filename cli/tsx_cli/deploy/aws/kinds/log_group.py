"""Log groups of CloudWatch, and the number of days that they keep their lines."""

from __future__ import annotations

from collections.abc import Mapping

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.facts import owner_tags
from tsx_cli.deploy.engine.kind import ResourceKind, pick
from tsx_cli.deploy.engine.resources import OWNER, Observed, Resource, Traits
from tsx_cli.deploy.spec import DeploySpec

KIND = "AWS::Logs::LogGroup"


class LogGroup(ResourceKind):
    """A log group.

    The platform creates a missing one with the first line, and keeps the lines for ever. tsx takes
    over such a group.
    """

    traits = Traits(can_adopt=True)

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        doing = f"looking for the log group {name}"
        groups = cloud.list_items(
            "logs", "describe_log_groups", "logGroups", doing, logGroupNamePrefix=name
        )
        group = next((candidate for candidate in groups if candidate["logGroupName"] == name), None)
        if group is None:
            return None
        arn = group["arn"].removesuffix(":*")
        tags = cloud.call("logs", "list_tags_for_resource", doing, resourceArn=arn)["tags"]
        days = pick({"RetentionInDays": group.get("retentionInDays")}, ["RetentionInDays"])
        return Observed(name, days, tags, {"Arn": arn, "Ref": name})

    def create(self, cloud: Cloud, resource: Resource) -> None:
        """Create the group; a following `update` sets its retention."""
        doing = f"creating the log group {resource.name}"
        cloud.call(
            "logs", "create_log_group", doing, logGroupName=resource.name, tags=dict(resource.tags)
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        days = resource.properties["RetentionInDays"]
        doing = f"keeping the lines of {resource.name} for {days} days"
        cloud.call(
            "logs", "put_retention_policy", doing, logGroupName=resource.name, retentionInDays=days
        )
        cloud.call(
            "logs",
            "tag_resource",
            doing,
            resourceArn=observed.outputs["Arn"],
            tags=dict(resource.tags),
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        cloud.call(
            "logs",
            "delete_log_group",
            f"deleting the log group {observed.name}",
            logGroupName=observed.name,
        )


def log_group(spec: DeploySpec, tags: Mapping[str, str], name: str) -> list[Resource]:
    """Return the log group of a deployment, or nothing if `log_retention` is 0."""
    if spec.log_retention == 0:
        return []
    return [
        Resource(
            "LogGroup", KIND, name, {"RetentionInDays": spec.log_retention}, tags=owner_tags(tags)
        )
    ]


def own_log_group(cloud: Cloud, name: str, group_name: str, *, exists: bool) -> list[Resource]:
    """Return the log group of a deployment, if there is one.

    Args:
        cloud: The session.
        name: The name of the deployment.
        group_name: The name of the group.
        exists: Whether the deployment exists. A group without an owner then belongs to it.
    """
    group = Resource("LogGroup", KIND, group_name, {})
    observed = LogGroup().observe(cloud, group.name)
    return (
        [group]
        if observed is not None and observed.tags.get(OWNER, name if exists else "") == name
        else []
    )
