"""Interruptions of `tsx deploy`, and AWS's side of its deployments as boto3 reports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import boto3
import pytest

from tsx_cli.deploy.engine import engine


@contextmanager
def interrupted_waits() -> Iterator[None]:
    """Interrupt a deployment, as Ctrl-C does, when it first waits for its platform."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tsx_cli.deploy.target.Engine", partial(engine.Engine, sleep=interrupt))
        yield


def sagemaker() -> Any:
    return boto3.client("sagemaker")


def endpoint_config(endpoint: str = "digits") -> Any:
    """Describe the configuration that an endpoint of SageMaker has now."""
    name = sagemaker().describe_endpoint(EndpointName=endpoint)["EndpointConfigName"]
    return sagemaker().describe_endpoint_config(EndpointConfigName=name)


def model_container(name: str) -> Any:
    """Describe the container of a SageMaker model."""
    return sagemaker().describe_model(ModelName=name)["PrimaryContainer"]


def sagemaker_resources() -> list[Any]:
    """List the models, configurations and endpoints that SageMaker has."""
    client = sagemaker()
    return [
        *client.list_models()["Models"],
        *client.list_endpoint_configs()["EndpointConfigs"],
        *client.list_endpoints()["Endpoints"],
    ]


def alarms() -> list[Any]:
    return list(boto3.client("cloudwatch").describe_alarms()["MetricAlarms"])


def scalable_targets(service: str) -> list[Any]:
    """List what Application Auto Scaling scales of one service."""
    client = boto3.client("application-autoscaling")
    return list(client.describe_scalable_targets(ServiceNamespace=service)["ScalableTargets"])


def scaling_policies(service: str) -> list[Any]:
    client = boto3.client("application-autoscaling")
    return list(client.describe_scaling_policies(ServiceNamespace=service)["ScalingPolicies"])
