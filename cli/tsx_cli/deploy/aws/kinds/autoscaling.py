"""Application Auto Scaling: what may be scaled, and by which rule. Both are written whole by one call that makes or changes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsx_cli.deploy.aws.session import Cloud, translated_errors
from tsx_cli.deploy.engine.kind import only
from tsx_cli.deploy.engine.plan import Field
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits

TARGET = ("ServiceNamespace", "ResourceId", "ScalableDimension", "MinCapacity", "MaxCapacity", "RoleARN")
POLICY = ("PolicyName", "PolicyType", "ServiceNamespace", "ResourceId", "ScalableDimension", "TargetTrackingScalingPolicyConfiguration")


class ScalableTarget:
    """Its name is `namespace|resource|dimension`: there is one target for each."""

    traits = Traits(
        is_tagged=False, fixed=frozenset({"ServiceNamespace", "ResourceId", "ScalableDimension"}), unseen=frozenset({"RoleARN"})
    )
    poll, patience = 1.0, 60.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        namespace, resource, dimension = name.split("|")
        with translated_errors(f"looking for what scales {resource}"):
            answer = cloud.client("application-autoscaling").describe_scalable_targets(
                ServiceNamespace=namespace, ResourceIds=[resource], ScalableDimension=dimension
            )
        found = answer["ScalableTargets"]
        return Observed(name, only(found[0], TARGET), outputs={"Ref": name}) if found else None

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"letting {resource.properties['ResourceId']} scale"):
            cloud.client("application-autoscaling").register_scalable_target(**resource.properties)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        self.create(cloud, resource)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        with translated_errors(f"no longer scaling {found.properties['ResourceId']}"):
            cloud.client("application-autoscaling").deregister_scalable_target(**_which(found.properties))


class ScalingPolicy:
    """Its name is `namespace|resource|dimension|policy`."""

    traits = Traits(is_tagged=False, fixed=frozenset({"PolicyName", "PolicyType", "ServiceNamespace", "ResourceId", "ScalableDimension"}))
    poll, patience = 1.0, 60.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        namespace, resource, dimension, policy = name.split("|")
        with translated_errors(f"looking for the rule by which {resource} scales"):
            answer = cloud.client("application-autoscaling").describe_scaling_policies(
                PolicyNames=[policy], ServiceNamespace=namespace, ResourceId=resource, ScalableDimension=dimension
            )
        found = answer["ScalingPolicies"]
        return Observed(name, only(found[0], POLICY), outputs={"Ref": found[0]["PolicyARN"]}) if found else None

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"setting the rule by which {resource.properties['ResourceId']} scales"):
            cloud.client("application-autoscaling").put_scaling_policy(**resource.properties)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        self.create(cloud, resource)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        with translated_errors(f"removing the rule by which {found.properties['ResourceId']} scales"):
            cloud.client("application-autoscaling").delete_scaling_policy(
                PolicyName=found.properties["PolicyName"], **_which(found.properties)
            )


def is_somebody_elses(cloud: Cloud, name: str, policy: str) -> bool:
    """Whether others have set how it scales: a target has no tags, but rules have names."""
    namespace, resource, dimension = name.split("|")[:3]
    with translated_errors(f"looking for who scales {resource}"):
        pages = cloud.client("application-autoscaling").get_paginator("describe_scaling_policies")
        found = [
            each["PolicyName"]
            for page in pages.paginate(ServiceNamespace=namespace, ResourceId=resource, ScalableDimension=dimension)
            for each in page["ScalingPolicies"]
        ]
    return bool(found) and policy not in found


def _which(properties: Any) -> dict[str, Any]:
    return only(properties, ("ServiceNamespace", "ResourceId", "ScalableDimension"))
