"""The forms of a deployment to SageMaker.

A model has an endpoint of its own, is a component, or is a model of a multi-model endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.sagemaker import components, kinds, multi_model
from tsx_cli.deploy.sagemaker.deployment import SageMakerTarget
from tsx_cli.deploy.sagemaker.resources import resources as own_endpoint
from tsx_cli.deploy.sagemaker.shared_endpoints import (
    COMPONENTS,
    EndpointMembership,
    wanted_membership,
)
from tsx_cli.deploy.spec import DeploySpec

KINDS: Mapping[str, ResourceKind] = {
    **kinds.KINDS,
    multi_model.VERSION: multi_model.MultiModelVersion(),
    multi_model.TARGET_MODEL: multi_model.TargetModel(),
}


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Return the resources of a deployment.

    Raises:
        UsageError: SageMaker does not support the specification.
    """
    settings = spec.sagemaker
    wanted_membership(spec)
    if settings.component is not None:
        return components.resources(spec, facts)
    return (
        own_endpoint(spec, facts)
        if settings.multi_model is None
        else multi_model.resources(spec, facts)
    )


def target_of(member: EndpointMembership | None) -> SageMakerTarget:
    if member is None:
        return SageMakerTarget()
    return (
        components.ComponentTarget(member)
        if member.form == COMPONENTS
        else multi_model.MultiModelTarget(member)
    )
