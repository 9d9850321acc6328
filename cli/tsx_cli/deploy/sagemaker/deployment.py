"""A deployment with a SageMaker endpoint of its own: its resources, versions and health."""

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
    existing_scaling_resources,
    scaled_dimensions,
    without_foreign_scaling,
)
from tsx_cli.deploy.aws.kinds.cloudwatch import alarm_states, alarms_of
from tsx_cli.deploy.aws.kinds.iam import own_role
from tsx_cli.deploy.aws.session import Cloud, own_bucket, translate_errors
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import tag_map
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource, ids_of, numbered_resources, owned
from tsx_cli.deploy.sagemaker.kinds import CHANGING_STATUSES, KINDS
from tsx_cli.deploy.sagemaker.resources import (
    VARIANT,
    name_prefix,
    resources,
    scaling_rule,
    upload_prefix,
)
from tsx_cli.deploy.spec import DeploySpec

SCALING_AND_ALARMS = frozenset({TARGET, POLICY, "AWS::CloudWatch::Alarm"})


class SageMakerPlatform:
    """A deployment with an endpoint of its own."""

    def wanted_resources(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        return resources(spec, facts)

    def existing_resources(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        role = own_role(cloud, name, "sagemaker")
        # The endpoint needs the role until it is deleted.
        role_ids = ids_of(role)
        models = numbered_resources(
            "Model", "AWS::SageMaker::Model", names_of(cloud, "model", name_prefix(name)), role_ids
        )
        needs = ids_of(models)
        names = names_of(cloud, "endpoint_config", name_prefix(name))
        configs = numbered_resources("Config", "AWS::SageMaker::EndpointConfig", names, needs)
        alarms = numbered_resources(
            "Alarm", "AWS::CloudWatch::Alarm", alarms_of(cloud, name, "EndpointName")
        )
        endpoint = KINDS["AWS::SageMaker::Endpoint"].observe(cloud, name)
        existing = [*role, *models, *configs, *alarms]
        if owned(endpoint, name):
            needs = ids_of((*configs, *alarms))
            existing += [
                Resource("Endpoint", "AWS::SageMaker::Endpoint", name, {}, needs),
                *_existing_scaling_resources(cloud, name),
            ]
        return [*(objects_of(cloud, name, models) if purge else []), *existing]

    def obsolete_resources(
        self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        """Return surplus configurations with their models, and unwanted alarms and scaling."""
        names = {resource.name for resource in wanted}
        other_versions = [
            version for version in self.versions(cloud, spec.name) if version.id not in names
        ]
        # Even the current version may be surplus, because deletions come after the update.
        surplus = {version.id for version in other_versions[: -(spec.keep - 1) or None]}
        existing = self.existing_resources(cloud, spec.name)
        configs = [
            resource for resource in existing if resource.kind == "AWS::SageMaker::EndpointConfig"
        ]
        used_models = {
            model
            for resource in configs
            if resource.name not in surplus
            for model in _models_of(cloud, resource.name)
        } | names
        models = [
            resource
            for resource in existing
            if resource.kind == "AWS::SageMaker::Model" and resource.name not in used_models
        ]
        extras = [
            resource
            for resource in existing
            if resource.kind in SCALING_AND_ALARMS and resource.name not in names
        ]
        extras = without_foreign_scaling(cloud, extras, scaling_rule(spec.name))
        return [*models, *(resource for resource in configs if resource.name in surplus), *extras]

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        endpoint = KINDS["AWS::SageMaker::Endpoint"].observe(cloud, name)
        current = None if endpoint is None else endpoint.properties["EndpointConfigName"]
        with translate_errors(f"listing the configurations of {name}"):
            client = cloud.client("sagemaker")
            configs = [
                client.describe_endpoint_config(EndpointConfigName=config_name)
                for config_name in names_of(cloud, "endpoint_config", name_prefix(name))
            ]
            tags = [
                tag_map(client.list_tags(ResourceArn=config["EndpointConfigArn"])["Tags"])
                for config in configs
            ]
        pairs = sorted(zip(configs, tags, strict=True), key=lambda pair: pair[0]["CreationTime"])
        return [
            DeployedVersion(
                number,
                config["EndpointConfigName"],
                config["CreationTime"],
                config_tags,
                config["EndpointConfigName"] == current,
            )
            for number, (config, config_tags) in enumerate(pairs, start=1)
        ]

    def rollback_resources(
        self, cloud: Cloud, name: str, version: DeployedVersion
    ) -> list[Resource]:
        """Return the resources of an earlier version.

        Raises:
            CliError: The endpoint is changing, so the previous version is not certain.
        """
        endpoint = KINDS["AWS::SageMaker::Endpoint"].observe(cloud, name)
        if (
            endpoint is not None
            and endpoint.state == "changing"
            and endpoint.outputs["pending"] != version.id
        ):
            raise CliError(
                f"{name} is {endpoint.outputs['status']}, and SageMaker accepts no changes until"
                " that ends; a canary goes back by itself when an alarm goes off. `tsx deploy"
                " status` shows its progress: roll back after that"
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

    def promotion_resources(self, cloud: Cloud, name: str) -> list[Resource]:
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
        current_variants = {
            variant["VariantName"]: variant for variant in endpoint.outputs["variants"]
        }
        return {
            "region": cloud.region,
            "status": endpoint.outputs["status"],
            # The reason of a changing endpoint only repeats its status.
            "reason": "" if endpoint.reason in CHANGING_STATUSES else endpoint.reason,
            "model": endpoint.tags.get("tsx:model"),
            "image": endpoint.tags.get("tsx:image-digest"),
            "configuration": endpoint.properties["EndpointConfigName"],
            "moving to": endpoint.outputs["pending"],
            "variants": [
                _variant(variant, current_variants.get(variant["VariantName"], {}))
                for variant in variants
            ],
            "alarms": alarm_states(cloud, alarms_of(cloud, name, "EndpointName")),
            "scales": scaled_dimensions(_existing_scaling_resources(cloud, name)),
        }

    def address(self, cloud: Cloud, name: str) -> dict[str, str]:
        """Return the parameters of a request that name the deployment."""
        return {"EndpointName": name}

    def invoke(
        self, cloud: Cloud, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        with translate_errors(f"asking {name}"):
            request = {
                **self.address(cloud, name),
                "Body": body,
                "ContentType": content_type,
                **({"Accept": accept} if accept else {}),
            }
            response = cloud.client("sagemaker-runtime").invoke_endpoint(**request)
            return Response.complete(response["Body"].read(), response.get("ContentType"))


def names_of(cloud: Cloud, kind: str, prefix: str) -> list[str]:
    """Return the names of models or configurations with a prefix.

    Only names with eight digits of a hash after the prefix count, so `tsx-a-` does not match
    `tsx-a-b-`.
    """
    key = "".join(map(str.title, kind.split("_")))
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{8}")
    items = cloud.list_items(
        "sagemaker",
        f"list_{kind}s",
        f"{key}s",
        f"listing what begins with {prefix}",
        NameContains=prefix,
    )
    return sorted(item[f"{key}Name"] for item in items if pattern.fullmatch(item[f"{key}Name"]))


def _models_of(cloud: Cloud, config: str) -> Iterator[str]:
    observed = KINDS["AWS::SageMaker::EndpointConfig"].observe(cloud, config)
    if observed is not None:
        yield from (variant["ModelName"] for variant in observed.properties["ProductionVariants"])


def _existing_scaling_resources(cloud: Cloud, name: str) -> list[Resource]:
    resource_id = f"endpoint/{name}/variant/{VARIANT}"
    arguments = {"ServiceNamespace": "sagemaker", "ResourceIds": [resource_id]}
    targets = cloud.call(
        SERVICE, "describe_scalable_targets", f"looking for what scales {name}", **arguments
    )["ScalableTargets"]
    target_names = [f"sagemaker|{resource_id}|{target['ScalableDimension']}" for target in targets]
    return [
        resource
        for n, target_name in enumerate(target_names)
        for resource in existing_scaling_resources(
            target_name, scaling_rule(name), ("Endpoint",), n
        )
    ]


def objects_of(cloud: Cloud, name: str, models: Sequence[Resource]) -> list[Resource]:
    """Return all objects that were uploaded for a deployment's versions."""
    bucket = own_bucket(cloud.account, cloud.region)
    pattern = re.compile(re.escape(upload_prefix(name)) + "[0-9a-f]{16}/model.tar.gz")
    doing = f"listing s3://{bucket}/{upload_prefix(name)}"
    objects = cloud.list_items(
        "s3", "list_objects_v2", "Contents", doing, Bucket=bucket, Prefix=upload_prefix(name)
    )
    urls = {f"{bucket}/{item['Key']}" for item in objects if pattern.fullmatch(item["Key"])}
    for model in models:
        observed = KINDS["AWS::SageMaker::Model"].observe(cloud, model.name)
        if observed is not None:
            urls.add(observed.properties["PrimaryContainer"]["ModelDataUrl"].removeprefix("s3://"))
    return numbered_resources("ModelData", "Tsx::S3::Object", sorted(urls))


def _variant(variant: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        key: variant[key]
        for key in ("VariantName", "ModelName", "InstanceType", "ServerlessConfig")
        if key in variant
    }
    return fields | {
        key: current[key]
        for key in ("CurrentInstanceCount", "DesiredInstanceCount", "CurrentWeight")
        if key in current
    }
