"""CloudWatch alarms: they send a bad version back, and tell people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_cli.deploy.aws.session import Cloud, translated_errors
from tsx_cli.deploy.engine.kind import only, tag_list, tag_map
from tsx_cli.deploy.engine.plan import Field
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits

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
        with translated_errors(f"looking for the alarm {name}"):
            client = cloud.client("cloudwatch")
            answer = client.describe_alarms(AlarmNames=[name], AlarmTypes=["MetricAlarm"])
            if not answer["MetricAlarms"]:
                return None
            found = answer["MetricAlarms"][0]
            tags = tag_map(client.list_tags_for_resource(ResourceARN=found["AlarmArn"])["Tags"])
        outputs = {"Arn": found["AlarmArn"], "Ref": name, "status": found.get("StateValue", "")}
        return Observed(name, only(found, PROPERTIES), tags, outputs)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"setting the alarm {resource.name}"):
            client = cloud.client("cloudwatch")
            client.put_metric_alarm(AlarmName=resource.name, Tags=tag_list(resource.tags), **resource.properties)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        self.create(cloud, resource)  # which leaves the tags of one that is there as they are
        with translated_errors(f"tagging the alarm {resource.name}"):
            cloud.client("cloudwatch").tag_resource(ResourceARN=found.outputs["Arn"], Tags=tag_list(resource.tags))

    def delete(self, cloud: Cloud, found: Observed) -> None:
        with translated_errors(f"removing the alarm {found.name}"):
            cloud.client("cloudwatch").delete_alarms(AlarmNames=[found.name])


def alarms_of(cloud: Cloud, name: str, dimension: str) -> list[str]:
    """Those that were made for a deployment, of either form: `tsx-NAME-...` by name, and they watch what the dimension calls NAME."""
    own = re.compile(re.escape(f"tsx-{name}-") + "[0-9a-z-]+-[0-9a-f]{4}")
    with translated_errors(f"listing the alarms of {name}"):
        pages = cloud.client("cloudwatch").get_paginator("describe_alarms").paginate(AlarmNamePrefix=f"tsx-{name}-")
        found = [each for page in pages for each in page["MetricAlarms"]]
    of = {"Name": dimension, "Value": name}
    return [each["AlarmName"] for each in found if own.fullmatch(each["AlarmName"]) and of in _dimensions(each)]


def alarm_state(cloud: Cloud, name: str) -> str:
    found = Alarm().observe(cloud, name)
    return "" if found is None else str(found.outputs["status"])


def _dimensions(alarm: Mapping[str, Any]) -> list[dict[str, str]]:
    several = [each["MetricStat"]["Metric"] for each in alarm.get("Metrics", []) if "MetricStat" in each]
    return [dimension for metric in (alarm, *several) for dimension in metric.get("Dimensions", [])]
