"""A double of SageMaker's inference components, which moto lacks.

It has their operations, and Application Auto Scaling's reaction to an alarm:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateInferenceComponent.html and its
neighbours;
https://docs.aws.amazon.com/sagemaker/latest/dg/endpoint-auto-scaling-zero-instances.html. A
component belongs to an endpoint that is in service and whose variant has no model. It cannot be
changed or deleted while it starts or changes. A failed update restores the previous state.
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
# Fields of an endpoint's configuration that moto drops.
PRESERVED_FIELDS = ("ExecutionRoleArn", "VpcConfig", "EnableNetworkIsolation")


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
    polls_left: int = 0  # descriptions until its change has ended
    new_specification: dict[str, Any] | None = None  # the specification of the update in progress
    new_copies: int = 0
    deployment: dict[str, Any] | None = None  # the options of the last update
    created: datetime = field(default_factory=lambda: datetime.now(timezone.utc))


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
    create_config = SageMakerResponse.create_endpoint_config
    patch.setattr(
        SageMakerResponse,
        "create_endpoint_config",
        lambda self: _keep_fields(self, create_config(self)),
    )
    checked = SageMakerModelBackend.validate_production_variants
    model_key = "ModelName"
    patch.setattr(
        SageMakerModelBackend,
        "validate_production_variants",
        lambda self, all: checked(self, [variant for variant in all if model_key in variant]),
    )
    known = {value.name: value.value for value in autoscaling.ScalableDimensionValueSet}
    for module in (autoscaling, responses):
        patch.setattr(
            module,
            "ScalableDimensionValueSet",
            Enum("Dimensions", {**known, "COMPONENT": DIMENSION}),
        )


def _method(operation: Callable[[Any, Any], Any], account: Any) -> Callable[[Any], Any]:
    return lambda response: operation(account, response)


def _keep_fields(response: Any, answer: Any) -> Any:
    config = response.sagemaker_backend.endpoint_configs[response._get_param("EndpointConfigName")]
    for name, attribute in zip(
        PRESERVED_FIELDS,
        ("execution_role_arn", "vpc_config", "enable_network_isolation"),
        strict=True,
    ):
        setattr(config, attribute, response._get_param(name))
    return answer


def _tag(backend: Any, arn: str, tags: list[dict[str, str]]) -> list[dict[str, str]]:
    """Merge tags, one value for each key; moto keeps several."""
    resource = backend._get_resource_from_arn(arn)
    merged = {tag["Key"]: tag["Value"] for tag in (*resource.tags, *tags)}
    resource.tags = [{"Key": key, "Value": value} for key, value in merged.items()]
    return list(resource.tags)


def _of_arn(account: Any, arn: str) -> Any:
    return next(
        (component for component in account.scenario.components.values() if component.arn == arn),
        None,
    )


def _refuse(message: str) -> Exception:
    from moto.sagemaker.exceptions import ValidationError

    return ValidationError(message)


def _component(account: Any, response: Any) -> FakeComponent:
    name = response._get_param("InferenceComponentName")
    try:
        component: FakeComponent = account.scenario.components[name]
    except KeyError:
        raise _refuse(f"Could not find inference component '{name}'.") from None
    return component


def _settled_component(account: Any, response: Any, change: str) -> FakeComponent:
    component = _component(account, response)
    if component.status in ("Creating", "Updating", "Deleting"):
        raise _refuse(
            f"Cannot {change} inference component {component.name} in {component.status} state."
        )
    return component


def _answer(answer: dict[str, Any]) -> Any:
    from moto.core.responses import ActionResult

    return ActionResult(answer)


def _create(account: Any, response: Any) -> Any:
    scenario, backend, get = account.scenario, response.sagemaker_backend, response._get_param
    name, endpoint, specification = (
        get("InferenceComponentName"),
        get("EndpointName"),
        get("Specification"),
    )
    if name in scenario.components:
        raise _refuse(f"Cannot create already existing inference component {name}.")
    status = backend.describe_endpoint(endpoint)["EndpointStatus"]
    if status != "InService":
        raise _refuse(
            f"Cannot create inference component on endpoint {endpoint} in {status} state."
        )
    config = backend.describe_endpoint_config(backend.endpoints[endpoint].endpoint_config_name)
    if (
        any("ModelName" in variant for variant in config["ProductionVariants"])
        or "ExecutionRoleArn" not in config
    ):
        raise _refuse(f"Endpoint {endpoint} does not take inference components.")
    backend.describe_model(specification["ModelName"])
    assert specification["ComputeResourceRequirements"]["MinMemoryRequiredInMb"] >= 128
    arn = f"arn:aws:sagemaker:eu-central-1:123456789012:inference-component/{name}"
    copies = get("RuntimeConfig")["CopyCount"]
    component = FakeComponent(
        name,
        arn,
        endpoint,
        get("VariantName"),
        specification,
        copies,
        get("Tags") or [],
        polls_left=scenario.polls,
    )
    scenario.components[name] = component
    scenario.calls.append(f"CreateInferenceComponent {name}")
    return _answer({"InferenceComponentArn": arn})


def _describe(account: Any, response: Any) -> Any:
    component = _component(account, response)
    if component.polls_left > 0:
        component.polls_left -= 1
    elif component.status == "Deleting":
        del account.scenario.components[component.name]
        raise _refuse(f"Could not find inference component '{component.name}'.")
    elif component.status in ("Creating", "Updating"):
        _settle(account, response, component)
    return _answer(
        {
            "InferenceComponentName": component.name,
            "InferenceComponentArn": component.arn,
            "EndpointName": component.endpoint,
            "EndpointArn": f"arn:aws:sagemaker:eu-central-1:123456789012:endpoint/{component.endpoint}",
            "VariantName": component.variant,
            "FailureReason": component.reason or None,
            "Specification": component.specification,
            "RuntimeConfig": {
                "DesiredCopyCount": component.desired,
                "CurrentCopyCount": component.current,
            },
            "CreationTime": component.created,
            "LastModifiedTime": component.created,
            "InferenceComponentStatus": component.status,
        }
    )


def _settle(account: Any, response: Any, component: FakeComponent) -> None:
    failure, is_new = account.scenario.failure, component.status == "Creating"
    component.status = "Failed" if failure and is_new else "InService"
    component.reason = failure.strip()
    if not failure:
        component.desired = (
            component.new_copies if component.new_specification else component.desired
        )
        component.specification, component.current = (
            component.new_specification or component.specification,
            component.desired,
        )
    component.new_specification = None
    _set_instances(account, response, component.endpoint)


def _set_instances(account: Any, response: Any, name: str) -> None:
    """Give an endpoint one instance for all copies, within the bounds of its configuration."""
    endpoint = response.sagemaker_backend.endpoints.get(name)
    if endpoint is not None:
        copies = sum(
            component.current
            for component in account.scenario.components.values()
            if component.endpoint == name
        )
        config = response.sagemaker_backend.describe_endpoint_config(endpoint.endpoint_config_name)
        least = config["ProductionVariants"][0]["ManagedInstanceScaling"]["MinInstanceCount"]
        endpoint.production_variants[0]["CurrentInstanceCount"] = max(least, min(1, copies))


def _list(account: Any, response: Any) -> Any:
    endpoint = response._get_param("EndpointNameEquals")
    components = [
        component
        for component in account.scenario.components.values()
        if endpoint in (None, component.endpoint)
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
                {key: getattr(component, value) for key, value in keys.items()}
                for component in components
            ]
        }
    )


def _update(account: Any, response: Any) -> Any:
    component = _settled_component(account, response, "update")
    component.new_specification, component.deployment = (
        response._get_param("Specification"),
        response._get_param("DeploymentConfig"),
    )
    component.new_copies = (
        response._get_param("RuntimeConfig") or {"CopyCount": component.desired}
    )["CopyCount"]
    response.sagemaker_backend.describe_model(component.new_specification["ModelName"])
    component.status, component.polls_left = "Updating", account.scenario.polls
    account.scenario.calls.append(f"UpdateInferenceComponent {component.name}")
    return _answer({"InferenceComponentArn": component.arn})


def _set_copies(account: Any, response: Any) -> Any:
    component = _settled_component(account, response, "update")
    component.desired = response._get_param("DesiredRuntimeConfig")["CopyCount"]
    component.status, component.polls_left = "Updating", account.scenario.polls
    account.scenario.calls.append(
        f"UpdateInferenceComponentRuntimeConfig {component.name} {component.desired}"
    )
    return _answer({"InferenceComponentArn": component.arn})


def _delete(account: Any, response: Any) -> Any:
    component = _settled_component(account, response, "delete")
    component.status, component.polls_left = "Deleting", account.scenario.polls
    account.scenario.calls.append(f"DeleteInferenceComponent {component.name}")
    return _answer({})


def scale(name: str, copies: int) -> None:
    """Scale a component as Application Auto Scaling does, within its scalable target."""
    target_key = {
        "ServiceNamespace": "sagemaker",
        "ResourceIds": [f"inference-component/{name}"],
        "ScalableDimension": DIMENSION,
    }
    [target] = boto3.client("application-autoscaling").describe_scalable_targets(**target_key)[
        "ScalableTargets"
    ]
    allowed = max(target["MinCapacity"], min(copies, target["MaxCapacity"]))
    client = boto3.client("sagemaker")
    client.update_inference_component_runtime_config(
        InferenceComponentName=name, DesiredRuntimeConfig={"CopyCount": allowed}
    )
    client.describe_inference_component(InferenceComponentName=name)


def count_failure_without_capacity(name: str) -> None:
    """Count a request that found no copy, and carry out the policies of the alarms on it."""
    metric = {"Namespace": "AWS/SageMaker", "MetricName": "NoCapacityInvocationFailures"}
    dimensions = [{"Name": "InferenceComponentName", "Value": name}]
    for alarm in boto3.client("cloudwatch").describe_alarms_for_metric(
        **metric, Dimensions=dimensions
    )["MetricAlarms"]:
        assert (alarm["Statistic"], alarm["ComparisonOperator"]) == (
            "Sum",
            "GreaterThanOrEqualToThreshold",
        )
        if alarm["Threshold"] <= 1:
            for action in alarm["AlarmActions"]:
                _carry_out(name, action, 1 - alarm["Threshold"])


def _carry_out(name: str, action: str, excess: float) -> None:
    policies = boto3.client("application-autoscaling").describe_scaling_policies(
        ServiceNamespace="sagemaker"
    )["ScalingPolicies"]
    [policy] = [entry for entry in policies if entry["PolicyARN"] == action]
    rule = policy["StepScalingPolicyConfiguration"]
    assert rule["AdjustmentType"] == "ChangeInCapacity"
    [step] = [
        entry for entry in rule["StepAdjustments"] if entry["MetricIntervalLowerBound"] <= excess
    ]
    component = boto3.client("sagemaker").describe_inference_component(InferenceComponentName=name)
    scale(name, component["RuntimeConfig"]["DesiredCopyCount"] + step["ScalingAdjustment"])
