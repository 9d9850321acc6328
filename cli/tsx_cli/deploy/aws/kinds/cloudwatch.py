"""CloudWatch alarms, which roll back a bad version and notify people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, pick, tag_list, tag_map
from tsx_cli.deploy.engine.resources import Observed, Resource

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


class CloudWatchAlarm(ResourceKind):
    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        doing = f"looking for the alarm {name}"
        alarms = cloud.call(
            "cloudwatch", "describe_alarms", doing, AlarmNames=[name], AlarmTypes=["MetricAlarm"]
        )["MetricAlarms"]
        if not alarms:
            return None
        [alarm] = alarms
        tags = tag_map(
            cloud.call(
                "cloudwatch", "list_tags_for_resource", doing, ResourceARN=alarm["AlarmArn"]
            )["Tags"]
        )
        outputs = {"Arn": alarm["AlarmArn"], "Ref": name, "status": alarm.get("StateValue", "")}
        return Observed(name, pick(alarm, PROPERTIES), tags, outputs)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        arguments = {"AlarmName": resource.name, "Tags": tag_list(resource.tags)}
        cloud.call(
            "cloudwatch",
            "put_metric_alarm",
            f"setting the alarm {resource.name}",
            **arguments,
            **resource.properties,
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        # `put_metric_alarm` ignores the tags for an existing alarm, so they are set separately.
        self.create(cloud, resource)
        arguments = {"ResourceARN": observed.outputs["Arn"], "Tags": tag_list(resource.tags)}
        cloud.call("cloudwatch", "tag_resource", f"tagging the alarm {resource.name}", **arguments)

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        cloud.call(
            "cloudwatch",
            "delete_alarms",
            f"removing the alarm {observed.name}",
            AlarmNames=[observed.name],
        )


def alarms_of(cloud: Cloud, name: str, dimension: str) -> list[str]:
    """Return the names of the alarms that were created for a deployment.

    Such an alarm is called `tsx-NAME-...`, and NAME is the value of a dimension of its metric.
    """
    pattern = re.compile(re.escape(f"tsx-{name}-") + "[0-9a-z-]+-[0-9a-f]{4}")
    doing = f"listing the alarms of {name}"
    alarms = cloud.list_items(
        "cloudwatch", "describe_alarms", "MetricAlarms", doing, AlarmNamePrefix=f"tsx-{name}-"
    )
    wanted_dimension = {"Name": dimension, "Value": name}
    return [
        alarm["AlarmName"]
        for alarm in alarms
        if pattern.fullmatch(alarm["AlarmName"]) and wanted_dimension in _dimensions(alarm)
    ]


def alarm_states(cloud: Cloud, names: Iterable[str]) -> dict[str, str]:
    alarms = {name: CloudWatchAlarm().observe(cloud, name) for name in names}
    return {
        name: "" if alarm is None else str(alarm.outputs["status"])
        for name, alarm in alarms.items()
    }


def _dimensions(alarm: Mapping[str, Any]) -> list[dict[str, str]]:
    query_metrics = [
        query["MetricStat"]["Metric"] for query in alarm.get("Metrics", []) if "MetricStat" in query
    ]
    return [
        dimension
        for metric in (alarm, *query_metrics)
        for dimension in metric.get("Dimensions", [])
    ]
