"""A deployment as one model of a multi-model endpoint: an archive under the endpoint's prefix in
S3.

SageMaker keeps a model that it has loaded under its key, so each archive gets a key of its own. A
SageMaker model of the same archive stands for each version: it holds the tags, and batch transform
jobs can use it.
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
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits, digest, numbered
from tsx_cli.deploy.preflight.limits import NEURON_MACHINES
from tsx_cli.deploy.sagemaker import shared_endpoints as shared
from tsx_cli.deploy.sagemaker.deployment import SageMakerTarget
from tsx_cli.deploy.sagemaker.kinds import MODEL as MODEL_PROPERTIES
from tsx_cli.deploy.sagemaker.kinds import Immutable
from tsx_cli.deploy.sagemaker.resources import (
    config_properties,
    model_properties,
    prefix,
    uploaded,
    uploads,
)
from tsx_cli.deploy.sagemaker.shared_endpoints import MODEL, MODELS, EndpointMembership
from tsx_cli.deploy.spec import ACCELERATED, DeploySpec, MultiModelEndpoint

VERSION, TARGET_MODEL, OBJECT = (
    "Tsx::SageMaker::ModelVersion",
    "Tsx::SageMaker::TargetModel",
    "Tsx::S3::Object",
)
SINCE = "tsx:since"  # the tag of a model with the time when it became the current version


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Raises UsageError for what SageMaker does not do."""
    multi = spec.sagemaker.multi_model
    assert multi is not None
    _check(spec, multi)
    member = EndpointMembership(MODELS, multi.endpoint)
    tags = shared.member_tags(spec, facts, member)
    key = f"{archives(multi.endpoint)}{spec.name}-{facts.sha256[:16]}.tar.gz"
    made, url = uploaded(spec, facts, tags, key)
    alone = model_properties(spec, facts, url)
    version = Resource(
        "ModelVersion", VERSION, prefix(spec.name) + digest(url), alone, ("ModelData",), tags
    )
    container = {
        **alone["PrimaryContainer"],
        "ModelDataUrl": url.rpartition("/")[0] + "/",
        "Mode": "MultiModel",
    }
    if not multi.cache:
        container["MultiModelConfig"] = {"ModelCacheSetting": "Disabled"}
    whole = {**alone, "PrimaryContainer": container}
    own = shared.endpoint_prefix(multi.endpoint) + digest(whole)
    model = Resource("Model", MODEL, own, whole, ("ModelVersion",), shared.endpoint_tags(member))
    config = config_properties(spec, model.name)
    endpoint = shared.endpoint_resources(member, config, {}, ("Model",))
    current = Resource(
        "TargetModel", TARGET_MODEL, spec.name, {"ModelName": version.name}, ("Endpoint",)
    )
    return [*made, version, model, *endpoint, current]


def archives(endpoint: str) -> str:
    """The prefix of an endpoint's archives."""
    return f"{uploads(endpoint)}models/"


def _check(spec: DeploySpec, multi: MultiModelEndpoint) -> None:
    own = spec.sagemaker
    if spec.canary is not None:
        raise UsageError(
            "canary: the clients of a multi-model endpoint name the version that they want"
            " (TargetModel), so SageMaker cannot give it a share of the requests. Remove canary;"
            " use sagemaker.component for updates that are rolled back"
        )
    if own.autoscaling is not None:
        raise UsageError(
            "sagemaker.autoscaling: tsx deploy does not scale a multi-model endpoint; set"
            " sagemaker.instances"
        )
    if ACCELERATED.match(own.instance_type) or NEURON_MACHINES.match(own.instance_type):
        raise UsageError(
            f"sagemaker.instance_type is {own.instance_type}, and a multi-model endpoint runs on"
            " CPUs with an image like this: choose ml.c… or ml.m…, or share a GPU with"
            " sagemaker.component"
        )
    shared.check_role(spec, multi.endpoint)


class MultiModelVersion(Immutable):
    """One archive of a deployment.

    Its image is that of the endpoint when it was created, and is not compared.
    """

    def __init__(self) -> None:
        super().__init__("model", "Model", "model", ())
        self.traits = Traits(unseen=frozenset(MODEL_PROPERTIES))


class TargetModel(ResourceKind):
    """The current version of a deployment: the model with the latest time in its tag.

    Its name is the deployment's.
    """

    traits = Traits(is_tagged=False)

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        found = current_of(shared.models_of(cloud, name))
        return None if found is None else Observed(name, {"ModelName": found.name})

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

    def delete(self, cloud: Cloud, found: Observed) -> None:
        """It goes with its models."""


def current_of(models: Mapping[str, Observed]) -> Observed | None:
    return max(
        (each for each in models.values() if SINCE in each.tags),
        key=lambda each: each.tags[SINCE],
        default=None,
    )


class MultiModelTarget(SageMakerTarget):
    """A deployment that is a model of a multi-model endpoint."""

    def __init__(self, member: EndpointMembership) -> None:
        self.member = member

    def log_group(self, name: str) -> str:
        """That of the endpoint, for all of its models."""
        return super().log_group(self.member.endpoint)

    def wanted(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        return shared.noted(cloud, self.member, resources(spec, facts))

    def belongings(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        """Its archives always: a client can ask for whatever is under the prefix.

        The endpoint goes with the last archive.
        """
        there = shared.models_of(cloud, name)
        models = numbered("Model", MODEL, there)
        bucket = _url(next(iter(there.values()))).partition("/")[0]
        doing, place = (
            f"listing the models of {self.member.endpoint}",
            archives(self.member.endpoint),
        )
        found = [
            each["Key"]
            for each in cloud.listed(
                "s3", "list_objects_v2", "Contents", doing, Bucket=bucket, Prefix=place
            )
        ]
        own = [
            each
            for each in found
            if re.fullmatch(re.escape(f"{place}{name}-") + r"[0-9a-f]{16}\.tar\.gz", each)
        ]
        needs = tuple(each.id for each in models)
        objects = numbered("ModelData", OBJECT, [f"{bucket}/{key}" for key in own], needs)
        return [
            *models,
            *objects,
            *shared.endpoint_belongings(
                cloud, self.member, [*models, *objects], is_last=len(own) == len(found)
            ),
        ]

    def obsolete(
        self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        names = {each.name for each in wanted}
        there = shared.models_of(cloud, spec.name)
        gone = shared.superseded(self.versions(cloud, spec.name), spec.keep, names)
        objects = [
            Resource(f"FormerData{n}", OBJECT, _url(there[each]), {}, (f"FormerModel{n}",))
            for n, each in enumerate(gone)
        ]
        models = numbered("FormerModel", MODEL, gone)
        return [*models, *objects, *shared.former(cloud, self.member, tuple(names))]

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        models = shared.models_of(cloud, name)
        current = current_of(models)
        return shared.versions_of(models, None if current is None else current.name)

    def going_back(self, cloud: Cloud, name: str, version: DeployedVersion) -> list[Resource]:
        return [Resource("TargetModel", TARGET_MODEL, name, {"ModelName": version.id})]

    def promoting(self, cloud: Cloud, name: str) -> list[Resource]:
        raise CliError(
            f"{name} is {self.member}, which has no canary: its clients name the version that they"
            " want"
        )

    def status(self, cloud: Cloud, name: str) -> dict[str, Any] | None:
        current = current_of(shared.models_of(cloud, name))
        if current is None:
            return None
        return {
            **shared.common_status(cloud, name, current, self.member),
            "model name": current.name,
            "target model": _file(current),
        }

    def address(self, cloud: Cloud, name: str) -> dict[str, str]:
        current = current_of(shared.models_of(cloud, name))
        if current is None:
            raise CliError(f"{name} has no current version: deploy it again")
        return {"EndpointName": self.member.endpoint, "TargetModel": _file(current)}


def _file(model: Observed) -> str:
    """By what a client names it."""
    return _url(model).rpartition("/")[2]


def _url(model: Observed) -> str:
    """Of its archive, as bucket/key."""
    return str(model.properties["PrimaryContainer"]["ModelDataUrl"]).removeprefix("s3://")
