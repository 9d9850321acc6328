"""The state of a SageMaker endpoint: its resources, its earlier versions, its health."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError
from tsx_cli.deploy.aws.kinds.autoscaling import (
    POLICY,
    SERVICE,
    TARGET,
    scales,
    scaling_of,
    without_others,
)
from tsx_cli.deploy.aws.kinds.cloudwatch import alarm_states, alarms_of
from tsx_cli.deploy.aws.kinds.iam import own_role
from tsx_cli.deploy.aws.logs import GROUPS
from tsx_cli.deploy.aws.session import Cloud, own_bucket, translated_errors
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import tag_map
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource, numbered
from tsx_cli.deploy.sagemaker.kinds import CHANGING, KINDS
from tsx_cli.deploy.sagemaker.resources import VARIANT, prefix, resources, scaling_rule, uploads
from tsx_cli.deploy.spec import DeploySpec

BESIDE = frozenset({TARGET, POLICY, "AWS::CloudWatch::Alarm"})


class SageMakerTarget:
    """A deployment with an endpoint of its own."""

    def log_group(self, name: str) -> str:
        return GROUPS["sagemaker"].format(name)

    def wanted(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        return resources(spec, facts)

    def belongings(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        role = own_role(cloud, name, "sagemaker")
        after = tuple(each.id for each in role)  # the endpoint runs with it to its end
        models = numbered(
            "Model", "AWS::SageMaker::Model", names_of(cloud, "model", prefix(name)), after
        )
        needs = tuple(each.id for each in models)
        names = names_of(cloud, "endpoint_config", prefix(name))
        configs = numbered("Config", "AWS::SageMaker::EndpointConfig", names, needs)
        alarms = numbered("Alarm", "AWS::CloudWatch::Alarm", alarms_of(cloud, name, "EndpointName"))
        endpoint = KINDS["AWS::SageMaker::Endpoint"].observe(cloud, name)
        found = [*role, *models, *configs, *alarms]
        if endpoint is not None and endpoint.tags.get("tsx:name") == name:
            needs = tuple(each.id for each in (*configs, *alarms))
            found += [
                Resource("Endpoint", "AWS::SageMaker::Endpoint", name, {}, needs),
                *_scaling(cloud, name),
            ]
        return [*(objects_of(cloud, name, models) if purge else []), *found]

    def obsolete(
        self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        """Configurations beyond the newest `keep`, models that no other configuration names,
        unwanted alarms and scaling.
        """
        names = {each.name for each in wanted}
        others = [each for each in self.versions(cloud, spec.name) if each.id not in names]
        gone = {
            each.id for each in others[: -(spec.keep - 1) or None]
        }  # none is current by then: deletions come last
        belongings = self.belongings(cloud, spec.name)
        configs = [each for each in belongings if each.kind == "AWS::SageMaker::EndpointConfig"]
        used = {
            model
            for each in configs
            if each.name not in gone
            for model in _models_of(cloud, each.name)
        } | names
        models = [
            each
            for each in belongings
            if each.kind == "AWS::SageMaker::Model" and each.name not in used
        ]
        beside = [each for each in belongings if each.kind in BESIDE and each.name not in names]
        beside = without_others(cloud, beside, scaling_rule(spec.name))
        return [*models, *(each for each in configs if each.name in gone), *beside]

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        endpoint = KINDS["AWS::SageMaker::Endpoint"].observe(cloud, name)
        current = None if endpoint is None else endpoint.properties["EndpointConfigName"]
        with translated_errors(f"listing the configurations of {name}"):
            client = cloud.client("sagemaker")
            found = [
                client.describe_endpoint_config(EndpointConfigName=each)
                for each in names_of(cloud, "endpoint_config", prefix(name))
            ]
            tags = [
                tag_map(client.list_tags(ResourceArn=each["EndpointConfigArn"])["Tags"])
                for each in found
            ]
        pairs = sorted(zip(found, tags, strict=True), key=lambda pair: pair[0]["CreationTime"])
        return [
            DeployedVersion(
                number,
                each["EndpointConfigName"],
                each["CreationTime"],
                own,
                each["EndpointConfigName"] == current,
            )
            for number, (each, own) in enumerate(pairs, start=1)
        ]

    def going_back(self, cloud: Cloud, name: str, version: DeployedVersion) -> list[Resource]:
        """Raises CliError while SageMaker moves the endpoint elsewhere: when that is over, another
        version may be the one before.
        """
        found = KINDS["AWS::SageMaker::Endpoint"].observe(cloud, name)
        if (
            found is not None
            and found.state == "changing"
            and found.outputs["pending"] != version.id
        ):
            raise CliError(
                f"{name} is {found.outputs['status']}, and SageMaker accepts no changes until that"
                " ends; a canary goes back by itself when an alarm goes off. `tsx deploy status`"
                " shows its progress: roll back after that"
            )
        return [
            Resource(
                "Endpoint",
                "AWS::SageMaker::Endpoint",
                name,
                {"EndpointConfigName": version.id},
                tags=version.tags,
            )
        ]

    def promoting(self, cloud: Cloud, name: str) -> list[Resource]:
        endpoint = KINDS["AWS::SageMaker::Endpoint"].observe(cloud, name)
        if endpoint is None or endpoint.state != "changing":
            raise CliError(f"{name} has no canary: no traffic is being moved")
        raise CliError(
            "SageMaker moves the rest to the new version by itself, after the bake time, and"
            f" accepts no changes until then ({name} is {endpoint.outputs['status']}); `tsx deploy"
            " status` shows its progress. To move all requests at once next time, omit --canary"
        )

    def status(self, cloud: Cloud, name: str) -> dict[str, Any] | None:
        endpoint = KINDS["AWS::SageMaker::Endpoint"].observe(cloud, name)
        if endpoint is None:
            return None
        config = KINDS["AWS::SageMaker::EndpointConfig"].observe(
            cloud, endpoint.properties["EndpointConfigName"]
        )
        variants = [] if config is None else config.properties["ProductionVariants"]
        now = {each["VariantName"]: each for each in endpoint.outputs["variants"]}
        return {
            "name": name,
            "target": "sagemaker",
            "region": cloud.region,
            "status": endpoint.outputs["status"],
            "reason": (
                "" if endpoint.reason in CHANGING else endpoint.reason
            ),  # a state on its way needs no diagnosis
            "model": endpoint.tags.get("tsx:model"),
            "image": endpoint.tags.get("tsx:image-digest"),
            "configuration": endpoint.properties["EndpointConfigName"],
            "moving to": endpoint.outputs["pending"],
            "variants": [_variant(each, now.get(each["VariantName"], {})) for each in variants],
            "alarms": alarm_states(cloud, alarms_of(cloud, name, "EndpointName")),
            "scales": scales(_scaling(cloud, name)),
        }

    def address(self, cloud: Cloud, name: str) -> dict[str, str]:
        """What a request must name to reach the deployment."""
        return {"EndpointName": name}

    def invoke(
        self, cloud: Cloud, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        with translated_errors(f"asking {name}"):
            given = {
                **self.address(cloud, name),
                "Body": body,
                "ContentType": content_type,
                **({"Accept": accept} if accept else {}),
            }
            answer = cloud.client("sagemaker-runtime").invoke_endpoint(**given)
            return Response.complete(answer["Body"].read(), answer.get("ContentType"))


def names_of(cloud: Cloud, what: str, beginning: str) -> list[str]:
    """Of models or configurations that begin so: behind it there are eight digits of a hash, so
    that `tsx-a-` has none of `tsx-a-b-`.
    """
    key = "".join(map(str.title, what.split("_")))
    own = re.compile(re.escape(beginning) + "[0-9a-f]{8}")
    found = cloud.listed(
        "sagemaker",
        f"list_{what}s",
        f"{key}s",
        f"listing what begins with {beginning}",
        NameContains=beginning,
    )
    return sorted(each[f"{key}Name"] for each in found if own.fullmatch(each[f"{key}Name"]))


def _models_of(cloud: Cloud, config: str) -> Iterator[str]:
    found = KINDS["AWS::SageMaker::EndpointConfig"].observe(cloud, config)
    if found is not None:
        yield from (variant["ModelName"] for variant in found.properties["ProductionVariants"])


def _scaling(cloud: Cloud, name: str) -> list[Resource]:
    which = f"endpoint/{name}/variant/{VARIANT}"
    asked = {"ServiceNamespace": "sagemaker", "ResourceIds": [which]}
    targets = cloud.call(
        SERVICE, "describe_scalable_targets", f"looking for what scales {name}", **asked
    )["ScalableTargets"]
    places = [f"sagemaker|{which}|{each['ScalableDimension']}" for each in targets]
    return [
        each
        for n, place in enumerate(places)
        for each in scaling_of(place, scaling_rule(name), ("Endpoint",), n)
    ]


def objects_of(cloud: Cloud, name: str, models: Sequence[Resource]) -> list[Resource]:
    """All that was ever uploaded for it, also for versions that are not kept any more."""
    bucket, own = (
        own_bucket(cloud.account, cloud.region),
        re.compile(re.escape(uploads(name)) + "[0-9a-f]{16}/model.tar.gz"),
    )
    doing = f"listing s3://{bucket}/{uploads(name)}"
    found = cloud.listed(
        "s3", "list_objects_v2", "Contents", doing, Bucket=bucket, Prefix=uploads(name)
    )
    urls = {f"{bucket}/{each['Key']}" for each in found if own.fullmatch(each["Key"])}
    for model in models:
        there = KINDS["AWS::SageMaker::Model"].observe(cloud, model.name)
        if there is not None:
            urls.add(there.properties["PrimaryContainer"]["ModelDataUrl"].removeprefix("s3://"))
    return numbered("ModelData", "Tsx::S3::Object", sorted(urls))


def _variant(variant: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    shown = {
        key: variant[key]
        for key in ("VariantName", "ModelName", "InstanceType", "ServerlessConfig")
        if key in variant
    }
    return shown | {
        key: now[key]
        for key in ("CurrentInstanceCount", "DesiredInstanceCount", "CurrentWeight")
        if key in now
    }
