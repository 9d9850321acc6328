"""SageMaker's models, endpoint configurations, endpoints and inference components.

Models and configurations cannot be changed, so their names contain a hash of their content. An
endpoint moves from one configuration to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_cli.deploy.aws.kinds.iam import call_with_role
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, pick, tag_list, tag_map
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits

MODEL = ("PrimaryContainer", "ExecutionRoleArn", "VpcConfig", "EnableNetworkIsolation")
CONFIG = (
    "ProductionVariants",
    "ShadowProductionVariants",
    "DataCaptureConfig",
    "AsyncInferenceConfig",
    "KmsKeyId",
    "ExecutionRoleArn",
    "VpcConfig",
    "EnableNetworkIsolation",
    "MetricsConfig",
)
CHANGING_STATUSES = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
FAILED_STATUSES = frozenset({"Failed", "OutOfService", "UpdateRollbackFailed"})
COMPONENT = "AWS::SageMaker::InferenceComponent"
MAX_UPDATE_S = 28_800  # SageMaker's limit for a component's rolling update


class Immutable(ResourceKind):
    """A model or an endpoint configuration: only its tags can change."""

    poll_interval_s, timeout_s = 2.0, 120.0

    def __init__(
        self, noun: str, key: str, operation: str, property_names: tuple[str, ...]
    ) -> None:
        self.traits = Traits(fixed=frozenset(property_names))
        self._noun, self._key, self._operation = noun, key, operation
        self._property_names = property_names

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        identifier = {f"{self._key}Name": name}
        response = cloud.find(
            "sagemaker",
            f"describe_{self._operation}",
            f"looking for the {self._noun} {name}",
            **identifier,
        )
        if response is None:
            return None
        arn = response[f"{self._key}Arn"]
        return Observed(
            name,
            pick(response, self._property_names),
            tags_of_arn(cloud, arn),
            {**identifier, "Ref": arn, "made": response["CreationTime"]},
        )

    def create(self, cloud: Cloud, resource: Resource) -> str | None:
        arguments = {f"{self._key}Name": resource.name, "Tags": tag_list(resource.tags)}
        doing = f"creating the {self._noun} {resource.name}"
        role = str(resource.properties.get("ExecutionRoleArn"))
        operation = f"create_{self._operation}"
        return call_with_role(
            cloud, "sagemaker", operation, doing, role, **arguments, **resource.properties
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        put_tags(cloud, observed.outputs["Ref"], resource)

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        identifier = {f"{self._key}Name": observed.name}
        cloud.call(
            "sagemaker",
            f"delete_{self._operation}",
            f"deleting the {self._noun} {observed.name}",
            **identifier,
        )


class SageMakerEndpoint(ResourceKind):
    """An endpoint.

    `DeploymentConfig` controls its change to a new configuration. If an alarm goes off, SageMaker
    restores the earlier configuration.
    """

    traits = Traits(
        unreported=frozenset(
            {"DeploymentConfig", "RetainAllVariantProperties", "ExcludeRetainedVariantProperties"}
        )
    )
    poll_interval_s, timeout_s = 10.0, 3 * 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        response = cloud.find(
            "sagemaker", "describe_endpoint", f"looking for the endpoint {name}", EndpointName=name
        )
        if response is None:
            return None
        status = response["EndpointStatus"]
        state, reason = _condition(status, response)
        variants = response.get("ProductionVariants", [])
        outputs = {
            "EndpointName": name,
            "Ref": response["EndpointArn"],
            "status": status,
            "variants": variants,
        }
        outputs["pending"] = response.get("PendingDeploymentSummary", {}).get("EndpointConfigName")
        config = {"EndpointConfigName": response["EndpointConfigName"]}
        return Observed(
            name, config, tags_of_arn(cloud, response["EndpointArn"]), outputs, state, reason
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        desired = {
            "EndpointName": resource.name,
            "Tags": tag_list(resource.tags),
            **pick(resource.properties, ["EndpointConfigName"]),
        }
        cloud.call(
            "sagemaker", "create_endpoint", f"creating the endpoint {resource.name}", **desired
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        if "EndpointConfigName" in changed:
            desired = {"EndpointName": resource.name, **resource.properties}
            cloud.call(
                "sagemaker", "update_endpoint", f"updating the endpoint {resource.name}", **desired
            )
        put_tags(cloud, observed.outputs["Ref"], resource)

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        if observed.outputs["status"] != "Deleting":
            cloud.call(
                "sagemaker",
                "delete_endpoint",
                f"deleting the endpoint {observed.name}",
                EndpointName=observed.name,
            )


class InferenceComponent(ResourceKind):
    """An inference component.

    `DeploymentConfig` controls how a new specification replaces the copies. If an alarm goes off,
    SageMaker restores the earlier specification. `Resource.change_settings` contains the initial
    number of copies if autoscaling controls the number later.
    """

    traits = Traits(
        fixed=frozenset({"EndpointName", "VariantName"}), unreported=frozenset({"DeploymentConfig"})
    )
    poll_interval_s, timeout_s = 10.0, MAX_UPDATE_S + 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        doing = f"looking for the component {name}"
        response = cloud.find(
            "sagemaker", "describe_inference_component", doing, InferenceComponentName=name
        )
        if response is None:
            return None
        status, copies = response["InferenceComponentStatus"], response.get("RuntimeConfig", {})
        state, reason = _condition(status, response)
        properties = pick(response, ("EndpointName", "VariantName", "Specification"))
        properties["RuntimeConfig"] = {"CopyCount": copies.get("DesiredCopyCount", 0)}
        arn = response["InferenceComponentArn"]
        outputs = {"Ref": arn, "status": status, "copies": copies.get("CurrentCopyCount", 0)}
        return Observed(name, properties, tags_of_arn(cloud, arn), outputs, state, reason)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        desired = pick(
            {**resource.properties, **resource.change_settings},
            ("EndpointName", "VariantName", "Specification", "RuntimeConfig"),
        )
        arguments = {"InferenceComponentName": resource.name, "Tags": tag_list(resource.tags)}
        cloud.call(
            "sagemaker",
            "create_inference_component",
            f"creating the component {resource.name}",
            **arguments,
            **desired,
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        identifier = {"InferenceComponentName": resource.name}
        put_tags(cloud, observed.outputs["Ref"], resource)
        if "Specification" in changed:
            desired = pick(
                resource.properties, ("Specification", "RuntimeConfig", "DeploymentConfig")
            )
            cloud.call(
                "sagemaker",
                "update_inference_component",
                f"updating the component {resource.name}",
                **identifier,
                **desired,
            )
        elif "RuntimeConfig" in changed:
            doing = f"setting the copies of {resource.name}"
            desired = resource.properties["RuntimeConfig"]
            cloud.call(
                "sagemaker",
                "update_inference_component_runtime_config",
                doing,
                **identifier,
                DesiredRuntimeConfig=desired,
            )

    def delete(self, cloud: Cloud, observed: Observed) -> str | None:
        """Delete a component; SageMaker refuses that while the component changes."""
        current = self.observe(cloud, observed.name)
        if current is None or current.outputs["status"] == "Deleting":
            return None
        if current.state == "changing":
            return f"is {current.outputs['status']}, and can be deleted after that"
        cloud.call(
            "sagemaker",
            "delete_inference_component",
            f"deleting the component {observed.name}",
            InferenceComponentName=observed.name,
        )
        return None


def _condition(status: str, response: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state of an endpoint or a component, and the reason."""
    state: State = (
        "changing"
        if status in CHANGING_STATUSES
        else "failed"
        if status in FAILED_STATUSES
        else "ready"
    )
    return state, response.get("FailureReason") or (status if state != "ready" else "")


def tags_of_arn(cloud: Cloud, arn: str) -> dict[str, str]:
    return tag_map(
        cloud.list_items("sagemaker", "list_tags", "Tags", "reading tags", ResourceArn=arn)
    )


def put_tags(cloud: Cloud, arn: str, resource: Resource) -> None:
    cloud.call(
        "sagemaker",
        "add_tags",
        f"tagging {resource.name}",
        ResourceArn=arn,
        Tags=tag_list(resource.tags),
    )


KINDS: Mapping[str, ResourceKind] = {
    COMPONENT: InferenceComponent(),
    "AWS::SageMaker::Endpoint": SageMakerEndpoint(),
    "AWS::SageMaker::EndpointConfig": Immutable(
        "configuration", "EndpointConfig", "endpoint_config", CONFIG
    ),
    "AWS::SageMaker::Model": Immutable("model", "Model", "model", MODEL),
}
