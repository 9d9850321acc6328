"""SageMaker's models, endpoint configurations, endpoints and inference components.

The first two cannot be changed once they are there, so their names are made of what they say; an
endpoint moves from one configuration to another.
"""

from __future__ import annotations

from collections.abc import Mapping

from tsx_cli.deploy.aws.kinds.iam import call_with_role
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, only, tag_list, tag_map
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
CHANGING = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
BROKEN = frozenset({"Failed", "OutOfService", "UpdateRollbackFailed"})
COMPONENT = "AWS::SageMaker::InferenceComponent"
LONGEST_UPDATE = 28_800  # seconds that SageMaker allows for a rolling update of a component


class Immutable(ResourceKind):
    """A model or an endpoint configuration: only its tags can change."""

    poll, patience = 2.0, 120.0

    def __init__(self, what: str, key: str, operation: str, shown: tuple[str, ...]) -> None:
        self.traits = Traits(fixed=frozenset(shown))
        self._what, self._key, self._operation, self._shown = what, key, operation, shown

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        which = {f"{self._key}Name": name}
        found = cloud.find(
            "sagemaker",
            f"describe_{self._operation}",
            f"looking for the {self._what} {name}",
            **which,
        )
        if found is None:
            return None
        arn = found[f"{self._key}Arn"]
        return Observed(
            name,
            only(found, self._shown),
            tags_of_arn(cloud, arn),
            {**which, "Ref": arn, "made": found["CreationTime"]},
        )

    def create(self, cloud: Cloud, resource: Resource) -> str | None:
        named = {f"{self._key}Name": resource.name, "Tags": tag_list(resource.tags)}
        doing = f"creating the {self._what} {resource.name}"
        role, operation = (
            str(resource.properties.get("ExecutionRoleArn")),
            f"create_{self._operation}",
        )
        return call_with_role(
            cloud, "sagemaker", operation, doing, role, **named, **resource.properties
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        put_tags(cloud, found.outputs["Ref"], resource)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        which = {f"{self._key}Name": found.name}
        cloud.call(
            "sagemaker",
            f"delete_{self._operation}",
            f"deleting the {self._what} {found.name}",
            **which,
        )


class SageMakerEndpoint(ResourceKind):
    """Moves to a new configuration with traffic shifted as `DeploymentConfig` says, and back by
    itself when an alarm goes off.
    """

    traits = Traits(
        unseen=frozenset(
            {"DeploymentConfig", "RetainAllVariantProperties", "ExcludeRetainedVariantProperties"}
        )
    )
    poll, patience = 10.0, 3 * 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        found = cloud.find(
            "sagemaker", "describe_endpoint", f"looking for the endpoint {name}", EndpointName=name
        )
        if found is None:
            return None
        status = found["EndpointStatus"]
        state: State = (
            "changing" if status in CHANGING else "failed" if status in BROKEN else "ready"
        )
        reason = found.get("FailureReason") or (status if state != "ready" else "")
        variants = found.get("ProductionVariants", [])
        outputs = {
            "EndpointName": name,
            "Ref": found["EndpointArn"],
            "status": status,
            "variants": variants,
        }
        outputs["pending"] = found.get("PendingDeploymentSummary", {}).get("EndpointConfigName")
        config = {"EndpointConfigName": found["EndpointConfigName"]}
        return Observed(
            name, config, tags_of_arn(cloud, found["EndpointArn"]), outputs, state, reason
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        wanted = {
            "EndpointName": resource.name,
            "Tags": tag_list(resource.tags),
            **only(resource.properties, ["EndpointConfigName"]),
        }
        cloud.call(
            "sagemaker", "create_endpoint", f"creating the endpoint {resource.name}", **wanted
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        if "EndpointConfigName" in changed:
            wanted = {"EndpointName": resource.name, **resource.properties}
            cloud.call(
                "sagemaker", "update_endpoint", f"updating the endpoint {resource.name}", **wanted
            )
        put_tags(cloud, found.outputs["Ref"], resource)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        if found.outputs["status"] != "Deleting":
            cloud.call(
                "sagemaker",
                "delete_endpoint",
                f"deleting the endpoint {found.name}",
                EndpointName=found.name,
            )


class InferenceComponent(ResourceKind):
    """Another specification replaces its copies as `DeploymentConfig` says; SageMaker restores the
    former one when an alarm goes off.

    `how` has the number of copies to begin with where scaling decides it afterwards.
    """

    traits = Traits(
        fixed=frozenset({"EndpointName", "VariantName"}), unseen=frozenset({"DeploymentConfig"})
    )
    poll, patience = 10.0, LONGEST_UPDATE + 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        doing = f"looking for the component {name}"
        found = cloud.find(
            "sagemaker", "describe_inference_component", doing, InferenceComponentName=name
        )
        if found is None:
            return None
        status, copies = found["InferenceComponentStatus"], found.get("RuntimeConfig", {})
        state: State = (
            "changing" if status in CHANGING else "failed" if status in BROKEN else "ready"
        )
        reason = found.get("FailureReason") or (status if state != "ready" else "")
        properties = only(found, ("EndpointName", "VariantName", "Specification"))
        properties["RuntimeConfig"] = {"CopyCount": copies.get("DesiredCopyCount", 0)}
        arn = found["InferenceComponentArn"]
        outputs = {"Ref": arn, "status": status, "copies": copies.get("CurrentCopyCount", 0)}
        return Observed(name, properties, tags_of_arn(cloud, arn), outputs, state, reason)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        wanted = only(
            {**resource.properties, **resource.how},
            ("EndpointName", "VariantName", "Specification", "RuntimeConfig"),
        )
        named = {"InferenceComponentName": resource.name, "Tags": tag_list(resource.tags)}
        cloud.call(
            "sagemaker",
            "create_inference_component",
            f"creating the component {resource.name}",
            **named,
            **wanted,
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        name = {"InferenceComponentName": resource.name}
        put_tags(cloud, found.outputs["Ref"], resource)
        if "Specification" in changed:
            wanted = only(
                resource.properties, ("Specification", "RuntimeConfig", "DeploymentConfig")
            )
            cloud.call(
                "sagemaker",
                "update_inference_component",
                f"updating the component {resource.name}",
                **name,
                **wanted,
            )
        elif "RuntimeConfig" in changed:
            doing, wanted = (
                f"setting the copies of {resource.name}",
                resource.properties["RuntimeConfig"],
            )
            cloud.call(
                "sagemaker",
                "update_inference_component_runtime_config",
                doing,
                **name,
                DesiredRuntimeConfig=wanted,
            )

    def delete(self, cloud: Cloud, found: Observed) -> str | None:
        """SageMaker refuses it while the component starts, or gets more copies or fewer."""
        now = self.observe(cloud, found.name)
        if now is None or now.outputs["status"] == "Deleting":
            return None
        if now.state == "changing":
            return f"is {now.outputs['status']}, and can be deleted after that"
        cloud.call(
            "sagemaker",
            "delete_inference_component",
            f"deleting the component {found.name}",
            InferenceComponentName=found.name,
        )
        return None


def tags_of_arn(cloud: Cloud, arn: str) -> dict[str, str]:
    return tag_map(cloud.listed("sagemaker", "list_tags", "Tags", "reading tags", ResourceArn=arn))


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
