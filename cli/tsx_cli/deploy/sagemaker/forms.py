"""The ways in which a model is deployed to SageMaker: an endpoint of its own, a component, a model of a multi-model endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsx_cli.common.client import Response
from tsx_cli.deploy.aws.logs import GROUPS
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.sagemaker import components, kinds, multi_model
from tsx_cli.deploy.sagemaker.component_kind import COMPONENT, InferenceComponent
from tsx_cli.deploy.sagemaker.deployment import SageMakerTarget
from tsx_cli.deploy.sagemaker.resources import resources as own_endpoint
from tsx_cli.deploy.sagemaker.shared_endpoints import COMPONENTS, EndpointMembership, membership, noted, wanted_membership
from tsx_cli.deploy.spec import DeploySpec

KINDS: Mapping[str, ResourceKind] = {
    **kinds.KINDS,
    COMPONENT: InferenceComponent(),
    multi_model.VERSION: multi_model.MultiModelVersion(),
    multi_model.TARGET_MODEL: multi_model.TargetModel(),
}


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Raises UsageError for what SageMaker does not do."""
    own = spec.sagemaker
    wanted_membership(spec)
    if own.component is not None:
        return components.resources(spec, facts, own.component)
    return own_endpoint(spec, facts) if own.multi_model is None else multi_model.resources(spec, facts, own.multi_model)


def target_of(member: EndpointMembership | None) -> SageMakerTarget:
    if member is None:
        return SageMakerTarget()
    return components.ComponentTarget(member) if member.form == COMPONENTS else multi_model.MultiModelTarget(member)


def log_group(cloud: Cloud, name: str) -> str:
    """The log of a multi-model endpoint is that of all of its models."""
    member = membership(cloud, name)
    if member is not None and member.form == COMPONENTS:
        return components.LOG.format(name)
    return GROUPS["sagemaker"].format(name if member is None else member.endpoint)


class AnySageMakerTarget:
    """Finds out by its name how a deployment is served."""

    def wanted(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        member = wanted_membership(spec)
        return resources(spec, facts) if member is None else noted(cloud, member, resources(spec, facts))

    def belongings(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        return _there(cloud, name).belongings(cloud, name, purge=purge)

    def obsolete(self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]) -> list[Resource]:
        return target_of(wanted_membership(spec)).obsolete(cloud, spec, wanted)

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        return _there(cloud, name).versions(cloud, name)

    def going_back(self, cloud: Cloud, name: str, version: DeployedVersion) -> list[Resource]:
        return _there(cloud, name).going_back(cloud, name, version)

    def promoting(self, cloud: Cloud, name: str) -> list[Resource]:
        return _there(cloud, name).promoting(cloud, name)

    def status(self, cloud: Cloud, name: str) -> dict[str, Any] | None:
        return _there(cloud, name).status(cloud, name)

    def invoke(self, cloud: Cloud, name: str, body: bytes, content_type: str, accept: str | None) -> Response:
        return _there(cloud, name).invoke(cloud, name, body, content_type, accept)


def _there(cloud: Cloud, name: str) -> SageMakerTarget:
    return target_of(membership(cloud, name))
