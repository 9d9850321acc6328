"""Application Auto Scaling: scalable targets and scaling policies.

One call creates or replaces each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, only
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits
from tsx_cli.deploy.spec import Autoscaling

SERVICE = "application-autoscaling"
PLACE = ("ServiceNamespace", "ResourceId", "ScalableDimension")
TARGET, POLICY = (
    "AWS::ApplicationAutoScaling::ScalableTarget",
    "AWS::ApplicationAutoScaling::ScalingPolicy",
)


class ScalableTarget(ResourceKind):
    """Its name is `namespace|resource|dimension`: there is one target for each."""

    traits = Traits(is_tagged=False, fixed=frozenset(PLACE), unseen=frozenset({"RoleARN"}))

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        namespace, resource, dimension = name.split("|")
        which = {
            "ServiceNamespace": namespace,
            "ResourceIds": [resource],
            "ScalableDimension": dimension,
        }
        found = cloud.call(
            SERVICE,
            "describe_scalable_targets",
            f"looking for the scalable target {resource}",
            **which,
        )["ScalableTargets"]
        return (
            Observed(
                name,
                only(found[0], (*PLACE, "MinCapacity", "MaxCapacity", "RoleARN")),
                outputs={"Ref": name},
            )
            if found
            else None
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        cloud.call(
            SERVICE,
            "register_scalable_target",
            f"letting {resource.properties['ResourceId']} scale",
            **resource.properties,
        )

    def delete(self, cloud: Cloud, found: Observed) -> None:
        doing = f"no longer scaling {found.properties['ResourceId']}"
        cloud.call(SERVICE, "deregister_scalable_target", doing, **only(found.properties, PLACE))


class ScalingPolicy(ResourceKind):
    """Its name is `namespace|resource|dimension|policy`."""

    traits = Traits(is_tagged=False, fixed=frozenset({"PolicyName", "PolicyType", *PLACE}))

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        place, _, policy = name.rpartition("|")
        found = next(
            (each for each in policies(cloud, place) if each["PolicyName"] == policy), None
        )
        shown = (
            "PolicyName",
            "PolicyType",
            *PLACE,
            "TargetTrackingScalingPolicyConfiguration",
            "StepScalingPolicyConfiguration",
        )
        return (
            None
            if found is None
            else Observed(name, only(found, shown), outputs={"Ref": found["PolicyARN"]})
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        doing = f"setting the scaling rule of {resource.properties['ResourceId']}"
        cloud.call(SERVICE, "put_scaling_policy", doing, **resource.properties)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        doing = f"removing the scaling rule of {found.properties['ResourceId']}"
        cloud.call(
            SERVICE,
            "delete_scaling_policy",
            doing,
            **only(found.properties, ("PolicyName", *PLACE)),
        )


def policies(cloud: Cloud, place: str) -> list[dict[str, Any]]:
    """The rules of a target, which its name says."""
    which = dict(zip(PLACE, place.split("|"), strict=True))
    return cloud.listed(
        SERVICE,
        "describe_scaling_policies",
        "ScalingPolicies",
        f"listing scaling rules of {which['ResourceId']}",
        **which,
    )


def without_others(cloud: Cloud, found: Sequence[Resource], policy: str) -> list[Resource]:
    """Without the scaling that others have set: a target has no tags, but rules have names."""

    def is_own(name: str) -> bool:
        names = [rule["PolicyName"] for rule in policies(cloud, "|".join(name.split("|")[:3]))]
        return not names or policy in names

    return [each for each in found if each.kind not in (TARGET, POLICY) or is_own(each.name)]


def predefined(metric: str) -> dict[str, Any]:
    return {"PredefinedMetricSpecification": {"PredefinedMetricType": metric}}


def scaling(
    place: str, policy: str, wanted: Autoscaling, metric: dict[str, Any], needs: str
) -> list[Resource]:
    """A target and its rule, which keeps `metric` at what is wanted; `place` is the target's
    name.
    """
    which = dict(zip(PLACE, place.split("|"), strict=True))
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
            place,
            {**which, "MinCapacity": wanted.min, "MaxCapacity": wanted.max},
            (needs,),
        ),
        Resource("ScalingPolicy", POLICY, f"{place}|{policy}", tracking, ("ScalableTarget",)),
    ]


def scales(found: Sequence[Resource]) -> list[str]:
    """What of a deployment scales."""
    return [each.name.split("|")[2] for each in found if each.kind == TARGET]


def scaling_of(
    place: str, policy: str, needs: tuple[str, ...], number: int | str = ""
) -> list[Resource]:
    """The same pair, where only its names are known."""
    target = Resource(f"ScalableTarget{number}", TARGET, place, {}, needs)
    return [
        target,
        Resource(f"ScalingPolicy{number}", POLICY, f"{place}|{policy}", {}, (target.id,)),
    ]
