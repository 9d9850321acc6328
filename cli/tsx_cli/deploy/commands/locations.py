"""The location of a deployment: its target, and its account, machine or cluster."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.kinds import autoscaling, cloudwatch, ecr, iam, log_group, s3
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.aws_lambda.deployment import LambdaTarget
from tsx_cli.deploy.aws_lambda.lambda_parts import KINDS as LAMBDA_KINDS
from tsx_cli.deploy.commands.images import own_repository
from tsx_cli.deploy.commands.spec_file import read_named_spec
from tsx_cli.deploy.container.deployment import ContainerTarget
from tsx_cli.deploy.container.kinds import ContainerHost, DockerContainer, LocalImage
from tsx_cli.deploy.engine.engine import OWNER, Engine, OnEvent
from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.platform import Platform
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.programs import Builder, Program, find_engine
from tsx_cli.deploy.image.recipe import own_tag_pattern
from tsx_cli.deploy.kubernetes.deployment import KubernetesTarget
from tsx_cli.deploy.kubernetes.kinds import KIND as KUBERNETES_KIND
from tsx_cli.deploy.kubernetes.kinds import KINDS as KUBERNETES_KINDS
from tsx_cli.deploy.kubernetes.kinds import Cluster, Revision
from tsx_cli.deploy.kubernetes.release import Release, WeightedRoute
from tsx_cli.deploy.sagemaker.components import LOG
from tsx_cli.deploy.sagemaker.forms import KINDS as SAGEMAKER_KINDS
from tsx_cli.deploy.sagemaker.forms import target_of
from tsx_cli.deploy.sagemaker.kinds import COMPONENT
from tsx_cli.deploy.sagemaker.shared_endpoints import (
    EndpointMembership,
    membership,
    wanted_membership,
)
from tsx_cli.deploy.spec import DeploySpec, Target

AWS_KINDS: Mapping[str, ResourceKind] = {
    "AWS::ApplicationAutoScaling::ScalableTarget": autoscaling.ScalableTarget(),
    "AWS::ApplicationAutoScaling::ScalingPolicy": autoscaling.ScalingPolicy(),
    "AWS::CloudWatch::Alarm": cloudwatch.CloudWatchAlarm(),
    "AWS::ECR::Repository": ecr.Repository(),
    "AWS::IAM::Role": iam.Role(),
    log_group.KIND: log_group.LogGroup(),
    "AWS::S3::Bucket": s3.Bucket(),
    "Tsx::ECR::Image": ecr.EcrImage(),
    "Tsx::S3::Object": s3.S3Object(),
    **LAMBDA_KINDS,
    **SAGEMAKER_KINDS,
}


@dataclass(frozen=True)
class Location:
    """The location of a deployment; the methods of its kinds and its platform get `cloud`."""

    name: str
    target: str
    platform: Platform
    cloud: Any
    kinds: Mapping[str, ResourceKind]
    repository: str | None = None  # the given repository of built images, if any
    log_name: str = ""  # the deployment's log group in CloudWatch, if any

    def engine(self, on_event: OnEvent | None = None) -> Engine:
        return (
            Engine(self.cloud, self.kinds)
            if on_event is None
            else Engine(self.cloud, self.kinds, on_event=on_event)
        )

    def leftovers(self, resources: Sequence[Resource]) -> list[Resource]:
        """Return the deployment's remaining resources in AWS: its log, images and repository."""
        if not self.log_name:
            return []
        is_deployed = any(
            resource.kind in ("AWS::Lambda::Function", "AWS::SageMaker::Endpoint", COMPONENT)
            for resource in resources
        )
        log = log_group.own_log_group(self.cloud, self.name, self.log_name, exists=is_deployed)
        if self.target == "sagemaker" and not log:  # A removed component leaves its log.
            log = log_group.own_log_group(
                self.cloud, self.name, LOG.format(self.name), exists=False
            )
        if self.repository is not None:
            return [*log, *ecr.images_of(self.cloud, self.repository, own_tag_pattern(self.name))]
        repository = Resource(
            "Repository", "AWS::ECR::Repository", own_repository(self.target, self.name), {}
        )
        observed = self.kinds[repository.kind].observe(self.cloud, repository.name)
        return (
            [*log, repository]
            if observed is not None and observed.tags.get(OWNER) == self.name
            else log
        )


def locate(spec: DeploySpec) -> Location:
    return _location(spec, lambda cloud: wanted_membership(spec))


def locate_named_deployment(file: Path | None, options: Mapping[str, Any]) -> Location:
    spec = read_named_spec(file, options)
    return _location(spec, lambda cloud: membership(cloud, spec.name))


def _location(
    spec: DeploySpec, find_membership: Callable[[Cloud], EndpointMembership | None]
) -> Location:
    """Return the location of a deployment.

    Args:
        spec: The specification.
        find_membership: Returns the shared SageMaker endpoint of the deployment, if any.

    Raises:
        UsageError: There is no such target.
        CliError: A program or a package is missing.
    """
    targets = get_args(Target)
    if spec.target not in targets:  # Without a model, tsx.toml has not been validated.
        raise UsageError(f"target is '{spec.target}'; choose one of {', '.join(targets)}")
    cloud: Any
    platform: Platform
    log_name = ""
    if spec.target == "container":
        program = find_engine(spec.container.engine)
        # The engine that runs the image also builds it.
        kinds: Mapping[str, ResourceKind] = {
            "Tsx::Container::Container": DockerContainer(),
            "Tsx::Container::Image": LocalImage(Builder(program.name)),
        }
        cloud, platform = ContainerHost(program), ContainerTarget()
    elif spec.target == "kubernetes":
        if shutil.which("kubectl") is None:
            raise CliError(
                "kubectl is not installed; install it, or write the manifests with --emit"
                " kubernetes and apply them elsewhere"
            )
        settings = spec.kubernetes
        kinds = {
            **KUBERNETES_KINDS,
            f"{KUBERNETES_KIND}Deployment": Release(),
            f"{KUBERNETES_KIND}HTTPRoute": WeightedRoute(),
            f"{KUBERNETES_KIND}Revision": Revision(),
        }
        arguments = ("--context", settings.context) if settings.context else ()
        cloud = Cluster(Program("kubectl", arguments), settings.namespace)
        platform = KubernetesTarget()
    elif spec.target == "ray":
        try:
            from tsx_cli.deploy.ray.cluster import RayCluster  # Ray is an optional extra.
            from tsx_cli.deploy.ray.deployment import RayTarget
            from tsx_cli.deploy.ray.kinds import KINDS as RAY_KINDS
        except ImportError as error:
            raise CliError(
                f"--target ray needs packages that are not installed ({error.name}): pip install"
                " 'tsx-serve[ray]'"
            ) from error
        cloud, kinds = RayCluster(spec.ray, partial(Cloud, spec.region, spec.profile)), RAY_KINDS
        platform = RayTarget()
    else:
        cloud = Cloud(spec.region, spec.profile, spec.sagemaker.bucket_owner)
        is_function, kinds = spec.target == "lambda", AWS_KINDS
        aws_platform = LambdaTarget() if is_function else target_of(find_membership(cloud))
        platform, log_name = aws_platform, aws_platform.log_group(spec.name)
    return Location(spec.name, spec.target, platform, cloud, kinds, spec.repository, log_name)
