"""CloudWatch alarms, which roll back a bad version and notify people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, only, tag_list, tag_map
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
        [found] = alarms
        tags = tag_map(
            cloud.call(
                "cloudwatch", "list_tags_for_resource", doing, ResourceARN=found["AlarmArn"]
            )["Tags"]
        )
        outputs = {"Arn": found["AlarmArn"], "Ref": name, "status": found.get("StateValue", "")}
        return Observed(name, only(found, PROPERTIES), tags, outputs)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        named = {"AlarmName": resource.name, "Tags": tag_list(resource.tags)}
        cloud.call(
            "cloudwatch",
            "put_metric_alarm",
            f"setting the alarm {resource.name}",
            **named,
            **resource.properties,
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        self.create(cloud, resource)  # which leaves the tags of one that is there as they are
        which = {"ResourceARN": found.outputs["Arn"], "Tags": tag_list(resource.tags)}
        cloud.call("cloudwatch", "tag_resource", f"tagging the alarm {resource.name}", **which)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        cloud.call(
            "cloudwatch",
            "delete_alarms",
            f"removing the alarm {found.name}",
            AlarmNames=[found.name],
        )


def alarms_of(cloud: Cloud, name: str, dimension: str) -> list[str]:
    """Those that were made for a deployment, of either form: `tsx-NAME-...` by name, and they watch
    what the dimension calls NAME.
    """
    own = re.compile(re.escape(f"tsx-{name}-") + "[0-9a-z-]+-[0-9a-f]{4}")
    doing = f"listing the alarms of {name}"
    found = cloud.listed(
        "cloudwatch", "describe_alarms", "MetricAlarms", doing, AlarmNamePrefix=f"tsx-{name}-"
    )
    of = {"Name": dimension, "Value": name}
    return [
        each["AlarmName"]
        for each in found
        if own.fullmatch(each["AlarmName"]) and of in _dimensions(each)
    ]


def alarm_states(cloud: Cloud, names: Iterable[str]) -> dict[str, str]:
    found = {name: CloudWatchAlarm().observe(cloud, name) for name in names}
    return {
        name: "" if alarm is None else str(alarm.outputs["status"]) for name, alarm in found.items()
    }


def _dimensions(alarm: Mapping[str, Any]) -> list[dict[str, str]]:
    several = [
        each["MetricStat"]["Metric"] for each in alarm.get("Metrics", []) if "MetricStat" in each
    ]
    return [dimension for metric in (alarm, *several) for dimension in metric.get("Dimensions", [])]
