"""The target `sagemaker`: an endpoint, or a part of a shared endpoint."""

from __future__ import annotations

from collections.abc import Mapping

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.aws.target import AwsTarget
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.preflight.limits import LIMITS, MIB, TargetProfile, set_limit
from tsx_cli.deploy.preflight.outlook import DeploymentScaling
from tsx_cli.deploy.sagemaker import components, multi_model
from tsx_cli.deploy.sagemaker.deployment import SageMakerPlatform
from tsx_cli.deploy.sagemaker.kinds import COMPONENT, KINDS
from tsx_cli.deploy.sagemaker.resources import LOG, resources
from tsx_cli.deploy.sagemaker.shared_endpoints import (
    COMPONENTS,
    ENDPOINT,
    complete_spec,
    membership,
    wanted_membership,
)
from tsx_cli.deploy.spec import GPU, DeploySpec


class SageMakerTarget(AwsTarget):
    name = "sagemaker"
    kinds: Mapping[str, ResourceKind] = {
        **KINDS,
        multi_model.VERSION: multi_model.MultiModelVersion(),
        multi_model.TARGET_MODEL: multi_model.TargetModel(),
    }
    main_kinds = frozenset({ENDPOINT, COMPONENT})
    removed_log = components.LOG
    complete = staticmethod(complete_spec)

    def platform(self, cloud: Cloud, spec: DeploySpec) -> tuple[SageMakerPlatform, str]:
        member = membership(cloud, spec.name) if spec.names_only else wanted_membership(spec)
        if member is None:
            return SageMakerPlatform(), LOG.format(spec.name)
        if member.form == COMPONENTS:
            return components.ComponentPlatform(member), components.LOG.format(spec.name)
        # The models of an endpoint share its log.
        return multi_model.MultiModelPlatform(member), LOG.format(member.endpoint)

    def resources(self, spec: DeploySpec, facts: Facts) -> list[Resource]:
        """Return the resources of an endpoint or a component.

        Raises:
            UsageError: SageMaker does not support the specification.
        """
        wanted_membership(spec)
        make = resources if spec.sagemaker.component is None else components.resources
        return make(spec, facts)

    def scaling(self, spec: DeploySpec) -> DeploymentScaling:
        settings, by_load = spec.sagemaker, spec.sagemaker.multi_model is None
        bounds, component = settings.autoscaling, settings.component
        if settings.serverless is not None:
            return DeploymentScaling()
        if bounds is not None:
            return DeploymentScaling(bounds.min, bounds.max, bounds.target, by_load)
        return DeploymentScaling(
            settings.instances if component is None else component.copies, by_load=by_load
        )

    def profile(self, spec: DeploySpec) -> TargetProfile:
        settings, component = spec.sagemaker, spec.sagemaker.component
        form = (
            "serverless" if settings.serverless else "asynchronous" if settings.asynchronous else ""
        )
        kind = f"sagemaker {form}".rstrip()
        limits = dict(LIMITS[kind])
        if settings.serverless is not None:
            limits |= set_limit(
                "memory", settings.serverless.memory * MIB, "sagemaker.serverless.memory"
            )
            return TargetProfile(kind, limits, spec.env, spec.device)
        limits |= set_limit("start", settings.startup_timeout, "sagemaker.startup_timeout")
        if component is None:
            return TargetProfile(kind, limits, spec.env, spec.device, settings.instance_type)
        # A component has only a part of the instance's memory, and only the GPUs that it requests.
        if component.gpus is not None:
            return TargetProfile(kind, limits, spec.env, GPU, settings.instance_type)
        limits |= set_limit("memory", component.memory * MIB, "sagemaker.component.memory")
        return TargetProfile(kind, limits, spec.env, "cpu")


TARGET = SageMakerTarget()
