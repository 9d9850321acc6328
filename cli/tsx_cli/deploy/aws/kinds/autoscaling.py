"""Application Auto Scaling: scalable targets and scaling policies.

The same call creates and replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, pick
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits
from tsx_cli.deploy.spec import Autoscaling

SERVICE = "application-autoscaling"
TARGET_KEYS = ("ServiceNamespace", "ResourceId", "ScalableDimension")
TARGET = "AWS::ApplicationAutoScaling::ScalableTarget"
POLICY = "AWS::ApplicationAutoScaling::ScalingPolicy"


class ScalableTarget(ResourceKind):
    """A target that can be scaled; its name is `namespace|resource|dimension`."""

    traits = Traits(
        is_tagged=False, fixed=frozenset(TARGET_KEYS), unreported=frozenset({"RoleARN"})
    )

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        namespace, resource, dimension = name.split("|")
        which = {
            "ServiceNamespace": namespace,
            "ResourceIds": [resource],
            "ScalableDimension": dimension,
        }
        targets = cloud.call(
            SERVICE,
            "describe_scalable_targets",
            f"looking for the scalable target {resource}",
            **which,
        )["ScalableTargets"]
        return (
            Observed(
                name,
                pick(targets[0], (*TARGET_KEYS, "MinCapacity", "MaxCapacity", "RoleARN")),
                outputs={"Ref": name},
            )
            if targets
            else None
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        cloud.call(
            SERVICE,
            "register_scalable_target",
            f"letting {resource.properties['ResourceId']} scale",
            **resource.properties,
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        doing = f"no longer scaling {observed.properties['ResourceId']}"
        cloud.call(
            SERVICE, "deregister_scalable_target", doing, **pick(observed.properties, TARGET_KEYS)
        )


class ScalingPolicy(ResourceKind):
    """A rule of a target; its name is `namespace|resource|dimension|policy`."""

    traits = Traits(is_tagged=False, fixed=frozenset({"PolicyName", "PolicyType", *TARGET_KEYS}))

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        target_name, _, policy = name.rpartition("|")
        details = next(
            (rule for rule in policies(cloud, target_name) if rule["PolicyName"] == policy), None
        )
        shown = (
            "PolicyName",
            "PolicyType",
            *TARGET_KEYS,
            "TargetTrackingScalingPolicyConfiguration",
            "StepScalingPolicyConfiguration",
        )
        return (
            None
            if details is None
            else Observed(name, pick(details, shown), outputs={"Ref": details["PolicyARN"]})
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        doing = f"setting the scaling rule of {resource.properties['ResourceId']}"
        cloud.call(SERVICE, "put_scaling_policy", doing, **resource.properties)

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        doing = f"removing the scaling rule of {observed.properties['ResourceId']}"
        cloud.call(
            SERVICE,
            "delete_scaling_policy",
            doing,
            **pick(observed.properties, ("PolicyName", *TARGET_KEYS)),
        )


def policies(cloud: Cloud, target_name: str) -> list[dict[str, Any]]:
    """Return the rules of a scalable target."""
    which = dict(zip(TARGET_KEYS, target_name.split("|"), strict=True))
    return cloud.list_items(
        SERVICE,
        "describe_scaling_policies",
        "ScalingPolicies",
        f"listing scaling rules of {which['ResourceId']}",
        **which,
    )


def only_own_scaling(cloud: Cloud, resources: Sequence[Resource], policy: str) -> list[Resource]:
    """Leave out targets and rules that somebody else has set.

    Targets have no tags, so a target belongs to the deployment if its rule has the right name.
    """

    def is_own(name: str) -> bool:
        names = [rule["PolicyName"] for rule in policies(cloud, "|".join(name.split("|")[:3]))]
        return not names or policy in names

    return [
        resource
        for resource in resources
        if resource.kind not in (TARGET, POLICY) or is_own(resource.name)
    ]


def predefined(metric: str) -> dict[str, Any]:
    return {"PredefinedMetricSpecification": {"PredefinedMetricType": metric}}


def scaling_resources(
    target_name: str, policy: str, wanted: Autoscaling, metric: dict[str, Any], needs: str
) -> list[Resource]:
    """Return a scalable target, and the rule that keeps `metric` at the wanted value."""
    which = dict(zip(TARGET_KEYS, target_name.split("|"), strict=True))
    rule = {
        "TargetValue": float(wanted.target),
        **metric,
        "ScaleInCooldown": wanted.scale_in,
        "ScaleOutCooldown": wanted.scale_out,
    }
    tracking = {
        "PolicyName": policy,
        "PolicyType": "TargetTrackingScaling",
        **which,
        "TargetTrackingScalingPolicyConfiguration": rule,
    }
    return [
        Resource(
            "ScalableTarget",
            TARGET,
            target_name,
            {**which, "MinCapacity": wanted.min, "MaxCapacity": wanted.max},
            (needs,),
        ),
        Resource("ScalingPolicy", POLICY, f"{target_name}|{policy}", tracking, ("ScalableTarget",)),
    ]


def scaled_dimensions(resources: Sequence[Resource]) -> list[str]:
    """Return the dimensions that are scaled."""
    return [resource.name.split("|")[2] for resource in resources if resource.kind == TARGET]


def existing_scaling(
    target_name: str, policy: str, needs: tuple[str, ...], number: int | str = ""
) -> list[Resource]:
    """Return an existing target and its rule, of which only the names are known."""
    target = Resource(f"ScalableTarget{number}", TARGET, target_name, {}, needs)
    return [
        target,
        Resource(f"ScalingPolicy{number}", POLICY, f"{target_name}|{policy}", {}, (target.id,)),
    ]
