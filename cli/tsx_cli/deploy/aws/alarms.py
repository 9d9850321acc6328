"""The alarms of `--alarm`: `5xx>0`, `p95>300ms`, or the name of an existing alarm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.resources import Ref, Resource, digest

_BOUND = re.compile(r"(5xx|p\d{1,2}(?:\.\d+)?)\s*>\s*(\d+(?:\.\d+)?)\s*(ms|s)?", re.IGNORECASE)
_NAME = re.compile(r"[^>]{1,255}")


class AlarmMetrics(NamedTuple):
    """The CloudWatch metrics in which a target counts failures and times."""

    namespace: str
    errors: str
    latency: str
    per_millisecond: float  # units of the latency metric in a millisecond
    dimensions: Mapping[str, str | Ref]
    # The metric and the dimensions of error responses, if `errors` counts only failed invocations.
    error_responses: tuple[str, Mapping[str, str]] | None = None


class AlarmBound(NamedTuple):
    text: str
    metric: str  # `5xx`, or a percentile of the latency, such as `p95`
    limit: float  # responses in a minute, or milliseconds


class Alarms(NamedTuple):
    """The alarms that watch a new version."""

    resources: list[Resource]  # alarms to create
    names: list[str]  # all alarms, including existing ones


def create_alarms(
    texts: Sequence[str],
    metrics: AlarmMetrics,
    prefix: str,
    tags: Mapping[str, str],
    needs: tuple[str, ...] = (),
) -> Alarms:
    """Return the alarms that the values of `--alarm` request.

    Raises:
        UsageError: A value is neither a bound nor a name.
    """
    resources: list[Resource] = []
    names: list[str] = []
    for text in texts:
        bound = parse_bound(text)
        if bound is None:
            if not _NAME.fullmatch(text):
                raise UsageError(
                    f"--alarm: '{text}' is not an alarm; write 5xx>0, p95>300ms, or the name of an"
                    " existing alarm"
                )
            names.append(text)
            continue
        properties = _properties(bound, metrics)
        name = (
            f"{prefix}-{re.sub('[^a-z0-9]+', '-', text.lower()).strip('-')}-{digest(properties, 4)}"
        )
        resources.append(
            Resource(
                f"Alarm{len(resources) + 1}",
                "AWS::CloudWatch::Alarm",
                name,
                properties,
                needs,
                tags,
            )
        )
        names.append(name)
    return Alarms(resources, names)


def parse_bound(text: str) -> AlarmBound | None:
    """Parse a bound; return None for other text, such as the name of an alarm.

    Raises:
        UsageError: The text is a bound with a wrong unit or percentile.
    """
    bound = _BOUND.fullmatch(text.strip())
    if bound is None:
        return None
    metric, number, unit = bound[1].lower(), float(bound[2]), bound[3]
    if metric == "5xx":
        if unit:
            raise UsageError(
                f"--alarm: 5xx is a number of answers in a minute and has no unit: 5xx>{bound[2]}"
            )
        return AlarmBound(bound[0], metric, number)
    if not unit or not 0 < float(metric[1:]) <= 100:
        raise UsageError(f"--alarm: '{bound[0]}' is not a bound of a latency; write p95>300ms")
    return AlarmBound(bound[0], metric, number * (1000 if unit.lower() == "s" else 1))


def _properties(bound: AlarmBound, metrics: AlarmMetrics) -> dict[str, Any]:
    if bound.metric == "5xx":
        metric_properties = {**_errors(metrics), "Threshold": bound.limit}
    else:
        metric_properties = {
            **_metric(metrics, metrics.latency, metrics.dimensions),
            "ExtendedStatistic": bound.metric,
            "Period": 60,
            "Threshold": bound.limit * metrics.per_millisecond,
        }
    return {
        "AlarmDescription": f"{bound.text} of what tsx deploy made",
        **metric_properties,
        "EvaluationPeriods": 1,
        "ComparisonOperator": "GreaterThanThreshold",
        "TreatMissingData": "notBreaching",
    }


def _errors(metrics: AlarmMetrics) -> dict[str, Any]:
    failed_metric = _metric(metrics, metrics.errors, metrics.dimensions)
    if metrics.error_responses is None:
        return {**failed_metric, "Statistic": "Sum", "Period": 60}
    metrics_by_id = {
        "failed": failed_metric,
        "answered": _metric(metrics, *metrics.error_responses),
    }
    queries = [
        {
            "Id": id,
            "MetricStat": {"Metric": metric, "Period": 60, "Stat": "Sum"},
            "ReturnData": False,
        }
        for id, metric in metrics_by_id.items()
    ]
    maximum = {
        "Id": "either",
        "Expression": "MAX([FILL(failed, 0), FILL(answered, 0)])",
        "Label": "failures and 5xx answers",
    }
    return {"Metrics": [*queries, {**maximum, "ReturnData": True}]}


def _metric(
    metrics: AlarmMetrics, name: str, dimensions: Mapping[str, str | Ref]
) -> dict[str, Any]:
    dimension_list = [{"Name": key, "Value": value} for key, value in dimensions.items()]
    return {"Namespace": metrics.namespace, "MetricName": name, "Dimensions": dimension_list}
