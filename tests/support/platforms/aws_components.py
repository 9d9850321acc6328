"""Inference components, which moto has not: their operations of SageMaker, and Application Auto
Scaling's reaction to an alarm.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateInferenceComponent.html and its
neighbours;
https://docs.aws.amazon.com/sagemaker/latest/dg/endpoint-auto-scaling-zero-instances.html. A
component is on an endpoint that is in service and whose variant names no model; it cannot be
changed or deleted while it starts or changes; a failed update restores what was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

import boto3
import pytest

DIMENSION = "sagemaker:inference-component:DesiredCopyCount"
# Of an endpoint's configuration, and dropped by moto.
KEPT = ("ExecutionRoleArn", "VpcConfig", "EnableNetworkIsolation")


@dataclass
class FakeComponent:
    name: str
    arn: str
    endpoint: str
    variant: str
    specification: dict[str, Any]
    desired: int
    tags: list[dict[str, str]]
    current: int = 0
    status: str = "Creating"
    reason: str = ""
    left: int = 0  # looks for which it goes on changing
    coming: dict[str, Any] | None = None  # the specification that an update brings
    coming_copies: int = 0
    deployment: dict[str, Any] | None = None  # how the last update was made
    made: datetime = field(default_factory=lambda: datetime.now(timezone.utc))


def patch_components(patch: pytest.MonkeyPatch, account: Any) -> None:
    from moto.applicationautoscaling import models as autoscaling
    from moto.applicationautoscaling import responses
    from moto.sagemaker.models import SageMakerModelBackend
    from moto.sagemaker.responses import SageMakerResponse

    operations: dict[str, Callable[[Any, Any], Any]] = {
        "create_inference_component": _create,
        "describe_inference_component": _describe,
        "list_inference_components": _list,
        "update_inference_component": _update,
        "update_inference_component_runtime_config": _set_copies,
        "delete_inference_component": _delete,
    }
    for name, operation in operations.items():
        patch.setattr(SageMakerResponse, name, _method(operation, account), raising=False)
    real = SageMakerModelBackend._get_resource_from_arn
    patch.setattr(
        SageMakerModelBackend,
        "_get_resource_from_arn",
        lambda self, arn: _of_arn(account, arn) or real(self, arn),
    )
    patch.setattr(SageMakerModelBackend, "add_tags", _tag)
    made = SageMakerResponse.create_endpoint_config
    patch.setattr(SageMakerResponse, "create_endpoint_config", lambda self: _kept(self, made(self)))
    checked = SageMakerModelBackend.validate_production_variants
    named = "ModelName"
    patch.setattr(
        SageMakerModelBackend,
        "validate_production_variants",
        lambda self, all: checked(self, [each for each in all if named in each]),
    )
    known = {each.name: each.value for each in autoscaling.ScalableDimensionValueSet}
    for module in (autoscaling, responses):
        patch.setattr(
            module,
            "ScalableDimensionValueSet",
            Enum("Dimensions", {**known, "COMPONENT": DIMENSION}),
        )


def _method(operation: Callable[[Any, Any], Any], account: Any) -> Callable[[Any], Any]:
    return lambda response: operation(account, response)


def _kept(response: Any, answer: Any) -> Any:
    config = response.sagemaker_backend.endpoint_configs[response._get_param("EndpointConfigName")]
    for name, attribute in zip(
        KEPT, ("execution_role_arn", "vpc_config", "enable_network_isolation"), strict=True
    ):
        setattr(config, attribute, response._get_param(name))
    return answer


def _tag(backend: Any, arn: str, tags: list[dict[str, str]]) -> list[dict[str, str]]:
    """One value for each key, which moto does not see to."""
    resource = backend._get_resource_from_arn(arn)
    merged = {tag["Key"]: tag["Value"] for tag in (*resource.tags, *tags)}
    resource.tags = [{"Key": key, "Value": value} for key, value in merged.items()]
    return list(resource.tags)


def _of_arn(account: Any, arn: str) -> Any:
    return next((each for each in account.course.components.values() if each.arn == arn), None)


def _refuse(message: str) -> Exception:
    from moto.sagemaker.exceptions import ValidationError

    return ValidationError(message)


def _found(account: Any, response: Any) -> FakeComponent:
    name = response._get_param("InferenceComponentName")
    try:
        found: FakeComponent = account.course.components[name]
    except KeyError:
        raise _refuse(f"Could not find inference component '{name}'.") from None
    return found


def _settled(account: Any, response: Any, doing: str) -> FakeComponent:
    found = _found(account, response)
    if found.status in ("Creating", "Updating", "Deleting"):
        raise _refuse(f"Cannot {doing} inference component {found.name} in {found.status} state.")
    return found


def _answer(answer: dict[str, Any]) -> Any:
    from moto.core.responses import ActionResult

    return ActionResult(answer)


def _create(account: Any, response: Any) -> Any:
    course, backend, get = account.course, response.sagemaker_backend, response._get_param
    name, endpoint, specification = (
        get("InferenceComponentName"),
        get("EndpointName"),
        get("Specification"),
    )
    if name in course.components:
        raise _refuse(f"Cannot create already existing inference component {name}.")
    status = backend.describe_endpoint(endpoint)["EndpointStatus"]
    if status != "InService":
        raise _refuse(
            f"Cannot create inference component on endpoint {endpoint} in {status} state."
        )
    config = backend.describe_endpoint_config(backend.endpoints[endpoint].endpoint_config_name)
    if (
        any("ModelName" in each for each in config["ProductionVariants"])
        or "ExecutionRoleArn" not in config
    ):
        raise _refuse(f"Endpoint {endpoint} does not take inference components.")
    backend.describe_model(specification["ModelName"])
    assert specification["ComputeResourceRequirements"]["MinMemoryRequiredInMb"] >= 128
    arn = f"arn:aws:sagemaker:eu-central-1:123456789012:inference-component/{name}"
    copies = get("RuntimeConfig")["CopyCount"]
    made = FakeComponent(
        name,
        arn,
        endpoint,
        get("VariantName"),
        specification,
        copies,
        get("Tags") or [],
        left=course.looks,
    )
    course.components[name] = made
    course.calls.append(f"CreateInferenceComponent {name}")
    return _answer({"InferenceComponentArn": arn})


def _describe(account: Any, response: Any) -> Any:
    found = _found(account, response)
    if found.left > 0:
        found.left -= 1
    elif found.status == "Deleting":
        del account.course.components[found.name]
        raise _refuse(f"Could not find inference component '{found.name}'.")
    elif found.status in ("Creating", "Updating"):
        _settle(account, response, found)
    return _answer(
        {
            "InferenceComponentName": found.name,
            "InferenceComponentArn": found.arn,
            "EndpointName": found.endpoint,
            "EndpointArn": f"arn:aws:sagemaker:eu-central-1:123456789012:endpoint/{found.endpoint}",
            "VariantName": found.variant,
            "FailureReason": found.reason or None,
            "Specification": found.specification,
            "RuntimeConfig": {"DesiredCopyCount": found.desired, "CurrentCopyCount": found.current},
            "CreationTime": found.made,
            "LastModifiedTime": found.made,
            "InferenceComponentStatus": found.status,
        }
    )


def _settle(account: Any, response: Any, found: FakeComponent) -> None:
    failure, is_new = account.course.failure, found.status == "Creating"
    found.status = "Failed" if failure and is_new else "InService"
    found.reason = failure.strip()
    if not failure:
        found.desired = found.coming_copies if found.coming else found.desired
        found.specification, found.current = found.coming or found.specification, found.desired
    found.coming = None
    _place(account, response, found.endpoint)


def _place(account: Any, response: Any, name: str) -> None:
    """As many instances as copies need: one for all, within what the configuration allows."""
    endpoint = response.sagemaker_backend.endpoints.get(name)
    if endpoint is not None:
        copies = sum(
            each.current for each in account.course.components.values() if each.endpoint == name
        )
        config = response.sagemaker_backend.describe_endpoint_config(endpoint.endpoint_config_name)
        least = config["ProductionVariants"][0]["ManagedInstanceScaling"]["MinInstanceCount"]
        endpoint.production_variants[0]["CurrentInstanceCount"] = max(least, min(1, copies))


def _list(account: Any, response: Any) -> Any:
    endpoint = response._get_param("EndpointNameEquals")
    found = [
        each for each in account.course.components.values() if endpoint in (None, each.endpoint)
    ]
    keys = {
        "InferenceComponentName": "name",
        "InferenceComponentArn": "arn",
        "EndpointName": "endpoint",
        "VariantName": "variant",
    }
    return _answer(
        {
            "InferenceComponents": [
                {key: getattr(each, value) for key, value in keys.items()} for each in found
            ]
        }
    )


def _update(account: Any, response: Any) -> Any:
    found = _settled(account, response, "update")
    found.coming, found.deployment = (
        response._get_param("Specification"),
        response._get_param("DeploymentConfig"),
    )
    found.coming_copies = (response._get_param("RuntimeConfig") or {"CopyCount": found.desired})[
        "CopyCount"
    ]
    response.sagemaker_backend.describe_model(found.coming["ModelName"])
    found.status, found.left = "Updating", account.course.looks
    account.course.calls.append(f"UpdateInferenceComponent {found.name}")
    return _answer({"InferenceComponentArn": found.arn})


def _set_copies(account: Any, response: Any) -> Any:
    found = _settled(account, response, "update")
    found.desired = response._get_param("DesiredRuntimeConfig")["CopyCount"]
    found.status, found.left = "Updating", account.course.looks
    account.course.calls.append(
        f"UpdateInferenceComponentRuntimeConfig {found.name} {found.desired}"
    )
    return _answer({"InferenceComponentArn": found.arn})


def _delete(account: Any, response: Any) -> Any:
    found = _settled(account, response, "delete")
    found.status, found.left = "Deleting", account.course.looks
    account.course.calls.append(f"DeleteInferenceComponent {found.name}")
    return _answer({})


def scale(name: str, copies: int) -> None:
    """What Application Auto Scaling does to a component, within the bounds of its scalable
    target.
    """
    which = {
        "ServiceNamespace": "sagemaker",
        "ResourceIds": [f"inference-component/{name}"],
        "ScalableDimension": DIMENSION,
    }
    [target] = boto3.client("application-autoscaling").describe_scalable_targets(**which)[
        "ScalableTargets"
    ]
    allowed = max(target["MinCapacity"], min(copies, target["MaxCapacity"]))
    client = boto3.client("sagemaker")
    client.update_inference_component_runtime_config(
        InferenceComponentName=name, DesiredRuntimeConfig={"CopyCount": allowed}
    )
    client.describe_inference_component(InferenceComponentName=name)


def count_failure_without_capacity(name: str) -> None:
    """A request that found no copy: the metric, the alarms on it, and the policies that are their
    actions.
    """
    metric = {"Namespace": "AWS/SageMaker", "MetricName": "NoCapacityInvocationFailures"}
    which = [{"Name": "InferenceComponentName", "Value": name}]
    for alarm in boto3.client("cloudwatch").describe_alarms_for_metric(**metric, Dimensions=which)[
        "MetricAlarms"
    ]:
        assert (alarm["Statistic"], alarm["ComparisonOperator"]) == (
            "Sum",
            "GreaterThanOrEqualToThreshold",
        )
        if alarm["Threshold"] <= 1:
            for action in alarm["AlarmActions"]:
                _carry_out(name, action, 1 - alarm["Threshold"])


def _carry_out(name: str, action: str, above: float) -> None:
    policies = boto3.client("application-autoscaling").describe_scaling_policies(
        ServiceNamespace="sagemaker"
    )["ScalingPolicies"]
    [policy] = [each for each in policies if each["PolicyARN"] == action]
    rule = policy["StepScalingPolicyConfiguration"]
    assert rule["AdjustmentType"] == "ChangeInCapacity"
    [step] = [each for each in rule["StepAdjustments"] if each["MetricIntervalLowerBound"] <= above]
    found = boto3.client("sagemaker").describe_inference_component(InferenceComponentName=name)
    scale(name, found["RuntimeConfig"]["DesiredCopyCount"] + step["ScalingAdjustment"])
