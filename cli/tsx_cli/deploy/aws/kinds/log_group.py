"""CloudWatch log groups: for how many days their lines are kept."""

from __future__ import annotations

from collections.abc import Mapping

from tsx_cli.deploy.aws.logs import GROUPS
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.engine import OWNER
from tsx_cli.deploy.engine.facts import lasting
from tsx_cli.deploy.engine.kind import ResourceKind, only
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits
from tsx_cli.deploy.spec import DeploySpec

KIND = "AWS::Logs::LogGroup"


class LogGroup(ResourceKind):
    """The platform creates one at the first line that is written, and keeps its lines for ever:
    such a group is taken over.
    """

    traits = Traits(adopted=True)

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        doing = f"looking for the log group {name}"
        groups = cloud.listed(
            "logs", "describe_log_groups", "logGroups", doing, logGroupNamePrefix=name
        )
        found = next((each for each in groups if each["logGroupName"] == name), None)
        if found is None:
            return None
        arn = found["arn"].removesuffix(":*")
        tags = cloud.call("logs", "list_tags_for_resource", doing, resourceArn=arn)["tags"]
        days = only({"RetentionInDays": found.get("retentionInDays")}, ["RetentionInDays"])
        return Observed(name, days, tags, {"Arn": arn, "Ref": name})

    def create(self, cloud: Cloud, resource: Resource) -> None:
        """Without its retention, which the call after this one sets."""
        doing = f"creating the log group {resource.name}"
        cloud.call(
            "logs", "create_log_group", doing, logGroupName=resource.name, tags=dict(resource.tags)
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        days = resource.properties["RetentionInDays"]
        doing = f"keeping the lines of {resource.name} for {days} days"
        cloud.call(
            "logs", "put_retention_policy", doing, logGroupName=resource.name, retentionInDays=days
        )
        cloud.call(
            "logs",
            "tag_resource",
            doing,
            resourceArn=found.outputs["Arn"],
            tags=dict(resource.tags),
        )

    def delete(self, cloud: Cloud, found: Observed) -> None:
        cloud.call(
            "logs",
            "delete_log_group",
            f"deleting the log group {found.name}",
            logGroupName=found.name,
        )


def log_group(spec: DeploySpec, tags: Mapping[str, str], name: str = "") -> list[Resource]:
    """With the target's usual name, if no other is given.

    None where `log_retention` is 0, which leaves the group alone.
    """
    if spec.log_retention == 0:
        return []
    group = name or GROUPS[spec.target].format(spec.name)
    return [
        Resource(
            "LogGroup", KIND, group, {"RetentionInDays": spec.log_retention}, tags=lasting(tags)
        )
    ]


def own_log_group(cloud: Cloud, name: str, group_name: str, *, exists: bool) -> list[Resource]:
    """That of a deployment, where there is one.

    `exists`: the deployment does, and then a group without an owner is its own.
    """
    group = Resource("LogGroup", KIND, group_name, {})
    found = LogGroup().observe(cloud, group.name)
    return (
        [group]
        if found is not None and found.tags.get(OWNER, name if exists else "") == name
        else []
    )
