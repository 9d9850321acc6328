"""CloudWatch alarms: they send a bad version back, and tell people."""

from __future__ import annotations

from collections.abc import Sequence

from tsx_cli.deploy.cloud import Cloud, told
from tsx_cli.deploy.kinds.base import only, tag_list, tag_map
from tsx_cli.deploy.plan import Field
from tsx_cli.deploy.resources import Observed, Resource, Traits

PROPERTIES = (
    "AlarmDescription",
    "MetricName",
    "Namespace",
    "Statistic",
    "ExtendedStatistic",
    "Dimensions",
    "Metrics",
    "Period",
    "EvaluationPeriods",
    "DatapointsToAlarm",
    "Threshold",
    "ComparisonOperator",
    "TreatMissingData",
    "AlarmActions",
)


class Alarm:
    traits = Traits()
    poll, patience = 1.0, 60.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        with told(f"looking for the alarm {name}"):
            client = cloud.client("cloudwatch")
            answer = client.describe_alarms(AlarmNames=[name], AlarmTypes=["MetricAlarm"])
            if not answer["MetricAlarms"]:
                return None
            found = answer["MetricAlarms"][0]
            tags = tag_map(client.list_tags_for_resource(ResourceARN=found["AlarmArn"])["Tags"])
        outputs = {"Arn": found["AlarmArn"], "Ref": name, "status": found.get("StateValue", "")}
        return Observed(name, only(found, PROPERTIES), tags, outputs)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with told(f"setting the alarm {resource.name}"):
            client = cloud.client("cloudwatch")
            client.put_metric_alarm(AlarmName=resource.name, Tags=tag_list(resource.tags), **resource.properties)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        self.create(cloud, resource)  # which leaves the tags of one that is there as they are
        with told(f"tagging the alarm {resource.name}"):
            cloud.client("cloudwatch").tag_resource(ResourceARN=found.outputs["Arn"], Tags=tag_list(resource.tags))

    def delete(self, cloud: Cloud, found: Observed) -> None:
        with told(f"removing the alarm {found.name}"):
            cloud.client("cloudwatch").delete_alarms(AlarmNames=[found.name])
