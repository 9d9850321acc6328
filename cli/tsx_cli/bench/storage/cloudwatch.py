"""Sends the figures of a benchmark to CloudWatch by boto3, on request only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tsx_cli.bench.model.results import Results, Trial
from tsx_cli.bench.report import shown
from tsx_cli.common.failure import CliError, UsageError

AT_ONCE = 1000  # metrics that one call takes
MOST_CHARACTERS = 255  # of a namespace; a dimension's value may be longer
PREFIX = "cloudwatch:"


def read_target(text: str) -> str:
    """The namespace of `cloudwatch:NAMESPACE`. Raises UsageError."""
    name = text.removeprefix(PREFIX).strip()
    if not text.startswith(PREFIX) or not 0 < len(name) <= MOST_CHARACTERS or name.startswith(":"):
        raise UsageError(f"--upload: '{text}' is not a target; use cloudwatch:NAMESPACE, such as cloudwatch:models/bench")
    if name.startswith("AWS/"):
        raise UsageError("--upload: namespaces that begin with AWS/ belong to AWS; choose another name")
    return name


def metrics(results: Results) -> list[dict[str, Any]]:
    """Of the best load of each configuration, which are the dimensions; the winner once more, as `Best`, with the model alone."""
    data = []
    for index, trial in enumerate(results.trials):
        if trial.chosen is None:
            continue
        data += _of(trial, results, _dimensions(trial, results), "")
        if index == results.winner:
            data += _of(trial, results, {"Model": results.model.name}, "Best")
    return data


def _of(trial: Trial, results: Results, dimensions: Mapping[str, str], prefix: str) -> list[dict[str, Any]]:
    point = trial.chosen
    assert point is not None
    values = [
        ("Throughput", point.throughput.value, "Count/Second"),
        *((f"Latency{shown.word(name).title()}", value, "Milliseconds") for name, value in point.latency.model_dump().items()),
        ("ErrorRate", 100 * point.error_rate, "Percent"),
    ]
    if trial.usage:
        values.append(("CPU", sum(each.cpu for each in trial.usage) / len(trial.usage), "Count"))
        values.append(("Memory", max(each.memory_mib for each in trial.usage), "Megabytes"))
    shares = [each.gpu for each in trial.usage if each.gpu is not None]
    if shares:
        values.append(("GPU", 100 * sum(shares) / len(shares), "Percent"))
    at = datetime.fromisoformat(results.ended or results.started)
    named = [{"Name": name, "Value": value} for name, value in dimensions.items()]
    return [
        {"MetricName": prefix + name, "Dimensions": named, "Timestamp": at, "Unit": unit, "Value": float(value)}
        for name, value, unit in values
    ]


def _dimensions(trial: Trial, results: Results) -> dict[str, str]:
    """What a dashboard chooses by; what the configuration leaves open is no dimension."""
    data = {"Model": results.model.name}
    if results.against is not None:
        data["Server"] = results.against
    if not trial.configuration:
        return data
    how = trial.how()
    data |= {"Device": how.device, "Workers": str(how.workers), "BatchSize": str(how.batch_size), "Precision": how.precision}
    if how.threads is not None:
        data["Threads"] = str(how.threads)
    if how.compiled is not None:
        data["Compiled"] = "on" if how.compiled else "off"
    if how.form is not None:
        data["Form"] = how.form
    return data


def upload(results: Results, namespace: str) -> int:
    """How many figures were sent; where to is the environment's, as with every AWS tool. Raises CliError."""
    import boto3  # here, as it is slow to import and only this needs it
    from botocore.exceptions import BotoCoreError, ClientError

    data = metrics(results)
    try:
        client = boto3.client("cloudwatch")
        for start in range(0, len(data), AT_ONCE):
            client.put_metric_data(Namespace=namespace, MetricData=data[start : start + AT_ONCE])
    except (BotoCoreError, ClientError) as error:
        reason = str(error).rstrip(".")
        raise CliError(
            f"CloudWatch accepted no figures: {reason}. Check AWS_REGION and the credentials; everything else is complete"
        ) from error
    return len(data)
