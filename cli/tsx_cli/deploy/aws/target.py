"""The base of the targets in an AWS account, with their images in ECR and their leftovers."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.kinds import autoscaling, cloudwatch, ecr, iam, log_group, s3
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.platform import Platform
from tsx_cli.deploy.engine.resources import OWNER, Ref, Resource, owned
from tsx_cli.deploy.image.programs import Builder
from tsx_cli.deploy.image.recipe import Recipe, own_tag_pattern, tag_for_repository
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.target import BuiltImage, DeployTarget, Location

ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?")
REPOSITORY, IMAGE = "AWS::ECR::Repository", "Tsx::ECR::Image"
KINDS: Mapping[str, ResourceKind] = {
    "AWS::ApplicationAutoScaling::ScalableTarget": autoscaling.ScalableTarget(),
    "AWS::ApplicationAutoScaling::ScalingPolicy": autoscaling.ScalingPolicy(),
    "AWS::CloudWatch::Alarm": cloudwatch.CloudWatchAlarm(),
    REPOSITORY: ecr.Repository(),
    "AWS::IAM::Role": iam.Role(),
    log_group.KIND: log_group.LogGroup(),
    "AWS::S3::Bucket": s3.Bucket(),
    IMAGE: ecr.EcrImage(),
    "Tsx::S3::Object": s3.S3Object(),
}


class AwsTarget(DeployTarget):
    """A target in an AWS account."""

    can_create_role = True
    kinds: Mapping[str, ResourceKind]  # kinds that only this target has
    main_kinds: frozenset[str]  # A deployment exists as long as it has a resource of these kinds.
    removed_log = ""  # format of the name of a log group that a part of a deployment leaves

    @abstractmethod
    def platform(self, cloud: Cloud, spec: DeploySpec) -> tuple[Platform, str]:
        """Return the platform, and the name of the deployment's log group."""

    @abstractmethod
    def resources(self, spec: DeploySpec, facts: Facts) -> list[Resource]:
        """Return the resources of a deployment that needs no existing resources.

        Raises:
            UsageError: The target does not support the specification.
        """

    def locate(self, spec: DeploySpec) -> Location:
        cloud = Cloud(spec.region, spec.profile, spec.sagemaker.bucket_owner)
        platform, log_name = self.platform(cloud, spec)
        kinds = {**KINDS, **self.kinds}
        return Location(spec.name, self, cloud, platform, kinds, spec.repository, log_name)

    def pin_image(self, cloud: Cloud, facts: Facts) -> tuple[Facts, int | None]:
        account = cloud.account
        image, image_bytes = ecr.resolve_digest(str(facts.image), cloud)
        return replace(facts, account=account, image=image), image_bytes

    def built_image(self, cloud: Cloud, spec: DeploySpec, recipe: Recipe) -> BuiltImage:
        tag = tag_for_repository(spec.repository, spec.name, recipe.tag)
        suffix = ".cn" if cloud.region.startswith("cn-") else ""
        registry = f"{cloud.account}.dkr.ecr.{cloud.region}.amazonaws.com{suffix}"
        repository_name = spec.repository or f"{registry}/{self._own_repository(spec.name)}"
        host, _, path = repository_name.partition("/")
        if not ECR.fullmatch(host) or not path:
            raise UsageError(
                f"repository is {repository_name}; {self.name} takes images from ECR only:"
                " ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME"
            )
        # A repository that the specification names has no owner, because deployments may share it.
        tags = {OWNER: spec.name, "tsx:target": self.name} if spec.repository is None else {}
        properties = {"ImageScanningConfiguration": {"ScanOnPush": True}}
        repository = Resource("Repository", REPOSITORY, path, properties, tags=tags)
        image = Resource("Image", IMAGE, f"{repository_name}:{tag}", {}, ("Repository",))
        kind = ecr.EcrImage(Builder(spec.build.tool), recipe, recipe.machine)
        return BuiltImage(Ref("Image", "Uri", tag), [repository, image], {IMAGE: kind})

    def leftovers(self, location: Location, existing: Sequence[Resource]) -> list[Resource]:
        """Return the deployment's remaining resources: its log, images and repository."""
        cloud, name = location.cloud, location.name
        exists = any(resource.kind in self.main_kinds for resource in existing)
        log = log_group.own_log_group(cloud, name, location.log_name, exists=exists)
        if self.removed_log and not log:
            log = log_group.own_log_group(cloud, name, self.removed_log.format(name), exists=False)
        if location.repository is not None:
            return [*log, *ecr.images_of(cloud, location.repository, own_tag_pattern(name))]
        repository = Resource("Repository", REPOSITORY, self._own_repository(name), {})
        observed = KINDS[REPOSITORY].observe(cloud, repository.name)
        return [*log, repository] if owned(observed, name) else log

    def _own_repository(self, name: str) -> str:
        """Return the name of a deployment's own repository, which is removed with it."""
        return f"{ecr.OWN_PREFIX}{self.name}/{name}"
