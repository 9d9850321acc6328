"""SageMaker's models, endpoint configurations and endpoints.

The first two cannot be changed once they are there, so their names are made of what they say; an endpoint moves from one configuration
to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsx_cli.deploy.aws.session import Cloud, looked_up, translated_errors
from tsx_cli.deploy.engine.kind import Kind, only, tag_list, tag_map
from tsx_cli.deploy.engine.plan import Field
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits
from tsx_cli.deploy.errors import CloudError

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
UNKNOWN_ROLE = "could not assume role"
CHANGING = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
BROKEN = frozenset({"Failed", "OutOfService", "UpdateRollbackFailed"})


class Model:
    traits = Traits(fixed=frozenset(MODEL))
    poll, patience = 2.0, 120.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        found = _described(cloud, "describe_model", f"looking for the model {name}", ModelName=name)
        if found is None:
            return None
        return Observed(name, only(found, MODEL), _tags(cloud, found["ModelArn"]), {"ModelName": name, "Ref": found["ModelArn"]})

    def create(self, cloud: Cloud, resource: Resource) -> str | None:
        try:
            with translated_errors(f"creating the model {resource.name}"):
                cloud.client("sagemaker").create_model(ModelName=resource.name, Tags=tag_list(resource.tags), **resource.properties)
        except CloudError as error:
            if UNKNOWN_ROLE in error.message.lower():  # one that was made a moment ago
                return error.message
            raise
        return None

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        _tag(cloud, found.outputs["Ref"], resource)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        with translated_errors(f"deleting the model {found.name}"):
            cloud.client("sagemaker").delete_model(ModelName=found.name)


class EndpointConfig:
    traits = Traits(fixed=frozenset(CONFIG))
    poll, patience = 2.0, 120.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        found = _described(cloud, "describe_endpoint_config", f"looking for the configuration {name}", EndpointConfigName=name)
        if found is None:
            return None
        arn = found["EndpointConfigArn"]
        return Observed(name, only(found, CONFIG), _tags(cloud, arn), {"EndpointConfigName": name, "Ref": arn})

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"creating the configuration {resource.name}"):
            client = cloud.client("sagemaker")
            client.create_endpoint_config(EndpointConfigName=resource.name, Tags=tag_list(resource.tags), **resource.properties)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        _tag(cloud, found.outputs["Ref"], resource)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        with translated_errors(f"deleting the configuration {found.name}"):
            cloud.client("sagemaker").delete_endpoint_config(EndpointConfigName=found.name)


class Endpoint:
    """Moves to a new configuration with traffic shifted as `DeploymentConfig` says, and back by itself when an alarm goes off."""

    traits = Traits(unseen=frozenset({"DeploymentConfig", "RetainAllVariantProperties", "ExcludeRetainedVariantProperties"}))
    poll, patience = 10.0, 3 * 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        found = _described(cloud, "describe_endpoint", f"looking for the endpoint {name}", EndpointName=name)
        if found is None:
            return None
        status = found["EndpointStatus"]
        state: State = "changing" if status in CHANGING else "failed" if status in BROKEN else "ready"
        reason = found.get("FailureReason") or (status if state != "ready" else "")
        variants = found.get("ProductionVariants", [])
        outputs = {"EndpointName": name, "Ref": found["EndpointArn"], "status": status, "variants": variants}
        outputs["pending"] = found.get("PendingDeploymentSummary", {}).get("EndpointConfigName")
        config = {"EndpointConfigName": found["EndpointConfigName"]}
        return Observed(name, config, _tags(cloud, found["EndpointArn"]), outputs, state, reason)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"creating the endpoint {resource.name}"):
            config = resource.properties["EndpointConfigName"]
            cloud.client("sagemaker").create_endpoint(EndpointName=resource.name, EndpointConfigName=config, Tags=tag_list(resource.tags))

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        if any(field.path == "EndpointConfigName" for field in fields):
            with translated_errors(f"updating the endpoint {resource.name}"):
                cloud.client("sagemaker").update_endpoint(EndpointName=resource.name, **resource.properties)
        _tag(cloud, found.outputs["Ref"], resource)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        if found.outputs["status"] == "Deleting":
            return
        with translated_errors(f"deleting the endpoint {found.name}"):
            cloud.client("sagemaker").delete_endpoint(EndpointName=found.name)


def _described(cloud: Cloud, call: str, doing: str, **which: str) -> dict[str, Any] | None:
    return looked_up(doing, lambda: dict(getattr(cloud.client("sagemaker"), call)(**which)))


def _tags(cloud: Cloud, arn: str) -> dict[str, str]:
    with translated_errors("reading tags"):
        pages = cloud.client("sagemaker").get_paginator("list_tags").paginate(ResourceArn=arn)
        return tag_map(tag for page in pages for tag in page["Tags"])


def _tag(cloud: Cloud, arn: str, resource: Resource) -> None:
    with translated_errors(f"tagging {resource.name}"):
        cloud.client("sagemaker").add_tags(ResourceArn=arn, Tags=tag_list(resource.tags))


KINDS: Mapping[str, Kind] = {
    "AWS::SageMaker::Endpoint": Endpoint(),
    "AWS::SageMaker::EndpointConfig": EndpointConfig(),
    "AWS::SageMaker::Model": Model(),
}
