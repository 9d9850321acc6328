"""The target `ray`: a Ray cluster. Ray is an optional extra, so it is imported late."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.preflight.limits import TargetProfile
from tsx_cli.deploy.preflight.outlook import DeploymentScaling
from tsx_cli.deploy.spec import GPU, DeploySpec
from tsx_cli.deploy.target import DeployTarget, Location


class RayTarget(DeployTarget):
    name = "ray"

    def locate(self, spec: DeploySpec) -> Location:
        try:
            from tsx_cli.deploy.ray.cluster import RayCluster
            from tsx_cli.deploy.ray.deployment import RayPlatform
            from tsx_cli.deploy.ray.kinds import KINDS
        except ImportError as error:
            raise CliError(
                f"--target ray needs packages that are not installed ({error.name}): pip install"
                " 'tsx-serve[ray]'"
            ) from error
        cluster = RayCluster(spec.ray, partial(Cloud, spec.region, spec.profile))
        return Location(spec.name, self, cluster, RayPlatform(), KINDS)

    def scaling(self, spec: DeploySpec) -> DeploymentScaling:
        settings, target = spec.ray, spec.ray.target_ongoing_requests
        return DeploymentScaling(
            settings.replicas if settings.min_replicas is None else max(1, settings.min_replicas),
            settings.max_replicas,
            target,
            by_load=target is not None,  # tsx sets a missing target to a fitting one.
            key="ray.target_ongoing_requests",
        )

    def check(self, spec: DeploySpec) -> None:
        if spec.canary is not None and spec.ray.models:
            raise UsageError(
                "canary: replicas that several models share have none. Remove it, or deploy the"
                " model alone, without ray.models"
            )
        super().check(spec)

    def profile(self, spec: DeploySpec) -> TargetProfile:
        gpus = spec.ray.num_gpus
        device = None if gpus is None else GPU if gpus else "cpu"
        return replace(super().profile(spec), device=device)


TARGET = RayTarget()
