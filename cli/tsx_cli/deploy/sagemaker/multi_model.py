"""A deployment as a model of a multi-model endpoint: an archive under the endpoint's prefix in S3.

SageMaker caches a loaded model under its key, so each archive has a key of its own. Each version is
also a SageMaker model, whose tags describe the version. Batch transform jobs can use that model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import (
    Observed,
    Resource,
    Traits,
    digest,
    ids_of,
    numbered_resources,
)
from tsx_cli.deploy.preflight.limits import NEURON_MACHINES
from tsx_cli.deploy.sagemaker import shared_endpoints as shared
from tsx_cli.deploy.sagemaker.kinds import MODEL as MODEL_PROPERTIES
from tsx_cli.deploy.sagemaker.kinds import Immutable
from tsx_cli.deploy.sagemaker.resources import (
    archive_in_bucket,
    config_properties,
    model_properties,
    name_prefix,
    upload_prefix,
)
from tsx_cli.deploy.sagemaker.shared_endpoints import MODEL, MODELS, EndpointMembership
from tsx_cli.deploy.spec import ACCELERATED, DeploySpec, MultiModelEndpoint

VERSION = "Tsx::SageMaker::ModelVersion"
TARGET_MODEL = "Tsx::SageMaker::TargetModel"
OBJECT = "Tsx::S3::Object"
SINCE = "tsx:since"  # tag of a model with the time when it became current


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Return the resources of a model.

    Raises:
        UsageError: SageMaker does not support the specification.
    """
    multi_model_settings = spec.sagemaker.multi_model
    assert multi_model_settings is not None
    _check(spec, multi_model_settings)
    member = EndpointMembership(MODELS, multi_model_settings.endpoint)
    tags = shared.member_tags(spec, facts, member)
    key = f"{archive_prefix(multi_model_settings.endpoint)}{spec.name}-{facts.sha256[:16]}.tar.gz"
    archive, url = archive_in_bucket(spec, facts, tags, key)
    own_properties = model_properties(spec, facts, url)
    version = Resource(
        "ModelVersion",
        VERSION,
        name_prefix(spec.name) + digest(url),
        own_properties,
        ("ModelData",),
        tags,
    )
    container = {
        **own_properties["PrimaryContainer"],
        "ModelDataUrl": url.rpartition("/")[0] + "/",
        "Mode": "MultiModel",
    }
    if not multi_model_settings.cache:
        container["MultiModelConfig"] = {"ModelCacheSetting": "Disabled"}
    properties = {**own_properties, "PrimaryContainer": container}
    name = shared.endpoint_prefix(multi_model_settings.endpoint) + digest(properties)
    model = Resource(
        "Model", MODEL, name, properties, ("ModelVersion",), shared.endpoint_tags(member)
    )
    config = config_properties(spec, model.name)
    endpoint = shared.endpoint_resources(member, config, {}, ("Model",))
    current = Resource(
        "TargetModel", TARGET_MODEL, spec.name, {"ModelName": version.name}, ("Endpoint",)
    )
    return [*archive, version, model, *endpoint, current]


def archive_prefix(endpoint: str) -> str:
    """Return the prefix of an endpoint's archives."""
    return f"{upload_prefix(endpoint)}models/"


def _check(spec: DeploySpec, multi_model_settings: MultiModelEndpoint) -> None:
    settings = spec.sagemaker
    if spec.canary is not None:
        raise UsageError(
            "canary: the clients of a multi-model endpoint name the version that they want"
            " (TargetModel), so SageMaker cannot give it a share of the requests. Remove canary;"
            " use sagemaker.component for updates that are rolled back"
        )
    if settings.autoscaling is not None:
        raise UsageError(
            "sagemaker.autoscaling: tsx deploy does not scale a multi-model endpoint; set"
            " sagemaker.instances"
        )
    if ACCELERATED.match(settings.instance_type) or NEURON_MACHINES.match(settings.instance_type):
        raise UsageError(
            f"sagemaker.instance_type is {settings.instance_type}, and a multi-model endpoint runs"
            " on CPUs with an image like this: choose ml.c… or ml.m…, or share a GPU with"
            " sagemaker.component"
        )
    shared.check_role(spec, multi_model_settings.endpoint)


class MultiModelVersion(Immutable):
    """A version of a deployment.

    Its image is the endpoint's image at its creation, and is not compared.
    """

    def __init__(self) -> None:
        super().__init__("model", "Model", "model", ())
        self.traits = Traits(unreported=frozenset(MODEL_PROPERTIES))


class TargetModel(ResourceKind):
    """The current version of a deployment: the model with the latest time in its tag.

    The resource has the name of the deployment.
    """

    traits = Traits(is_tagged=False)

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        current = current_model(shared.models_of(cloud, name))
        return None if current is None else Observed(name, {"ModelName": current.name})

    def create(self, cloud: Cloud, resource: Resource) -> None:
        model = shared.models_of(cloud, resource.name)[resource.properties["ModelName"]]
        tag = {"Key": SINCE, "Value": datetime.now(timezone.utc).isoformat()}
        cloud.call(
            "sagemaker",
            "add_tags",
            f"making {model.name} the current version",
            ResourceArn=model.outputs["Ref"],
            Tags=[tag],
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        """Do nothing: the tag is deleted with its model."""


def current_model(models: Mapping[str, Observed]) -> Observed | None:
    return max(
        (model for model in models.values() if SINCE in model.tags),
        key=lambda model: model.tags[SINCE],
        default=None,
    )


class MultiModelPlatform(shared.SharedEndpointPlatform):
    """A deployment that is a model of a multi-model endpoint."""

    def wanted_resources(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        return shared.with_change_note(cloud, self.member, resources(spec, facts))

    def existing_resources(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        """Return the resources of a model, with the endpoint if no other archive uses it.

        The archives are always included, because clients can request any archive under the prefix.
        """
        models_by_name = shared.models_of(cloud, name)
        models = numbered_resources("Model", MODEL, models_by_name)
        bucket = _archive_location(next(iter(models_by_name.values()))).partition("/")[0]
        doing = f"listing the models of {self.member.endpoint}"
        directory = archive_prefix(self.member.endpoint)
        keys = [
            item["Key"]
            for item in cloud.list_items(
                "s3", "list_objects_v2", "Contents", doing, Bucket=bucket, Prefix=directory
            )
        ]
        own_keys = [
            key
            for key in keys
            if re.fullmatch(re.escape(f"{directory}{name}-") + r"[0-9a-f]{16}\.tar\.gz", key)
        ]
        needs = ids_of(models)
        objects = numbered_resources(
            "ModelData", OBJECT, [f"{bucket}/{key}" for key in own_keys], needs
        )
        return [
            *models,
            *objects,
            *shared.existing_endpoint_resources(
                cloud, self.member, [*models, *objects], is_last=len(own_keys) == len(keys)
            ),
        ]

    def obsolete_resources(
        self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        names = {resource.name for resource in wanted}
        models_by_name = shared.models_of(cloud, spec.name)
        superseded = shared.superseded_models(self.versions(cloud, spec.name), spec.keep, names)
        objects = [
            Resource(
                f"FormerData{n}",
                OBJECT,
                _archive_location(models_by_name[model]),
                {},
                (f"FormerModel{n}",),
            )
            for n, model in enumerate(superseded)
        ]
        models = numbered_resources("FormerModel", MODEL, superseded)
        return [
            *models,
            *objects,
            *shared.endpoint_models_and_configs(cloud, self.member, tuple(names)),
        ]

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        models = shared.models_of(cloud, name)
        current = current_model(models)
        return shared.versions_of(models, None if current is None else current.name)

    def rollback_resources(
        self, cloud: Cloud, name: str, version: DeployedVersion
    ) -> list[Resource]:
        return [Resource("TargetModel", TARGET_MODEL, name, {"ModelName": version.id})]

    def promotion_resources(self, cloud: Cloud, name: str) -> list[Resource]:
        raise CliError(
            f"{name} is {self.member}, which has no canary: its clients name the version that they"
            " want"
        )

    def status(self, cloud: Cloud, name: str) -> dict[str, Any] | None:
        current = current_model(shared.models_of(cloud, name))
        if current is None:
            return None
        return {
            **shared.common_status(cloud, current, self.member),
            "model name": current.name,
            "target model": _target_model_name(current),
        }

    def address(self, cloud: Cloud, name: str) -> dict[str, str]:
        current = current_model(shared.models_of(cloud, name))
        if current is None:
            raise CliError(f"{name} has no current version: deploy it again")
        return {"EndpointName": self.member.endpoint, "TargetModel": _target_model_name(current)}


def _target_model_name(model: Observed) -> str:
    """Return the name by which clients request a model."""
    return _archive_location(model).rpartition("/")[2]


def _archive_location(model: Observed) -> str:
    """Return bucket and key of a model's archive."""
    return str(model.properties["PrimaryContainer"]["ModelDataUrl"]).removeprefix("s3://")
